"""Folders of somebody else: nothing that they name runs before a person has said so."""

import json
import os
import shutil
import stat
import sys
import threading

import pytest

from support.running import micro_recipe, micro_toml, train
from turnwise.cli.commands import main
from turnwise.recipe.parse import parse_recipe
from turnwise.runs.checkpoint import write_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.runs.trust import is_own, named_in, own_key, recipe_of_run, stamp, state_folder

EVIL = "from pathlib import Path\nPath({ran!r}).touch()\nfrom turnwise.envs.hops import Hops\nrows = list\n"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Is there once the module evil_module has been imported."""
    path = tmp_path / "ran"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "evil_module.py").write_text(EVIL.format(ran=str(path)))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield path
    sys.modules.pop("evil_module", None)


def folder_of(tmp_path, **entry):
    """A run folder as somebody may send it, with an environment of which something is known."""
    recipe = micro_recipe(tmp_path)
    config = recipe.model_dump(mode="json")
    config["env"] = [{"name": "hops", **entry}]
    folder = RunFolder.create(tmp_path / "run", config)
    write_checkpoint(folder.checkpoints, 1, {}, lambda path: None)
    return folder


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("turnwise: ")
    assert "\n" not in printed
    return printed


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"name": "evil_module:Hops", "dataset": "x"}, 'env.name = "evil_module:Hops"'),
        ({"agent": "evil_module:rows"}, 'env.agent = "evil_module:rows"'),
        ({"agent": "touch {ran}"}, 'env.agent = "touch {ran}"'),
        ({"data": "evil_module:rows"}, 'env.data = "evil_module:rows"'),
        ({"data": "x.jsonl", "heldout": "evil_module:rows"}, 'env.heldout = "evil_module:rows"'),
        ({"name": "verifiers:lab", "settings": {"python": "{ran}"}}, 'env.settings.python = "{ran}"'),
        ({"name": "gymnasium:evil_module:X-v0"}, 'env.name = "gymnasium:evil_module:X-v0"'),
    ],
)
def test_what_a_folder_names_is_not_run(tmp_path, capsys, ran, entry, named):
    entry = json.loads(json.dumps(entry).replace("{ran}", str(ran)))
    folder = folder_of(tmp_path, **entry)
    for command in (["eval", str(folder.path)], ["train", "--resume", str(folder.path)]):
        printed = refused(capsys, *command)
        assert printed.startswith(f"turnwise: {folder.path} was not made by you on this machine")
        assert named.replace("{ran}", str(ran)) in printed
        assert "add --trust" in printed
    assert not ran.exists()


def test_a_person_may_trust_a_folder_and_is_not_asked_again(tmp_path, capsys, ran):
    folder = folder_of(tmp_path, name="evil_module:Hops", dataset="x")
    assert "add --trust" in refused(capsys, "eval", str(folder.path))
    assert "--trust" not in refused(capsys, "eval", str(folder.path), "--trust")  # its model is empty
    assert ran.exists()
    assert "--trust" not in refused(capsys, "eval", str(folder.path))


def test_built_in_environments_need_no_trust(tmp_path, capsys):
    folder = folder_of(tmp_path, settings={"window": False}, data=str(tmp_path / "rows.jsonl"))
    assert named_in(recipe_of_run(folder)) == []
    stamp(folder, recipe_of_run(folder))
    assert not (folder.path / "trust").exists()
    assert not state_folder().exists()  # for which no key is needed


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("cluster", {"placement": "colocated", "address": "10.0.0.7:6379"}),
        ("engine", {"name": "vllm", "vllm": {"servers": ["http://10.0.0.7:8000"]}}),
        ("engine", {"name": "vllm", "vllm": {"folder": "/somewhere"}}),
        ("engine", {"name": "sglang", "sglang": {"servers": ["http://10.0.0.7:30000"]}}),
        ("env", [{"name": "search", "settings": {"url": "http://10.0.0.7"}}]),
        ("env", [{"name": "hops", "data": "hf:somebody/rows"}]),
    ],
)
def test_places_that_are_reached_are_named_too(tmp_path, section, value):
    config = {"env": [{"name": "hops"}], section: value}
    folder = RunFolder.create(tmp_path / "run", config)
    with pytest.raises(ValueError, match="10.0.0.7|/somewhere|hf:somebody/rows"):
        recipe_of_run(folder)


def test_what_a_person_names_on_the_command_line_is_theirs(tmp_path):
    folder = folder_of(tmp_path, name="evil_module:Hops")
    assert recipe_of_run(folder, ["env.0.name=guess"]).env[0].name == "guess"
    assert recipe_of_run(folder, ["env.0.name=my_module:World"]).env[0].name == "my_module:World"
    with pytest.raises(ValueError, match="evil_module"):
        recipe_of_run(folder, ["env.0.weight=2"])
    with pytest.raises(ValueError, match="evil_module"):
        recipe_of_run(folder, ["env.0.name=evil_module:Hops"])  # said twice, and not only by them


def stamped(tmp_path, **entry):
    """A run of this user's."""
    folder = folder_of(tmp_path, **(entry or {"agent": "true"}))
    stamp(folder, recipe_of_run(folder, trust="needless"))
    return folder


def test_a_stamp_holds_for_copies_and_not_for_another_config(tmp_path):
    folder = stamped(tmp_path)
    recipe_of_run(folder)
    shutil.copytree(folder.path, tmp_path / "copy")
    copy = RunFolder.open(tmp_path / "copy")
    assert recipe_of_run(copy).env[0].agent == "true"
    copy.config.write_text(copy.config.read_text().replace('"true"', '"false"'))
    (copy.path / "SHA256SUMS").unlink()  # as whoever changes a config knows how to
    with pytest.raises(ValueError, match='env.agent = "false"'):
        recipe_of_run(copy)


def test_a_stamp_is_invalid_for_another_user(tmp_path, monkeypatch):
    folder = stamped(tmp_path)
    monkeypatch.setenv("TURNWISE_STATE", str(tmp_path / "somebody else's"))
    with pytest.raises(ValueError, match="was not made by you"):
        recipe_of_run(folder)
    for forged in (b"", b"0" * 64, b"\xff\xfe", b"true"):
        (folder.path / "trust").write_bytes(forged)
        assert not is_own(folder, folder.config.read_bytes())


def test_reading_a_folder_does_not_stamp_it(tmp_path):
    folder = folder_of(tmp_path, agent="true")
    recipe_of_run(folder, trust="needless")
    with pytest.raises(ValueError, match="was not made by you"):
        recipe_of_run(folder)


def test_there_is_one_key_and_only_the_user_can_read_it():
    made = []
    threads = [threading.Thread(target=lambda: made.append(own_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert len(made[0]) == 32
    assert stat.S_IMODE(os.stat(state_folder() / "key").st_mode) == 0o600
    assert os.listdir(state_folder()) == ["key"]


def test_without_a_place_for_a_key_runs_start_and_are_asked_for_later(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURNWISE_STATE", str(tmp_path / "file" / "below"))
    folder = stamped(tmp_path)
    assert not (folder.path / "trust").exists()
    with pytest.raises(ValueError, match="add --trust"):
        recipe_of_run(folder)
    recipe_of_run(folder, trust="granted")


def test_a_refusal_moves_no_cursor_and_says_how_much_it_leaves_out(tmp_path, capsys):
    folder = folder_of(tmp_path, agent="echo \x1b[2J\n\r" + "x" * 5000)
    printed = refused(capsys, "eval", str(folder.path))
    assert "\x1b" not in printed
    assert "\\u001b[2J\\n\\r" in printed
    assert "characters more)" in printed
    assert len(printed) < 1000


def test_trust_goes_with_folders(tmp_path, capsys):
    assert "goes with --resume" in refused(capsys, "train", str(micro_toml(tmp_path)), "--trust")


def test_a_run_of_the_same_user_resumes_without_consent(tmp_path, ran):
    """What start has stamped."""
    named = ["env.0.name=evil_module:Hops", "env.0.dataset=hops"]
    recipe = micro_recipe(tmp_path, *named, "steps=1", "groups_per_step=1", "sft.updates=0", "evaluation.final_tasks=2")
    assert train(recipe) is not None
    assert main(["eval", recipe.out]) == 0


@pytest.mark.slow
def test_commands_that_need_no_environment_run_none(tmp_path, capsys, ran):
    recipe = micro_recipe(tmp_path, "steps=2")
    train(recipe)
    folder = RunFolder.open(recipe.out)
    config = json.loads(folder.config.read_text())
    config["env"] = [{"name": "evil_module:Hops", "dataset": "hops", "agent": "evil_module:rows"}]
    folder.config.write_text(json.dumps(config))
    (folder.path / "SHA256SUMS").unlink()
    for command in ("verify", "cost", "breaks"):
        main([command, recipe.out])
        assert "--trust" not in capsys.readouterr().err
    from turnwise.cli.serve import target_of

    assert target_of(recipe.out, None, []).version == 2
    assert not ran.exists()


def test_a_teacher_of_the_hub_is_asked_about_and_the_policy_is_not():
    """The checkpoint has the policy; a teacher would be fetched."""
    name = f"hf:org/tiny@{'a' * 40}"
    tree = {"env": [{"name": "hops"}], "model": {"path": name}, "teacher": name, "credit": {"name": "distill"}}
    tree["kl"] = {"coefficient": 0.1, "reference": name}
    assert named_in(parse_recipe(tree, "test")) == [f'teacher = "{name}"', f'kl.reference = "{name}"']
