"""Models of the Hub on the command line: train, resume, eval, verify, serve and push by name, against a mirror."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib

import pytest

from support.hub_mirror import TOKEN, point_to, running_mirror, variables
from support.running import micro_toml, mistake, untimed
from turnwise.cli.commands import main
from turnwise.cli.serve import target_of
from turnwise.data.hub import HubName
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.recipe.parse import load_recipe
from turnwise.runs.folder import RunFolder

NAME = "org/tiny"
SHORT = ["model.hidden=", "model.layers=", "sft.updates=0", "steps=2", "evaluation.every=0", "evaluation.final_tasks=4"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """(a mirror with a small model, the folder of a run that started from it by its name, the home of the cache)."""
    folder = tmp_path_factory.mktemp("hub")
    with running_mirror() as mirror, pytest.MonkeyPatch.context() as patch:
        for name in ("CACHE", "STATE"):
            patch.setenv(f"TURNWISE_{name}", str(folder / name))
        point_to(patch, mirror, folder / "home")
        tokenizer = build_tokenizer(["get amber", "answer elm", "leads to", "start amber, links 1"])
        save_policy(build_model(tokenizer, 32, 1, 160, 0), tokenizer, folder / "model")
        mirror.put_folder(NAME, folder / "model", **{"pytorch_model.bin": b"a pickle"})
        run = folder / "run"
        assert main(["train", str(micro_toml(folder)), f"out={run}", f"model={NAME}", *SHORT]) == 0
        yield mirror, run, folder / "home"


@pytest.fixture
def here(hub, monkeypatch):
    """The same with this test's own patches."""
    mirror, run, home = hub
    point_to(monkeypatch, mirror, home)
    return mirror, run, home


def test_a_run_records_the_commit(here):
    mirror, run, home = here
    commit = mirror.refs[NAME]["main"]
    assert RunFolder.open(run).read_config()["model"]["path"] == f"hf:{NAME}@{commit}"
    cached = home / "hub" / "models--org--tiny" / "snapshots" / commit
    assert not list(cached.glob("*.bin"))
    start = load_model(run / "checkpoints" / "step-000000").state_dict()
    assert all((start[name] == tensor).all() for name, tensor in load_model(cached).state_dict().items())


def test_a_run_is_resumed_and_evaluated_without_the_hub_and_without_its_cache(here, tmp_path, monkeypatch, capsys):
    """A checkpoint has all of the policy."""
    _, run, _ = here
    shutil.copytree(run, copy := tmp_path / "run")
    point_to(monkeypatch, None, tmp_path / "empty", offline=True)
    assert main(["train", "--resume", str(copy), "steps=3"]) == 0
    assert [line["step"] for line in untimed(copy / "metrics.jsonl")] == [0, 1, 2, 3]
    assert RunFolder.open(copy).read_config()["model"]["path"].startswith(f"hf:{NAME}@")
    assert main(["eval", str(copy), "--tasks", "2"]) == 0
    capsys.readouterr()
    main(["verify", str(copy)])  # of attempts that all earn nothing there is little to prove
    assert "Hub" not in capsys.readouterr().err


def test_a_name_is_evaluated_and_served(here, tmp_path, capsys):
    mirror, _, _ = here
    commit = mirror.refs[NAME]["main"]
    recipe = str(micro_toml(tmp_path))
    assert f"{NAME}@main is a model; say how to evaluate it" in mistake(capsys, "eval", NAME)
    assert "--checkpoint goes with a run" in mistake(capsys, "eval", NAME, "--recipe", recipe, "--checkpoint", "1")
    assert main(["eval", NAME, "--recipe", recipe, "--tasks", "2", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"{NAME}: commit {commit}, in " in printed
    assert f"{NAME}@{commit}\n" in printed
    target = target_of(NAME, None, ())
    assert target.name == f"{NAME}@{commit}"
    assert target.recipe.rollout.max_trajectory_tokens == 1024  # as its config.json says


def test_mistakes_are_one_line_before_anything_starts(here, tmp_path, capsys, monkeypatch):
    mirror, _, home = here
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "none"
    start = ["train", recipe, f"out={out}", *SHORT]
    assert "org/absent is neither a folder here nor a model" in mistake(capsys, *start, "model=org/absent")
    assert "org/absent is neither" in mistake(capsys, *start, "teacher=org/absent", "credit=distill")
    assert "org/absent is neither" in mistake(capsys, *start, "kl=0.1", "kl.reference=org/absent")
    assert "org/absent is neither" in mistake(capsys, "serve", "org/absent")
    mirror.asked.clear()
    assert "did you mean grpo?" in mistake(capsys, *start, "model=org/absent", "credit=grop")
    assert mirror.asked == []  # nothing is fetched for a recipe that cannot work
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert 'write model.path = "hf:models/warm"' in mistake(capsys, *start, "model=models/warm")
    assert mirror.asked == []
    point_to(monkeypatch, None, home, offline=True)
    assert "HF_HUB_OFFLINE is set; unset it" in mistake(capsys, *start, "model=org/absent")
    assert not out.exists()


# ---------------------------------------------------------------- push


def test_a_dry_run_writes_a_model_folder_with_a_card(here, tmp_path, capsys, monkeypatch):
    _, run, home = here
    point_to(monkeypatch, None, home, offline=True)  # it needs neither a token nor a network
    assert main(["push", str(run), "me/agent", "--dry-run", str(tmp_path / "pushed")]) == 0
    assert "look at" in capsys.readouterr().out
    found = {path.name for path in (tmp_path / "pushed").iterdir()}
    assert found == {
        *("README.md", "recipe.toml", "curve.png", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert f"base_model: {NAME}\n" in card
    last = untimed(run / "metrics.jsonl")[-1]
    low, high = (f"{last[f'eval/greedy/success_{end}']:.3f}" for end in ("low", "high"))
    assert f"| greedy | after | {last['eval/greedy/success']:.3f} | {low} to {high} | 4 | 4 |" in card
    assert card.count("| before |") == 2
    assert "turnwise eval me/agent --recipe recipe.toml" in card
    assert "torch 2." in card
    assert str(run) not in card
    assert "exists already" in mistake(capsys, "push", str(run), "me/agent", "--dry-run", str(tmp_path / "pushed"))
    published = load_recipe(tmp_path / "pushed" / "recipe.toml")
    recorded = load_recipe(micro_toml(tmp_path), [f"model={published.model.path}", *SHORT])
    own = {"out", "engine", "checkpoints", "model"}
    assert published.model_dump(exclude=own) == recorded.model_dump(exclude=own)
    assert "out" not in tomllib.loads((tmp_path / "pushed" / "recipe.toml").read_text())


def test_a_push_makes_a_model_that_can_be_evaluated_by_its_name(here, tmp_path, capsys, monkeypatch):
    mirror, run, _ = here
    assert "set HF_TOKEN, or run: hf auth login" in mistake(capsys, "push", str(run), "me/agent")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token is not accepted" in mistake(capsys, "push", str(run), "me/agent")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "may not write to others/agent" in mistake(capsys, "push", str(run), "others/agent")
    assert main(["push", str(run), "me/agent", "--private"]) == 0
    commit = mirror.refs["me/agent"]["main"]
    assert f"pushed: {mirror.url}/me/agent/commit/{commit}" in capsys.readouterr().out
    assert mirror.created["me/agent"]["visibility"] == "private"
    assert mirror.messages[-1].startswith("Step 2, trained with turnwise")
    weights = (run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()
    assert mirror.files("me/agent")["model.safetensors"] == weights
    out = str(tmp_path / "out")
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(mirror.files("me/agent")["recipe.toml"])
    assert main(["eval", "me/agent", "--recipe", str(recipe), "--tasks", "2", "--out", out]) == 0
    mirror.put("me/agent", {**mirror.files("me/agent"), "model-1-of-2.safetensors": b"of an earlier push"})
    assert main(["push", str(run), "me/agent", "--checkpoint", "0"]) == 0  # and now another step
    assert "model-1-of-2.safetensors" not in mirror.files("me/agent")
    assert b"the weights after step 0" in mirror.files("me/agent")["README.md"]


def test_what_is_damaged_or_not_there_is_not_pushed(here, tmp_path, capsys):
    _, run, _ = here
    shutil.copytree(run, copy := tmp_path / "run")
    push = ["push", str(copy), "me/agent", "--dry-run", str(tmp_path / "out")]
    assert "has no checkpoint of step 77" in mistake(capsys, *push, "--checkpoint", "77")
    assert '"agent" is no name of a model on the Hub' in mistake(capsys, "push", str(copy), "agent")
    metrics = copy / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace("success", "suxxess", 1))
    assert "metrics.jsonl is damaged" in mistake(capsys, *push)
    metrics.write_text(text)
    weights = copy / "checkpoints" / "step-000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "model.safetensors does not match its checksum; push another one" in mistake(capsys, *push)
    assert not (tmp_path / "out").exists()
    assert main([*push, "--checkpoint", "0"]) == 0


@pytest.mark.slow
def test_adapters_are_pushed_with_their_model_named(here, tmp_path, capsys, monkeypatch):
    pytest.importorskip("peft")
    mirror, _, _ = here
    commit, recipe, run = mirror.refs[NAME]["main"], str(micro_toml(tmp_path)), tmp_path / "lora"
    assert main(["train", recipe, f"out={run}", f"model={NAME}", *SHORT, "lora=4", "entropy=0.1"]) == 0
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["push", str(run), "me/adapters"]) == 0
    assert f"adapters of {NAME}@{commit}" in capsys.readouterr().out
    files = mirror.files("me/adapters")
    assert "model.safetensors" not in files
    settings = json.loads(files["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, commit)
    assert b"base_model_relation: adapter" in files["README.md"]
    _, folder = HubName.parse("me/adapters").fetched(print)
    pushed, own = load_model(folder).state_dict(), load_model(run / "checkpoints" / "step-000002").state_dict()
    assert all((pushed[name] == tensor).all() for name, tensor in own.items())
    assert target_of("me/adapters", None, ()).recipe.rollout.max_trajectory_tokens == 1024
    assert main(["eval", "me/adapters", "--recipe", recipe, "--tasks", "2", "--out", str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_adapters_of_a_model_that_nobody_has_are_pushed_merged(here, tmp_path, capsys):
    pytest.importorskip("peft")
    recipe, run, out = str(micro_toml(tmp_path)), tmp_path / "lora", tmp_path / "pushed"
    assert main(["train", recipe, f"out={run}", *SHORT[2:], "lora=4", "entropy=0.1"]) == 0
    assert main(["push", str(run), "me/merged", "--dry-run", str(out)]) == 0
    assert "the whole model, adapters added" in capsys.readouterr().out
    assert not (out / "adapter_config.json").exists()
    pushed, own = load_model(out).state_dict(), load_model(run / "checkpoints" / "step-000002").state_dict()
    assert all((pushed[name] == tensor).all() for name, tensor in own.items())


@pytest.mark.slow
def test_a_process_of_its_own_trains_a_model_by_its_name(here, tmp_path):
    """With the environment variables alone, as a person sets them."""
    mirror, _, _ = here
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    command = [sys.executable, "-m", "turnwise.cli", "train", recipe, f"out={out}", f"model={NAME}@main", *SHORT]
    given = {**os.environ, **variables(mirror, tmp_path / "home")}
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}: fetching from {mirror.url} (main)" in done.stdout
    offline = {**given, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    absent = [*command[:4], recipe, f"out={out}-2", "model=org/absent", *SHORT]
    done = subprocess.run(absent, env=offline, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("turnwise: org/absent@main is not in the Hub cache")
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- nothing else reaches out


def test_a_run_that_names_no_hub_connects_to_nobody(tmp_path, monkeypatch, capsys):
    """Training, evaluation and what looks at a run: every attempt at a connection or at a name is counted, those within
    this machine aside. HF_HUB_OFFLINE does not hold here, so that nothing but the code itself keeps it from reaching
    out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reached: list[object] = []

    def is_local(address: object) -> bool:
        return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")

    for name in ("connect", "connect_ex", "sendto"):
        original = getattr(socket.socket, name)

        def watched(self, *arguments, original=original):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not is_local(arguments[-1]):
                reached.append(arguments[-1])
                raise OSError("nobody is to be reached")
            return original(self, *arguments)

        monkeypatch.setattr(socket.socket, name, watched)
    ask = socket.getaddrinfo

    def asked(host, *arguments, **settings):
        if host not in (None, "", "127.0.0.1", "::1", "localhost", socket.gethostname()):
            reached.append(host)
            raise socket.gaierror("nobody is to be asked")
        return ask(host, *arguments, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=1", "evaluation.final_tasks=4"]) == 0
    assert main(["eval", str(out), "--tasks", "2"]) == 0
    assert main(["why", str(out)]) in (0, 1)
    assert main(["push", str(out), "me/agent", "--dry-run", str(tmp_path / "pushed")]) == 0
    assert reached == []
    with pytest.raises(OSError, match="nobody"):  # the test sees what it looks for
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    assert reached
    capsys.readouterr()
