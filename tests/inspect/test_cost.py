"""`turnwise cost`: what is counted is counted right, and what is predicted says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.making import make_model, make_turn
from support.running import train_once
from turnwise.cli.commands import main
from turnwise.inspect import cost as module
from turnwise.inspect.cost import Pace, Sizes, calibrate, chains, check, cost, fit
from turnwise.inspect.layout_load import Load, load_of_plans, load_of_rows
from turnwise.learn.policy import Policy
from turnwise.plan.pack import pack
from turnwise.plan.rows import pad


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two updates a step."""
    settings = ("steps=2", "groups_per_update=2", "max_tokens_per_microbatch=600")
    return train_once(tmp_path_factory.mktemp("cost"), *settings)


def test_the_table(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibrate", lambda policy, tokens, seconds: Pace((0.0, 1e-3, 0.0, 0.0, 0.0)))
    assert main(["cost", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "one update of step 2" in printed
    assert "2 groups, 8 attempts" in printed
    assert "predicted" in printed
    assert "One tree pass of this update took" in printed
    [packed] = [line for line in printed.splitlines() if line.startswith("packed ")]
    assert packed.endswith("1.00")
    for name in ("padded rows", "padded rows by length", "strict prefix merge", "tree"):
        assert any(line.startswith(f"{name}  ") for line in printed.splitlines())


def test_layouts_of_a_run_come_in_their_order(run: Path) -> None:
    found = cost(run, 1, seconds=0.0)
    tokens = {layout.name: layout.load.tokens for layout in found.layouts}
    assert tokens["tree"] >= found.num_unique
    assert tokens["tree"] <= tokens["strict prefix merge"] < tokens["packed"]
    assert tokens["packed"] <= tokens["padded rows by length"] <= tokens["padded rows"]
    for layout in found.layouts:
        assert layout.seconds > 0
        assert layout.operations > 0


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    """Linear layers and attention as torch's own counter sees them, on a stock model with whole logits."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model(kind)
    model.set_attn_implementation("eager")  # products of matrices, which need no formula of their own
    tokens = torch.arange(24).reshape(2, 12)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    turns = [make_turn(row[:1].numpy(), row[1:].numpy()) for row in tokens]
    load = load_of_rows(pad(turns, 24), turns)
    square = Load(load.passes, load.tokens, 2 * 12 * 12, 24, load.blocks)  # eager attends to all and masks
    wanted = counter.get_total_flops()
    assert Sizes.of(model).operations(square) == pytest.approx(wanted, rel=0.02)


def test_tied_embeddings_are_left_out_once() -> None:
    tied, untied = make_model("qwen3"), make_model("llama")
    for model, times in ((tied, 1), (untied, 2)):
        sizes = Sizes.of(model)
        assert sizes.head == 64 * 32
        assert sizes.parameters == sum(p.numel() for p in model.parameters()) - times * 64 * 32
    assert Sizes.of(tied).attention == 2 * 4 * 12
    assert Sizes.of(untied).attention == 2 * 4 * 8


# ---------------------------------------------------------------- predicting


def test_a_fit_finds_the_pace_that_made_the_measurements() -> None:
    random = np.random.default_rng(0)
    pace = np.array([1e-2, 1e-4, 3e-7, 2e-5, 1e-3])
    some = [Load(*row) for row in random.uniform(1, 1000, (8, 5))]
    found = fit([(load, float(load.numbers @ pace)) for load in some])
    assert found.per_unit == pytest.approx(pace.tolist(), rel=1e-6)
    assert found.seconds(some[0]) == pytest.approx(float(some[0].numbers @ pace))


def test_no_part_of_a_load_is_predicted_to_give_time_back() -> None:
    some = [Load(1, 100, 10, 5, 1), Load(1, 200, 2000, 5, 1), Load(2, 300, 30, 9, 2), Load(1, 400, 9000, 4, 8)]
    found = fit([(load, 1e-3 * load.tokens - 1e-6 * load.pairs) for load in some])
    assert min(found.per_unit) >= 0.0
    assert max(found.per_unit) > 0.0


def test_a_prediction_is_checked_unless_that_takes_too_long() -> None:
    policy, plan = Policy(make_model()), chains([8, 8])
    quick = check(policy, Pace((1e-3, 1e-4, 0.0, 0.0, 0.0)), "packed", plan)
    assert quick.predicted == pytest.approx(1e-3 + 16 * 1e-4)
    assert quick.measured is not None
    assert quick.measured > 0.0
    slow = check(policy, Pace((100.0, 0.0, 0.0, 0.0, 0.0)), "packed", plan)
    assert slow.describe() == "Not checked: one packed pass of this update would take some 100 s."


def test_made_up_chains_are_what_they_say() -> None:
    plan = chains([3, 2, 3])
    assert plan.parent.tolist() == [-1, 0, 1, -1, 3, -1, 5, 6]
    assert plan.action_nodes.tolist() == [2, 4, 7]
    assert load_of_plans([plan]) == Load(passes=1, tokens=8, pairs=15, targets=3, blocks=3)
    assert load_of_plans([chains([3, 2, 3], targets=True)]).targets == 5
    turns = [make_turn(np.arange(2), [2]), make_turn([3], [4]), make_turn([5, 6], [7])]
    [packed] = pack(turns, 100)
    assert load_of_plans([packed]) == Load(passes=1, tokens=8, pairs=15, targets=3, blocks=2)


def test_calibration_predicts_what_it_measured() -> None:
    policy = Policy(make_model())
    pace = calibrate(policy, 256, seconds=0.5)
    assert pace.seconds(Load(1, 256, 256 * 16, 8, 1)) > 0.0
    assert pace.seconds(Load(4, 1024, 1024 * 16, 32, 4)) == pytest.approx(
        4 * pace.seconds(Load(1, 256, 256 * 16, 8, 1))
    )
