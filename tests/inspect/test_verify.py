"""`turnwise verify`: layouts agree on a run's own data, and one that does not is found out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.making import distance, make_model
from support.running import micro_recipe, mistake, train
from turnwise.cli.commands import main
from turnwise.credit.truncation import unpaid
from turnwise.inspect import verify as module
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.inspect.verify import Comparison, rounded, take, verify
from turnwise.learn.transformers_reference import exact_norms
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.runs.archive import Record
from turnwise.runs.checksums import write_checksums
from turnwise.types import Group, turns_of

LEARNING = ["sft.updates=30", "sft.optimizer.learning_rate=1e-2", "env.0.settings.link_reward=0.2"]
"""A warm start after which some attempts are paid and others are not."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a reference and an entropy bonus, and checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        train(
            micro_recipe(
                folder, *LEARNING, "steps=3", "kl.coefficient=0.1", "entropy=0.01", "max_tokens_per_microbatch=600"
            )
        )
    return folder / "run"


def with_recipe(run: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a run that says it had another recipe."""
    copied = folder / "run"
    shutil.copytree(run, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, **changes}))
    (copied / "SHA256SUMS").unlink()  # as one does who changes it on purpose
    return copied


def first_table(printed: str) -> list[str]:
    """The lines that compare layouts."""
    return printed.split("\n\n")[1].splitlines()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_layouts_agree_on_recorded_turns(run: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    assert main(["verify", str(run), "--step", "2", "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert "step 2 of" in printed
    assert "4 of 4 groups, 16 of 16 attempts" in printed
    assert "ppo_clip anchored on the engine + entropy 0.01 + KL 0.1, with the weights of step 3" in printed
    lines = {line.split("  ")[0]: line for line in first_table(printed)}
    small = next(name for name in lines if name.startswith("tree, "))
    for layout in ("tree", small, "packed"):
        assert lines[layout].endswith("same")
        assert ("1e-12" if dtype == "float64" else "1e-05") in lines[layout]
    assert lines["padded rows"].endswith("the measure")
    assert "DIFFERENT" not in printed
    assert "distance from float64, computed in float32, on" in printed
    assert "\nevery layout is as near to float64 as padded rows, to a factor of 2 (" in printed


def test_a_run_in_bfloat16_is_told_of_its_rounding(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    copied = with_recipe(run, tmp_path, model={**config["model"], "dtype": "bfloat16"})
    found = rounded(RecordedRun.open(copied), take(RecordedRun.open(copied).kept(2), 2, 300))
    assert found.precision == "bfloat16"
    assert found.distances[0].gradient > 1e-4
    assert found.further == []


def test_the_comparison_is_of_several_passes_with_paths_handed_over(run: Path) -> None:
    found = {comparison.layout: comparison for comparison in verify(run, 2, 4, None, "float64").comparisons}
    padded, tree, small, packed = found.values()
    assert padded.passes > 1
    assert padded.tokens > packed.tokens > tree.tokens
    turns = list(turns_of([record.group for record in RecordedRun.open(run).kept(2)]))
    budget = int(small.layout.removeprefix("tree, ").removesuffix(" a pass"))
    assert any(plan.num_stretches > 1 for plan in cut(turns, budget))
    assert small.passes > tree.passes
    assert 0.0 < max(tree.gradient_error, small.gradient_error, packed.gradient_error) < 1e-12


ANOTHER = {
    "learner": {"loss": {"name": "ppo_clip", "anchor": "learner"}, "groups_per_update": 2},
    "alone": {"loss": {"name": "reinforce"}},
    "sequences": {"loss": {"name": "gspo", "scope": "trajectory", "anchor": "engine"}},
    "corrected": {"loss": {"name": "ppo_clip"}, "correction": {"importance_sampling": "sequence", "scope": "turn"}},
    "temperature": {"sampling": {"temperature": 0.7}, "kl": {"coefficient": 0.0}},
}


@pytest.mark.parametrize("name", ANOTHER)
def test_other_objectives(run: Path, tmp_path: Path, name: str) -> None:
    found = verify(with_recipe(run, tmp_path, **ANOTHER[name]), 2, 2, None, "float64")
    assert found.failed == []
    assert ("KL" in found.taken[1]) == (name != "temperature")
    assert ("correction" in found.taken[1]) == (name == "corrected")


# ---------------------------------------------------------------- errors are found


def other_parent(plan: Any) -> Any:
    """The plan with one token that no longer sees the first one of its chain."""
    parent, depth = plan.parent.copy(), plan.depth
    parent[np.flatnonzero(depth == 1)[0]] = -1
    return replace(plan, parent=parent)


def other_depth(plan: Any) -> Any:
    return replace(plan, depth=plan.depth + (plan.depth > 3).astype(np.int32))


def other_turns(plan: Any) -> Any:
    """The plan with the credit of its turns in another order."""
    return replace(plan, turns=plan.turns[::-1].copy())


@pytest.mark.parametrize("break_plan", [other_parent, other_depth, other_turns])
@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_an_error_in_a_layout_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, break_plan: Any, layout: str
) -> None:
    if break_plan is other_turns:  # only turns with actions of equal length can change places unnoticed
        equal_sizes(monkeypatch)
    name, make = ("pack", pack) if layout == "packed" else ("cut", cut)
    monkeypatch.setattr(module, name, lambda turns, budget: [break_plan(plan) for plan in make(turns, budget)])
    assert main(["verify", str(run), "--step", "2", "--groups", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"\n{layout} is not the same; its gradient differs most in model." in printed
    right, wrong = ("tree", "packed") if layout == "packed" else ("packed", "tree")
    verdicts = {line.split("  ")[0]: line.split()[-1] for line in first_table(printed)}
    assert verdicts[right] == "same"
    assert verdicts[wrong] == "DIFFERENT"


def equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take only attempts whose actions all have the most frequent length."""

    def taken(records: Any, max_groups: int, max_tokens: int) -> list[Record]:
        found = take(records, max_groups, max_tokens)
        sizes = [len(turn.action) for turn in turns_of([record.group for record in found])]
        size = max(set(sizes), key=sizes.count)
        return [part for record in found for part in attempts_of(record, size)]

    monkeypatch.setattr(module, "take", taken)


def attempts_of(record: Record, size: int) -> list[Record]:
    parts, place = [], 0
    for trajectory in record.group.trajectories:
        end = place + len(trajectory.turns)
        if all(len(turn.action) == size for turn in trajectory.turns):
            group = Group(record.group.task, (trajectory,))
            parts.append(Record(group, True, record.credit[place:end], record.weights[place:end]))
        place = end
    return parts


def test_a_gradient_lost_at_a_hand_over_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwise.learn.blocks import Relay

    honest = Relay.grads
    monkeypatch.setattr(Relay, "grads", lambda self, layer: tuple(grad.clone() for grad in honest(self, layer)))
    found = verify(run, 2, 2, None, "float64")
    assert [comparison.layout[:6] for comparison in found.failed] == ["tree, "]
    assert found.failed[0].loss_difference < 1e-12 < found.failed[0].gradient_error


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 0.0), (0.0, float("nan")), (2e-12, 0.0), (0.0, 2e-12)])
def test_a_large_or_nan_difference_is_not_the_same(loss: float, gradient: float) -> None:
    assert Comparison("tree", 1, 1, 1e-12, 1e-12, 1e-12, "").passed
    assert not Comparison("tree", 1, 1, loss, gradient, 1e-12, "").passed


# ---------------------------------------------------------------- what is taken


def test_limits_are_kept_and_the_groups_that_move_most_come_first(run: Path) -> None:
    records = RecordedRun.open(run).kept(2)
    whole = take(records, 100, 10**6)
    moves = [module.movement(record) for record in whole]
    assert moves == sorted(moves, reverse=True)
    assert moves[0] > 0
    assert len(whole) == len(records)
    tokens = sum(len(turn.prompt) + len(turn.action) for turn in turns_of([whole[0].group]))
    some = take(records, 100, tokens - 1)
    assert 0 < sum(len(turn.prompt) + len(turn.action) for turn in turns_of([r.group for r in some])) < tokens
    assert some[0].group.trajectories == whole[0].group.trajectories[: len(some[0].group.trajectories)]
    assert len(take(records, 2, 10**6)) == 2
    [one] = take(records, 100, 1)
    assert len(one.group.trajectories) == 1


def test_a_step_without_a_gradient_proves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from turnwise.runs import archive

    copied = with_recipe(run, tmp_path, entropy=0.0, kl={"coefficient": 0.0})
    records = archive.read_step(copied / "archive" / "step-000002.parquet")
    archive.write_step(copied / "archive", 2, [unpaid_record(record) for record in records])
    assert main(["verify", str(copied), "--step", "2"]) == 2
    assert "have no gradient" in capsys.readouterr().err


def unpaid_record(record: Record) -> Record:
    """The group as if nobody had been paid, with the credit that follows from it."""
    attempts = tuple(map(unpaid, record.group.trajectories))
    return replace(
        record,
        group=replace(record.group, trajectories=attempts),
        credit=tuple(np.zeros_like(credit) for credit in record.credit),
    )


def test_the_gap_is_measured_where_a_checkpoint_has_sampled(run: Path, tmp_path: Path) -> None:
    """Steps 2 and 3 have checkpoints; what version 2 sampled was trained on in step 3."""
    gap = verify(run, 2, 1, None, "float32").gap
    assert gap is not None
    assert (gap.step, gap.version) == (3, 2)
    assert 0.0 < gap.largest < 1e-5
    copied = with_recipe(run, tmp_path)
    shutil.rmtree(copied / "checkpoints" / "step-000002")
    found = verify(copied, 2, 1, None, "float32")
    assert found.gap is None
    assert "no checkpoint that is still there" in found.describe()[-1]


def test_a_gap_of_other_weights_is_seen(run: Path, tmp_path: Path) -> None:
    copied = with_recipe(run, tmp_path)
    weights = "model.safetensors"
    shutil.copy(run / "checkpoints" / "step-000003" / weights, copied / "checkpoints" / "step-000002" / weights)
    write_checksums(copied / "checkpoints" / "step-000002")
    gap = verify(copied, 2, 1, None, "float32").gap
    assert gap is not None
    assert gap.largest > 1e-3


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("command", ["verify", "cost"])
def test_an_incomplete_run_is_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "not the folder of a run" in mistake(capsys, command, str(tmp_path))
    copied = with_recipe(run, tmp_path)
    assert "has no step 77 in its archive; choose --step from 1 to 3" in mistake(
        capsys, command, str(copied), "--step", "77"
    )
    shutil.rmtree(copied / "archive")
    assert "has no step in its archive" in mistake(capsys, command, str(copied))
    shutil.rmtree(copied / "checkpoints")
    assert "has no checkpoint yet" in mistake(capsys, command, str(copied))


def test_a_missing_reference_and_empty_limits(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = with_recipe(run, tmp_path)
    shutil.rmtree(copied / "reference")
    assert "there is no reference at" in mistake(capsys, "verify", str(copied))
    assert "--groups must be at least 1" in mistake(capsys, "verify", str(run), "--groups", "0")
    assert "--tokens must be at least 1" in mistake(capsys, "verify", str(run), "--tokens", "0")


# ---------------------------------------------------------------- norms


def test_norms_are_exact_or_the_output_says_so() -> None:
    model = make_model()
    norm = model.model.layers[0].self_attn.q_norm
    given = torch.randn(5, len(norm.weight), dtype=torch.float64)
    norm.double()
    before = norm(given)
    assert exact_norms(model)
    after = norm(given)
    wanted = norm.weight * given / (given.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    assert distance(after.detach(), wanted.detach()) < 1e-15 < 1e-9 < distance(before.detach(), wanted.detach())


def test_a_norm_of_another_formula_is_left_alone() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = torch.nn.ModuleList([GemmaRMSNorm(4)])
    assert not exact_norms(model)
    assert "forward" not in vars(model[0])
    model[0].variance_epsilon = model[0].eps  # even where it looks like the usual one
    assert not exact_norms(model)
