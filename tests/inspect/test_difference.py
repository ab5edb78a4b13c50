import pytest

from support.making import make_turn
from turnwise.inspect.difference import Difference, difference
from turnwise.types import Status, Trajectory


def attempt(*turns):
    return Trajectory(tuple(make_turn(list(prompt), list(action)) for prompt, action in turns), Status.finished, 0.0)


FIRST = ([1, 2], [5])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([FIRST], [FIRST], Difference(1, 0, False, True)),
        ([([1, 2], [5, 6])], [([1, 2], [5, 7])], Difference(0, 3, True, False)),
        ([([1, 2], [5])], [([1, 2], [6])], Difference(0, 2, True, False)),
        ([([1, 2], [5, 6])], [([1, 2], [5])], Difference(0, 3, True, False)),
        ([([1, 2], [5])], [([1, 3], [5])], Difference(0, 1, False, False)),
        ([FIRST, ([1, 2, 5, 8], [9])], [FIRST, ([1, 2, 5, 7], [9])], Difference(1, 3, False, False)),
        ([FIRST, ([1, 2, 5, 8], [9])], [FIRST], Difference(1, 0, False, False)),
        ([([1, 2], [5])], [([1], [2, 5])], Difference(0, 3, True, False)),
        ([], [FIRST], Difference(0, 0, False, False)),
    ],
)
def test_where_attempts_part(one, other, expected):
    make = lambda turns: attempt(*turns) if turns else Trajectory((), Status.failed)
    assert difference(make(one), make(other)) == expected
    assert difference(make(other), make(one)) == expected
