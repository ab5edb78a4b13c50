"""How far layouts are from float64, on turns that share prefixes."""

import dataclasses

import numpy as np
import pytest
import torch

from properties.test_tree_layout import WORKLOADS
from support.making import make_model
from turnwise.inspect import rounding
from turnwise.inspect.rounding import (
    BFLOAT16,
    FLOAT32,
    Distance,
    Products,
    Rounding,
    rounding_of,
)


def measured(precision, **how):
    turns = [turn for turn in WORKLOADS["stripped"]() if len(turn.action)]
    random = np.random.default_rng(0)
    factors = [random.standard_normal(len(turn.action)) for turn in turns]
    return rounding_of(make_model(**how), turns, factors, precision, temperature=0.8, tokens_per_pass=10_000)


@pytest.mark.parametrize(("precision", "low", "high"), [(FLOAT32, 1e-9, 1e-5), (BFLOAT16, 1e-4, 0.1)])
def test_no_layout_is_further_than_padded_rows(precision, low, high):
    """In each precision the distance is that of its rounding: some, and not more."""
    found = measured(precision)
    assert [each.layout for each in found.distances] == ["padded rows", "tree", "packed"]
    for each in found.distances:
        assert low < each.rms < high
        assert low < each.gradient < high
        assert each.mean <= each.rms <= each.largest
    assert found.further == []
    assert found.verdict.startswith("every layout is as near to float64 as padded rows, to a factor of 2 (gradient of ")
    assert found.describe()[-1] == found.verdict


def test_a_wrong_tree_is_further(monkeypatch):
    """One in which every other token is in the place of the one before."""
    right = rounding.cut  # type: ignore[attr-defined]

    def wrong(turns, tokens):
        [plan] = right(turns, tokens)
        return [dataclasses.replace(plan, depth=plan.depth // 2)]

    monkeypatch.setattr(rounding, "cut", wrong)
    found = measured(BFLOAT16)
    assert found.further == ["tree"]
    assert found.verdict.startswith("FURTHER from float64 than padded rows: tree (gradient of the tree ")


@pytest.mark.parametrize(
    ("rms", "gradient"), [(float("nan"), 0.01), (0.01, float("nan")), (0.021, 0.01), (0.01, 0.021)]
)
def test_what_is_no_number_or_too_far_is_further(rms, gradient):
    rows = Distance("padded rows", 0.02, 0.01, 0.01, 0.01)
    assert Rounding("bfloat16", 3, (rows, Distance("tree", 0.02, 0.01, rms, gradient))).further == ["tree"]
    assert Rounding("bfloat16", 3, (rows, dataclasses.replace(rows, layout="tree"))).further == []


def test_products_are_those_of_the_kernel_up_to_the_order_of_sums():
    torch.manual_seed(0)
    one, other = torch.randn(9, 33).bfloat16(), torch.randn(33, 5).bfloat16()
    wanted = one @ other
    with Products():
        found = one @ other
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0.0)
    with Products():
        assert (one.float() @ other.float()).dtype == torch.float32
