"""The command line as a person meets it: what works, and what a mistake looks like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from running import micro_toml, untimed
from turnwise.cli import main
from turnwise.runs.checkpoint import latest_checkpoint


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a mistaken call prints."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("turnwise: ")
    assert "\n" not in printed
    return printed


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
    assert "zero_variance" in mistake(
        capsys, "train", recipe, out, "filter.name=zero_variance", "credit.name=reinforce"
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
    assert "remove the recipe" in mistake(capsys, "train", recipe, "--resume", str(taken))
    assert "not the folder of a run" in mistake(capsys, "eval", str(taken))


def test_train_then_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "before: held-out success" in printed
    assert "after:  held-out success" in printed
    assert "training 2/2" in printed
    assert main(["eval", str(out), "evaluation.final_tasks=8"]) == 0
    printed = capsys.readouterr().out
    assert "sampled: success" in printed
    assert "of 8 attempts" in printed
    assert main(["eval", str(out), "--checkpoint", "0"]) == 0
    assert "no checkpoint of step 77" in mistake(capsys, "eval", str(out), "--checkpoint", "77")


def test_eval_reproduces_the_last_evaluation_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(micro_toml(tmp_path)), tmp_path / "run"
    assert main(["train", recipe, f"out={out}", "steps=2"]) == 0
    capsys.readouterr()
    last = untimed(out / "metrics.jsonl")[-1]
    assert main(["eval", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"sampled: success {last['eval/sampled/success']:.3f}" in printed
    assert f"greedy: success {last['eval/greedy/success']:.3f}" in printed


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
    for pointer in (out / "checkpoints").glob("latest"):
        pointer.unlink()
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
    assert "line 2" in printed
    printed = mistake(capsys, "sft", recipe, f"out={tmp_path / 'n'}", f"sft={{data='{data}', updates=3, noise=0.1}}")
    assert "noise and demonstrations apply" in printed


def test_play_shows_what_the_model_would_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["get nothing", "hello", "answer elm"])
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    assert main(["play", "hops"]) == 0
    printed = capsys.readouterr().out
    assert "<|im_start|>user\nstart " in printed
    assert "no such name<|im_end|>\n<|im_start|>assistant\n" in printed
    assert "finished: total reward" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
        "runs.checkpoint_every=400",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"turnwise train --resume {out}" in printed
    assert "Traceback" not in errors
    steps = [line["step"] for line in untimed(metrics)]
    assert latest_checkpoint(out / "checkpoints").step == steps[-1] >= 3
