"""Splits of cards between learner and engines."""

from pathlib import Path

import pytest

from turnwise.cli.commands import main
from turnwise.preflight.brief import deeper
from turnwise.preflight.card import CARDS
from turnwise.preflight.engine_memory import EngineMemory
from turnwise.preflight.operation_counter import LAYERS, OPTIMIZER
from turnwise.preflight.rehearsal import MASTERS, MOMENTS, Rehearsal
from turnwise.recipe.parse import load_recipe
from turnwise.simulate.split import best_split, splits, with_ranks
from turnwise.simulate.table import row

H100 = CARDS[0]
SMALL = ("groups_per_step=4", "rollout.group_size=2", "rollout.max_turns=2", "rollout.max_trajectory_tokens=4096")
RECIPE = load_recipe(Path("qwen3-4b-8gpu"), [*SMALL, "rollout.max_prompt_tokens=1024"])
ENGINE = EngineMemory("vllm", 1, True, 8e9, 147e3, 8, 0.9, int(4e9), 4e9)


def rehearsal(**changed):
    """A rank of four whose pass takes 400 TFLOP, whose optimizer reads 1 GB, and whose memory is mostly divided."""
    found = {
        "device": "cuda",
        "ranks": 4,
        "layers": 1,
        "checkpoints": True,
        "num_parameters": int(4e9),
        "num_trained": int(4e9),
        "num_tokens": 16384,
        "num_actions": 8192,
        "num_pairs": 1,
        "peak_of_loading": 0,
        "peak": 30 * 10**9,
        "at_peak": {MASTERS: 4 * 10**9, MOMENTS: 8 * 10**9, "activations": 18 * 10**9},
        "most": {},
        "on_host": {},
        "kernels": {LAYERS: 100},
        "bytes": {},
        "flops": {},
        "costs": {(LAYERS, 400e12, 1e9): 1, (OPTIMIZER, 0.0, 1e9): 1},
        "products": {},
        "waits": {},
        "collectives": {("allgather", 4): 8 * 10**9},
    }
    return Rehearsal(**{**found, **changed})


def test_a_rank_of_more_has_a_smaller_share_of_what_is_divided():
    found = with_ranks(rehearsal(), 8)
    assert (found.ranks, found.peak) == (8, (18 + 6) * 10**9)
    assert found.costs == {(LAYERS, 400e12, 1e9): 1, (OPTIMIZER, 0.0, 0.5e9): 1}
    assert found.collectives == {("allgather", 8): 8 * 10**9}
    assert with_ranks(rehearsal(), 1).peak == (18 + 48) * 10**9


def test_splits_use_all_cards_and_leave_out_what_does_not_fit():
    found = list(splits(RECIPE, rehearsal(), ENGINE, H100, 8))
    assert [(split.ranks, split.replicas) for split in found] == [(n, 8 - n) for n in range(1, 8)]
    assert found[0].time.learning > 1.5 * found[-1].time.learning
    large = rehearsal(peak=60 * 10**9, at_peak={MASTERS: 50 * 10**9})
    assert [split.ranks for split in splits(RECIPE, large, ENGINE, H100, 8)] == [4, 5, 6, 7]


def test_a_slow_learner_gets_more_cards_than_a_quick_one():
    slow = rehearsal(costs={(LAYERS, 80000e12, 1e9): 1, (OPTIMIZER, 0.0, 1e9): 1})
    quick = rehearsal(costs={(LAYERS, 4e12, 1e6): 1, (OPTIMIZER, 0.0, 1e6): 1}, collectives={}, kernels={LAYERS: 1})
    (much, outcome), (little, _) = (best_split(RECIPE, found, ENGINE, H100, 8) for found in (slow, quick))
    assert much.ranks > little.ranks
    assert outcome.limit == "learner"
    assert str(much.ranks) in row(much, outcome)


def test_too_few_cards_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"^2 cards \(H100 80 GB\) have no room for a learner and an engine"):
        best_split(RECIPE, rehearsal(peak=200 * 10**9), ENGINE, H100, 2)


def test_more_layers_cost_what_the_last_rehearsed_one_does():
    one = rehearsal(layers=1, costs={(LAYERS, 1.0, 1.0): 5, ("head", 2.0, 2.0): 1}, kernels={LAYERS: 5})
    two = rehearsal(layers=2, costs={(LAYERS, 1.0, 1.0): 9, ("head", 2.0, 2.0): 1}, kernels={LAYERS: 9})
    found = deeper(one, two, 36)
    assert found.costs == {(LAYERS, 1.0, 1.0): 9 + 34 * 4, ("head", 2.0, 2.0): 1}
    assert found.kernels == {LAYERS: 9 + 34 * 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "1"], "--split 1: give numbers of cards of at least 2, for instance --split 8,16"),
        (["--split", "8,x"], "--split 8,x: give numbers"),
        (["--split", "8", "--card", "Z9"], "--card Z9: the table has H100 80 GB"),
        (["--split", "8", "--environment-seconds", "-1"], "--environment-seconds -1: give 0 or more"),
    ],
)
def test_splits_that_cannot_be_are_refused_in_a_line(arguments, message, capsys):
    assert main(["preflight", "qwen3-4b-8gpu", *arguments]) != 0
    assert message in capsys.readouterr().err
