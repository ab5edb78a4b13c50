import math

import pytest

from turnwise.credit.settings import check_fraction, check_not_negative


@pytest.mark.parametrize("value", [-0.1, -math.inf, math.inf, math.nan])
def test_negative_and_non_finite_numbers_are_refused(value):
    with pytest.raises(ValueError, match=r"^credit gae: kl must be 0 or more \(got (-0\.1|-inf|inf|nan)\)$"):
        check_not_negative("credit gae: kl", value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.inf, math.nan])
def test_fractions_are_between_0_and_1(value):
    with pytest.raises(ValueError, match="credit gae: lam must be between 0 and 1"):
        check_fraction("credit gae: lam", value)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 1.0])
def test_bounds_are_included(value):
    check_not_negative("x", value)
    check_fraction("x", value)
