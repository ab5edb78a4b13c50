"""p-values against known values and slow references."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from turnwise.runs import significance
from turnwise.runs.significance import paired_p_value, unpaired_p_value

ONE = Fraction(1)


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [(5, 0, 2 / 32), (8, 1, 0.0390625), (10, 2, 0.03857421875), (3, 3, 1.0), (0, 0, 1.0), (1, 0, 1.0), (6, 16, 0.0525)],
)
def test_with_one_attempt_per_task_it_is_mcnemars_exact_test(better, worse, expected):
    differences = [ONE] * better + [-ONE] * worse + [Fraction(0)] * 7
    assert paired_p_value(differences) == pytest.approx(expected, abs=1e-4)
    assert paired_p_value([-one for one in differences]) == paired_p_value(differences)


@few
@given(st.lists(st.fractions(-1, 1, max_denominator=4), max_size=8))
def test_it_counts_the_signs_that_are_as_extreme(differences):
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * one for sign, one in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    assert paired_p_value(differences) == pytest.approx(sum(one >= observed for one in sums) / len(sums))


def test_the_normal_approximation_is_near_the_exact_value(monkeypatch):
    differences = [ONE] * 60 + [-ONE] * 40
    exact = paired_p_value(differences)
    monkeypatch.setattr(significance, "EXACT_RANGE", 0)
    assert paired_p_value(differences) == pytest.approx(math.erfc(2.0 / math.sqrt(2.0)))
    assert paired_p_value(differences) == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((0.5, 100, 0.65, 100), 0.0319), ((0.65, 100, 0.5, 100), 0.0319), ((0.2, 50, 0.2, 80), 1.0), ((1, 9, 1, 9), 1.0)],
)
def test_two_proportions(rates, expected):
    assert unpaired_p_value(*rates) == pytest.approx(expected, abs=1e-4)


def test_nothing_tried_tells_nothing():
    assert unpaired_p_value(0.0, 0, 1.0, 10) == 1.0
