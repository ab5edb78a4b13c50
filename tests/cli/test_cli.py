"""The command line as a person meets it: what works, and what a mistake looks like."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.running import micro_toml, mistake, untimed
from turnwise.cli.commands import main
from turnwise.runs.checkpoint import latest_checkpoint


def test_mistakes_in_a_recipe_are_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(micro_toml(tmp_path))
    out = f"out={tmp_path / 'run'}"
    assert "no recipe at nowhere.toml" in mistake(capsys, "train", "nowhere.toml")
    assert "name a recipe" in mistake(capsys, "train")
    assert "did you mean learning_rate?" in mistake(capsys, "train", recipe, out, "optimizer.learning_rat=1")
    assert "steps: Input should be a valid integer" in mistake(capsys, "train", recipe, out, "steps=many")
    assert "did you mean grpo?" in mistake(capsys, "train", recipe, out, "credit.name=grop")
    assert "takes no such setting" in mistake(
        capsys, "train", recipe, out, "credit.name=rloo", "credit.norm_by_std=true"
    )
    assert "did you mean hops?" in mistake(capsys, "train", recipe, out, "env.0.name=hop")
    assert "windw" in mistake(capsys, "train", recipe, out, "env.0.settings.windw=true")
    assert "is not an override" in mistake(capsys, "train", recipe, "max_lag")
    assert "dynamic_sampling" in mistake(
        capsys, "train", recipe, out, "filter.name=dynamic_sampling", "credit.name=reinforce"
    )
    assert "no model folder" in mistake(
        capsys, "train", recipe, out, "model.path=nowhere", "model={path='nowhere'}", "sft.updates=0"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_folders_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(micro_toml(tmp_path))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").write_text("precious")
    assert "--resume" in mistake(capsys, "train", recipe, f"out={taken}")
    assert (taken / "something").read_text() == "precious"
    (tmp_path / "file").write_text("")
    assert "file is in the way" in mistake(capsys, "train", recipe, f"out={tmp_path / 'file' / 'run'}")
    assert "cannot write" in mistake(capsys, "train", recipe, "out=/proc/run")
    assert "not the folder of a run" in mistake(capsys, "train", "--resume", str(taken))
    assert "takes the recipe from the run folder" in mistake(capsys, "train", recipe, "--resume", str(taken))
    assert "not the folder of a run" in mistake(capsys, "eval", str(taken))
    assert "there is nothing at" in mistake(capsys, "eval", str(tmp_path / "nowhere"))


def row(printed: str, name: str) -> list[str]:
    """The cells of a row of an evaluation's table."""
    (line,) = [line for line in printed.splitlines() if line.split()[:1] == [name] and "/" not in line]
    return line.split()


def test_train_then_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "before: held-out success" in printed
    assert "after:  held-out success" in printed
    assert "training 2/2" in printed
    assert main(["eval", str(out), "evaluation.final_tasks=8"]) == 0
    printed = capsys.readouterr().out
    assert "step 2 of" in printed
    assert "attempts, sampled and greedy 16/16  success" in printed  # progress
    assert row(printed, "sampled")[-3:] == ["8", "8", "0"]
    assert main(["eval", str(out), "--checkpoint", "0"]) == 0
    assert "step 0 of" in capsys.readouterr().out
    assert "no checkpoint of step 77" in mistake(capsys, "eval", str(out), "--checkpoint", "77")


def test_eval_reproduces_the_last_evaluation_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=2", "sft.updates=40", "evaluation.attempts=2"]) == 0
    capsys.readouterr()
    last = {name: value for name, value in untimed(out / "metrics.jsonl")[-1].items() if name.startswith("eval/")}
    assert main(["eval", str(out)]) == 0
    printed = capsys.readouterr().out
    made = out / "evaluations" / "eval-001"
    assert f"every attempt is in {made}/" in printed
    assert [{k: v for k, v in line.items() if k != "step"} for line in untimed(made / "metrics.jsonl")] == [last]
    for kind in ("sampled", "greedy"):
        low, high = (f"{last[f'eval/{kind}/success_{end}']:.3f}" for end in ("low", "high"))
        assert row(printed, kind)[1:5] == [f"{last[f'eval/{kind}/success']:.3f}", low, "to", high]
        name = f"step-000002-{kind}.jsonl"
        assert (made / name).read_bytes() == (out / "evaluations" / name).read_bytes()
    assert "pass@2" in printed


def test_eval_of_a_model_needs_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = str(micro_toml(tmp_path)), str(tmp_path / "warm")
    assert main(["sft", recipe, f"out={model}", "sft.updates=2"]) == 0
    capsys.readouterr()
    printed = mistake(capsys, "eval", model)
    assert printed == f"turnwise: {model} is a model; say how to evaluate it with --recipe RECIPE"
    assert "--checkpoint goes with a run" in mistake(capsys, "eval", model, "--recipe", recipe, "--checkpoint", "3")
    assert "is a recipe itself" in mistake(capsys, "eval", recipe, "--recipe", recipe)
    assert "--checkpoint goes with a run" in mistake(capsys, "eval", recipe, "--checkpoint", "3")
    out = tmp_path / "out"
    # Overrides may follow an option.
    assert main(["eval", model, "--recipe", recipe, "--tasks", "3", "--out", str(out), "rollout.max_turns=2"]) == 0
    lines = [json.loads(line) for line in (out / "step-000000-greedy.jsonl").read_text().splitlines()]
    assert len({line["task"] for line in lines}) == 3
    assert max(line["turn"] for line in lines) == 1
    assert "holds something already" in mistake(capsys, "eval", model, "--recipe", recipe, "--out", str(out))
    (tmp_path / "warm" / "model.safetensors").unlink()
    broken = mistake(capsys, "eval", model, "--recipe", recipe, "--out", str(tmp_path / "none"))
    assert "cannot load the model" in broken
    assert not (tmp_path / "none").exists()


def test_eval_of_a_recipe_is_of_the_model_that_training_would_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=1"]) == 0
    capsys.readouterr()
    assert main(["eval", recipe, "--attempts", "1"]) == 0
    first = untimed(out / "metrics.jsonl")[0]
    assert row(capsys.readouterr().out, "greedy")[1] == f"{first['eval/greedy/success']:.3f}"
    assert (tmp_path / "runs" / "micro-0-eval-001" / "metrics.jsonl").exists()
    assert not (tmp_path / "runs" / "micro-0").exists()  # it is for training to make


def test_eval_at_tasks_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = micro_toml(tmp_path).read_text().replace("[rollout]", '[[env]]\nname = "guess"\n[rollout]', 1)
    (tmp_path / "both.toml").write_text(text)
    recipe, tasks, out = str(tmp_path / "both.toml"), tmp_path / "tasks.jsonl", tmp_path / "out"
    rows = [{"id": str(n), "dataset": "hops", "data": {"store": n, "links": 1}} for n in range(3)]
    rows += [{"id": "0", "dataset": "guess", "data": {"low": 3, "high": 9, "secret": 5}}]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ["--tasks", str(tasks), "--attempts", "2", "--out", str(out), "sft.updates=0"]
    assert main(["eval", recipe, *wanted]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "sampled")[-3:] == ["4", "8", "0"]
    datasets = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
    assert [name for name in datasets if name in ("hops", "guess")] == ["guess", "hops", "guess", "hops"]
    made = [json.loads(line) for line in (out / "step-000000-sampled.jsonl").open()]  # text may have other line breaks
    ids = [(line["dataset"], line["task"], line["attempt"], line["turn"]) for line in made]
    assert len(set(ids)) == len(ids)
    assert {one[:2] for one in ids} == {("hops", "0"), ("hops", "1"), ("hops", "2"), ("guess", "0")}
    tasks.write_text('{"id": "a", "dataset": "hop", "data": {}}\n')
    assert 'line 1: dataset: "hop" is no environment' in mistake(capsys, "eval", recipe, "--tasks", str(tasks))
    assert "give a number or a file" in mistake(capsys, "eval", recipe, "--tasks", str(tmp_path / "none.jsonl"))
    assert "final_tasks: Input should be greater" in mistake(capsys, "eval", recipe, "--tasks", "0")
    assert "attempts: Input should be greater" in mistake(capsys, "eval", recipe, "--attempts", "0")


def test_eval_says_where_tasks_are_fewer_or_attempts_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), str(tmp_path / "out")
    short = ["rollout.max_prompt_tokens=5", "rollout.max_trajectory_tokens=9", "sft.updates=0"]
    assert main(["eval", recipe, "--tasks", "100", "--out", out, *short]) == 0
    printed = capsys.readouterr().out
    assert "hops has only 64 held-out tasks" in printed
    assert row(printed, "sampled")[-3:] == ["64", "64", "64"]
    assert "attempts that failed have not succeeded" in printed


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["eval", "x", "--nonsense"], ["breaks", "x", "a=b"], ["eval", "x", "--tasks", "3", "-z"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


def test_ctrl_c_ends_an_evaluation_without_a_trace(tmp_path: Path) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "out"
    many = ["--tasks", "64", "--attempts", "500", "sft.updates=0"]
    command = [sys.executable, "-m", "turnwise.cli", "eval", recipe, "--out", str(out), *many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 600
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "stopped" in printed
    assert "Traceback" not in errors
    left = list(out.iterdir()) if out.exists() else []  # a process that ends at once leaves the empty folder
    assert left == []


def test_breaks_lists_causes_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    window = ["env.0.settings.window=true", "rollout.history=managed"]
    assert main(["train", recipe, f"out={out}", "steps=1", *window]) == 0
    capsys.readouterr()
    assert main(["breaks", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "extend the turn before" in lines[0]
    assert lines[2].split()[0] == "history"
    assert "for instance in step 1, task hops-" in lines[3]
    assert "<|im_start|>" in lines[4]
    shutil.rmtree(out / "checkpoints")
    assert main(["breaks", str(out)]) == 0
    assert "<|im_start|>" not in capsys.readouterr().out
    assert "not the folder of a run" in mistake(capsys, "breaks", str(tmp_path))
    for file in (out / "archive").iterdir():
        file.unlink()
    assert "has no steps yet" in mistake(capsys, "breaks", str(out))


def test_sft_writes_a_model_that_training_can_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = str(micro_toml(tmp_path)), tmp_path / "warm"
    assert main(["sft", recipe, f"out={model}", "sft.updates=2"]) == 0
    assert "exists already" in mistake(capsys, "sft", recipe, f"out={model}", "sft.updates=2")
    assert "sft.updates is 0" in mistake(capsys, "sft", recipe, "sft.updates=0")
    start = [f"model={{path='{model}', threads=1}}", "sft.updates=0", "steps=1"]
    assert main(["train", recipe, f"out={tmp_path / 'run'}", *start]) == 0


def test_sft_learns_from_conversations_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, data = str(micro_toml(tmp_path)), tmp_path / "data.jsonl"
    talk = [
        ("user", "start amber, links 1"),
        ("assistant", "get amber"),
        ("user", "leads to elm"),
        ("assistant", "answer elm"),
    ]
    line = json.dumps({"messages": [{"role": role, "content": content} for role, content in talk]})
    data.write_text(f"{line}\n\n{line}\n")
    assert main(["sft", recipe, f"out={tmp_path / 'm'}", f"sft={{data='{data}', updates=3, batch=2}}"]) == 0
    data.write_text(line + '\n{"messages": [{"role": "user"}]}\n')
    printed = mistake(capsys, "sft", recipe, f"out={tmp_path / 'n'}", f"sft={{data='{data}', updates=3, batch=2}}")
    assert "data.jsonl, row 2: " in printed
    printed = mistake(capsys, "sft", recipe, f"out={tmp_path / 'n'}", f"sft={{data='{data}', updates=3, noise=0.1}}")
    assert "noise and demonstrations apply" in printed


def test_play_ends_with_its_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["play", "hops"]) == 130
    assert capsys.readouterr().err.endswith("stopped before the attempt had ended\n")


def test_play_shows_what_the_model_would_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["get nothing", "hello", "answer elm"])
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    assert main(["play", "hops"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A line is a message.")
    assert "<|im_start|>user\nstart " in printed
    assert "no such name<|im_end|>\n<|im_start|>assistant\n" in printed
    assert "finished: total reward" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_writes_a_checkpoint_and_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "turnwise.cli",
        "train",
        recipe,
        f"out={out}",
        "steps=500",
        "checkpoints.every=400",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert f"turnwise train --resume {out}" in printed
    assert "Traceback" not in errors
    steps = [line["step"] for line in untimed(metrics)]
    assert latest_checkpoint(out / "checkpoints").step == steps[-1] >= 3
