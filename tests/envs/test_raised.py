import pickle

import pytest

from turnwise.envs.raised import LONGEST_TRACEBACK, Raised, carrying, unpacked


def raised_by(function):
    try:
        function()
    except BaseException as error:
        return Raised.of(error)
    raise AssertionError("nothing was raised")


def dig(depth):
    if not depth:
        raise RuntimeError("the bottom")
    dig(depth - 1)


def test_a_library_that_raises_is_placed_where_it_was_called():
    import json

    found = raised_by(lambda: json.loads("{"))
    assert found.kind == "JSONDecodeError"
    assert found.where.startswith(("tests/", "/"))
    assert "test_raised.py:" in found.where
    assert "json/decoder.py" in found.traceback


def test_an_error_raised_from_another_is_itself():
    def work():
        try:
            {}["x"]
        except KeyError as error:
            raise ValueError("no x") from error

    found = raised_by(work)
    assert (found.kind, found.text) == ("ValueError", "no x")
    assert "KeyError: 'x'" in found.traceback


def test_what_came_over_a_border_is_what_counts():
    told = Raised("KeyError", "far.py:3", "'x'", "Traceback of the other side")
    error = carrying(RuntimeError("the process says KeyError"), told)
    assert Raised.of(error) == told
    assert Raised.of(pickle.loads(pickle.dumps(error))) == told
    assert unpacked(told.packed()) == told


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(3)


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("\ud800\n" * 9999), KeyError(b"\xff"), SystemExit(2)])
def test_whatever_an_error_says_is_a_line(error):
    def work():
        raise error

    found = raised_by(work)
    assert found.line.isprintable()
    assert len(found.line) < 1300
    found.traceback.encode()


def test_a_long_traceback_keeps_its_end():
    def ping(depth):
        pong(depth - 1)

    def pong(depth):
        if not depth:
            raise RuntimeError("the bottom")
        ping(depth - 1)

    found = raised_by(lambda: ping(301))
    assert len(found.traceback) <= LONGEST_TRACEBACK + 3
    assert found.traceback.endswith("RuntimeError: the bottom")


def test_errors_that_refer_to_each_other_end():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one

    def work():
        raise one

    assert raised_by(work).text == "one"
