import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from turnwise.learn.schedules import SHAPES, schedule
from turnwise.recipe.optimizer import OptimizerConfig


def test_every_schedule_of_a_recipe_exists():
    assert set(get_args(OptimizerConfig.model_fields["schedule"].annotation)) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
@few
@given(warmup=st.integers(0, 12), total=st.integers(1, 30))
def test_it_rises_to_one_and_never_rises_again(name, warmup, total):
    factor = schedule(name, warmup, total)
    factors = [factor(update) for update in range(max(total, warmup) + 3)]
    assert all(0.0 <= value <= 1.0 for value in factors)
    assert factors[:warmup] == pytest.approx([(update + 1) / warmup for update in range(warmup)])
    after = factors[warmup:]
    assert after[0] == (1.0 if total > warmup or name == "constant" else after[0])
    assert all(one >= other for one, other in pairwise(after))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0.0, 0.0]),
    ],
)
def test_shapes(name, wanted):
    """Six updates of which two warm up; the last of them still moves, and whatever came after would not."""
    factor = schedule(name, warmup=2, total=6)
    assert [factor(update) for update in range(8)] == pytest.approx(wanted)


def test_without_warmup_the_first_update_is_at_the_peak():
    assert {name: schedule(name, 0, 10)(0) for name in SHAPES} == dict.fromkeys(SHAPES, 1.0)
