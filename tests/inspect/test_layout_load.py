"""What a layout computes is counted right, without a model."""

from __future__ import annotations

import pytest

from support.making import make_turn, make_turns
from turnwise.inspect.layout_load import Load, load_of_plans, loads
from turnwise.plan.cut import cut


def test_loads_of_two_turns_by_hand() -> None:
    turns = [make_turn([7, 8], [9]), make_turn([7, 8, 9, 4], [5, 6])]
    found = loads(turns, 100)
    assert found["padded rows"] == Load(passes=1, tokens=12, pairs=2 * 21, targets=3, blocks=1)
    assert found["packed"] == Load(passes=1, tokens=9, pairs=6 + 21, targets=3, blocks=2)
    assert found["strict prefix merge"] == Load(passes=1, tokens=6, pairs=21, targets=3, blocks=1)
    assert found["tree"] == found["strict prefix merge"]
    assert loads(turns, 6)["padded rows by length"] == Load(passes=2, tokens=9, pairs=27, targets=3, blocks=2)


def test_a_shared_action_is_one_target_of_a_tree() -> None:
    turns = [make_turn([1, 2], [3, 4]), make_turn([1, 2], [3, 5])]
    assert loads(turns, 100)["tree"].targets == 3
    assert loads(turns, 100)["packed"].targets == 4


def test_a_path_that_is_handed_over_counts_its_second_forward_passes() -> None:
    turns = make_turns([(8, 4)])
    [plan] = cut(turns, 4)
    assert [(stretch.start, stretch.end) for stretch in plan.stretches] == [(0, 4), (4, 8), (8, 12)]
    load = load_of_plans([plan])
    assert load.tokens == pytest.approx(8 * 4 / 3 + 4)
    assert load.pairs == pytest.approx((10 + 26) * 4 / 3 + 42)
    assert load.targets == 4
    # A budget below the longest turn is raised for layouts that cannot hand over.
    assert loads(turns, 4)["packed"].tokens == 12
