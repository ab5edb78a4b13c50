import pytest

from turnwise.runs.seal import BLANK, is_intact, sealed

DATA = b"before " + BLANK.encode() + b" between " + BLANK.encode() + b" after"


def test_a_seal_takes_the_place_of_the_last_blank():
    made = bytes(sealed(DATA))
    assert len(made) == len(DATA)
    assert made.startswith(b"before " + BLANK.encode() + b" between sha256:")
    assert is_intact(made)


@pytest.mark.parametrize("place", range(0, len(DATA), 7))
def test_a_bit_anywhere_is_noticed(place):
    made = sealed(DATA)
    made[place] ^= 1
    assert not is_intact(bytes(made))


def test_what_is_cut_or_grown_is_not_intact():
    made = bytes(sealed(DATA))
    assert is_intact(made[:-1]) is False
    assert is_intact(made + b"x") is False
    assert is_intact(b"no seal at all") is None
    assert is_intact(b"sha256:short") is None
