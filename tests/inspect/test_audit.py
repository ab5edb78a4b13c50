"""`turnwise verify` proves the run: whatever was changed in its archive is named, also where checksums were fixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.running import micro_recipe, train
from turnwise.cli.commands import main
from turnwise.inspect.audit import Audit, audit
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.learn.policy import load_model
from turnwise.runs.archive import Record, read_step, write_step
from turnwise.types import Trajectory, Turn

LEARNING = ["sft.updates=30", "sft.optimizer.learning_rate=1e-2", "env.0.settings.link_reward=0.2", "steps=3"]


def made(factory: pytest.TempPathFactory, *overrides: str) -> Path:
    folder = factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        train(micro_recipe(folder, *LEARNING, *overrides))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 3, so that what step 3 trained on can be scored by what sampled it."""
    return made(tmp_path_factory, "groups_per_update=2")


def audited(run: Path, max_tokens: int = 10**6) -> Audit:
    past = RecordedRun.open(run)
    return audit(past, load_model(past.checkpoint.path), max_tokens)


def test_an_honest_run_passes_and_says_what_was_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "checked: checksums of 8 files of archive and evaluations",
        "checked: token weights of 3 steps, to 1e-06 of the largest of each",
        "checked: credit of 3 steps by grpo, to 1e-06 of the largest of each",
        "checked: logprobs of ",
        "not checked: logprobs of ",
    ):
        assert f"\n{line}" in printed
    assert "limit 0.0001" in printed
    assert "DIFFERENT" not in printed


# ---------------------------------------------------------------- what was changed


def in_first_turn(record: Record, change: Callable[[Turn], Turn]) -> Record:
    first, *others = record.group.trajectories
    turns = (change(first.turns[0]), *first.turns[1:])
    return replace(record, group=replace(record.group, trajectories=(replace(first, turns=turns), *others)))


def plus(values: np.ndarray, amount: float) -> np.ndarray:
    changed = values.copy()
    changed[-1] += amount
    return changed


def other_weight(record: Record) -> Record:
    return replace(record, weights=(plus(record.weights[0], 1e-5), *record.weights[1:]))


def other_credit(record: Record) -> Record:
    return replace(record, credit=(plus(record.credit[0], 1e-3), *record.credit[1:]))


def other_logprob(record: Record) -> Record:
    return in_first_turn(record, lambda turn: replace(turn, logprobs=plus(turn.logprobs, -1e-3)))


def other_action(record: Record) -> Record:
    def change(turn: Turn) -> Turn:
        action = turn.action.copy()
        action[0] += 1
        return replace(turn, action=action)

    return in_first_turn(record, change)


def other_prompt(record: Record) -> Record:
    def change(turn: Turn) -> Turn:
        prompt = turn.prompt.copy()
        prompt[len(prompt) // 2] += 1
        return replace(turn, prompt=prompt)

    return in_first_turn(record, change)


def other_reward(record: Record) -> Record:
    first, *others = record.group.trajectories
    paid: Trajectory = replace(first, outcome=first.outcome + 1.0)
    return replace(record, group=replace(record.group, trajectories=(paid, *others)))


CHANGES = {
    other_weight: "token {n} has weight",
    other_credit: "token {n} has credit",
    other_logprob: "token {n} has logprob",
    other_action: "do not give the recorded message",
    other_prompt: "has logprob",
    other_reward: "has credit",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_found_where_its_checksum_was_fixed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Record], Record]
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    first, second, *others = read_step(copied / "archive" / "step-000003.parquet")
    write_step(copied / "archive", 3, [first, change(second), *others])
    assert main(["verify", str(copied), "--step", "2"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERENT")]
    task = second.group.task.id
    last = len(second.group.trajectories[0].turns[0].action) - 1
    wanted = CHANGES[change].format(n=last)
    assert any(f"step 3, group 1 (task {task}), attempt 0, turn 0: " in line and wanted in line for line in found)
    assert all("step 3, group 1 " in line for line in found)


def rewritten(path: Path) -> None:
    """Change a weight by a program that knows Parquet and nothing of us."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    table = file.read()
    weights = table["weights"].to_pylist()
    weights[0][0] += 1e-9
    place = table.column_names.index("weights")
    table = table.set_column(place, "weights", pa.array(weights, table["weights"].type))
    pq.write_table(table.replace_schema_metadata(file.metadata.metadata), path)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [rewritten, flipped, cut_short])
def test_a_change_that_left_the_checksum_is_found_and_no_traceback(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    damage(copied / "archive" / "step-000001.parquet")
    assert main(["verify", str(copied)]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERENT")]
    assert len(found) == 1
    assert "step-000001.parquet is " in found[0]
    with pytest.raises(ValueError, match=r"step-000001\.parquet is "):
        read_step(copied / "archive" / "step-000001.parquet")
    assert main(["cost", str(copied), "--step", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_evaluation_is_found(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    flipped(copied / "evaluations" / "step-000002-sampled.parquet")
    [line] = audited(copied).differences
    assert line.endswith("step-000002-sampled.parquet does not match its checksum")


def test_differences_are_bounded_and_another_recipe_is_found(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "weighting": {"name": "constant", "length": 9}}))
    (copied / "SHA256SUMS").unlink()
    found = audited(copied)
    assert len(found.differences) > 30
    lines = [line for line in found.describe() if line.startswith("DIFFERENT")]
    assert len(lines) == 21
    assert lines[-1] == f"DIFFERENT: {len(found.differences) - 20} more"


# ---------------------------------------------------------------- what needs models


def test_tokens_over_the_limit_are_listed_as_unchecked(run: Path) -> None:
    found = audited(run, max_tokens=1)
    assert not any("logprobs" in line for line in found.checked)
    assert any(line.startswith("logprobs of ") for line in found.unchecked)


EVERY = ["checkpoints.every=1", "checkpoints.keep=9"]
SCORED = {
    "critic": [
        "credit.name=gae",
        "critic.optimizer.learning_rate=1e-3",
        "checkpoints.every=1",
        "checkpoints.keep=9",
    ],
    "reference": ["credit.name=reinforce_pp", "kl.coefficient=0.1", "kl.apply_to=reward"],
    "lag": ["max_lag=1", "steps=4", "loss.anchor=engine"],
    "adapters": ["lora.rank=4", "checkpoints.every=1"],
}


@pytest.mark.parametrize("kind", [k if k == "critic" else pytest.param(k, marks=pytest.mark.slow) for k in SCORED])
def test_credit_that_models_have_a_part_in(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str) -> None:
    run = made(tmp_path_factory, *SCORED[kind])
    found = audited(run)
    assert found.differences == ()
    assert any(line.startswith("credit of ") for line in found.checked)
    assert any(line.startswith("logprobs of ") for line in found.checked)
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    first, *others = read_step(copied / "archive" / "step-000003.parquet")
    changed = replace(first, credit=(plus(first.credit[0], 0.1), *first.credit[1:]))
    write_step(copied / "archive", 3, [changed, *others])
    assert any("step 3, group 0" in line and "credit" in line for line in audited(copied).differences)


def test_credit_without_its_models_is_listed_as_unchecked(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = made(tmp_path_factory, *SCORED["critic"])
    shutil.rmtree(run / "checkpoints" / "step-000001")
    found = audited(run)
    assert found.differences == ()
    assert "credit of 2 steps by gae, to 0.001 of the largest of each" in found.checked
    assert any(line.startswith("credit of 1 steps: gae needs values of the step before") for line in found.unchecked)
