"""Malformed outputs: one line that names the row and the key, and never another exception than ValueError."""

import copy
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from support.making import make_turn
from turnwise.interop.skyrl import TrajectoryID, from_generator_output, to_generator_output
from turnwise.types import Group, Status, Task, Trajectory

A, B = TrajectoryID("a", 0), TrajectoryID("b", 0)


def make_output(**changes):
    """Two attempts at "a" (two turns, one turn) and one at "b": four rows with responses of 2, 1, 3 and 2 tokens."""
    attempts = [
        (make_turn([1, 2], [3, 4], reward=0.5), make_turn([1, 2, 3, 4, 5], [6], reward=1.0)),
        (make_turn([1, 2], [9, 9, 9], reward=0.25),),
        (make_turn([7], [8, 8], reward=-1.0),),
    ]
    one, other, third = (Trajectory(turns, Status.finished) for turns in attempts)
    return to_generator_output([Group(Task("a", "test"), (one, other)), Group(Task("b", "test"), (third,))]) | changes


def row_changed(key, row, value):
    column = make_output()[key]
    column[row] = value
    return {key: column}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trajectory_ids": [A, B, A, B], "is_last_step": [0, 0, 1, 1]}, ["row 1", "trajectory_ids", "is_last_step"]),
        ({"is_last_step": [False, False, True, True]}, ["row 2", "trajectory_ids", "is_last_step"]),
        ({"is_last_step": [True, True, True, True]}, ["row 1", "trajectory_ids", "ended at row 0"]),
        ({"trajectory_ids": [A, A, B, A]}, ["row 3", "trajectory_ids", "ended at row 1"]),
        ({"is_last_step": [False, True, True, False]}, ["row 3", "is_last_step"]),
        (row_changed("is_last_step", 2, None), ["row 2", "is_last_step", "NoneType"]),
        (row_changed("is_last_step", 2, 0.5), ["row 2", "is_last_step"]),
        ({"rewards": [[0.0, 0.5]]}, ["rewards has 1 rows", "prompt_token_ids has 4"]),
        ({"stop_reasons": ["stop"]}, ["stop_reasons has 1 rows"]),
        (row_changed("rewards", 1, [1.0, 2.0]), ["row 1", "rewards has 2", "response_ids has 1"]),
        (row_changed("rewards", 1, 1.0), ["row 1", "rewards"]),
        (row_changed("rewards", 1, [math.nan]), ["row 1", "rewards", "finite"]),
        (row_changed("rewards", 2, [1e308, 1e308, 0.0]), ["row 2", "rewards", "finite"]),
        ({"rewards": [0.0, math.inf, 0.0, 0.0]}, ["row 1", "rewards", "finite"]),
        (row_changed("rewards", 0, [None, 1.0]), ["row 0", "rewards", "entry 0", "NoneType"]),
        (row_changed("loss_masks", 0, [1]), ["row 0", "loss_masks has 1", "response_ids has 2"]),
        (row_changed("loss_masks", 0, [0.5, 1]), ["row 0", "loss_masks", "0 and 1"]),
        (row_changed("loss_masks", 0, None), ["row 0", "loss_masks", "NoneType"]),
        (row_changed("rollout_logprobs", 3, [-1.0]), ["row 3", "rollout_logprobs has 1"]),
        (row_changed("rollout_logprobs", 3, [-1.0, 0.5]), ["row 3", "rollout_logprobs", "up to 0"]),
        (row_changed("rollout_logprobs", 3, [-1.0, math.nan]), ["row 3", "rollout_logprobs", "up to 0"]),
        (row_changed("rollout_logprobs", 3, None), ["row 3", "rollout_logprobs", "NoneType"]),
        (row_changed("response_ids", 0, [3, -1]), ["row 0", "response_ids", "from 0"]),
        (row_changed("response_ids", 0, [3, 2**31]), ["row 0", "response_ids", "2147483647"]),
        (row_changed("response_ids", 0, [3, 10**30]), ["row 0", "response_ids", "too large"]),
        (row_changed("response_ids", 0, [3, 4.0]), ["row 0", "response_ids", "entry 1", "whole number", "float"]),
        (row_changed("response_ids", 0, [3, True]), ["row 0", "response_ids", "entry 1", "bool"]),
        (row_changed("response_ids", 0, np.array([[3, 4]])), ["row 0", "response_ids", "ndarray"]),
        (row_changed("response_ids", 0, "ab"), ["row 0", "response_ids", "str"]),
        (row_changed("prompt_token_ids", 3, []), ["row 3", "prompt_token_ids", "empty"]),
        (row_changed("stop_reasons", 1, None), ["row 1", "stop_reasons", "NoneType"]),
        (row_changed("trajectory_ids", 3, None), ["row 3", "trajectory_ids", "NoneType"]),
        (row_changed("trajectory_ids", 3, "b"), ["row 3", "trajectory_ids", "str"]),
        (row_changed("trajectory_ids", 3, ("b", True)), ["row 3", "trajectory_ids", "tuple"]),
        ({"is_last_step": None}, ["is_last_step", "missing", "step-wise"]),
        ({"response_ids": {}}, ["response_ids", "one entry per row", "dict"]),
        ({key: [] for key in make_output() if make_output()[key]}, ["prompt_token_ids", "empty"]),
        ({"pixel_values": [1]}, ["pixel_values"]),
        ({"rollout_expert_indices": [[[[1]]]]}, ["rollout_expert_indices"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(changes, words):
    with pytest.raises(ValueError, match=r".") as caught:
        from_generator_output(make_output(**changes))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert len(message) < 200


# fmt: off
JUNK = (
    None, True, -1, 0, 1, 0.5, math.nan, -math.inf, 10**400, 2**40, "", "stop", "a_0", "\n_1", b"x", 1j, 1e-320,
    [], [[]], [None], ["1"], (), {}, {1}, {"a": 1}, [1, 2], [0.5, 0.5], [1e308, 1e308], [10**400], range(2), iter([1]),
    object(), object, int, np.float64, lambda: 0, Ellipsis, memoryview(b"ab"), np.float16(3), np.longdouble(1),
    np.array(1), np.array([]), np.array([1, 2]), np.array(["a"]), np.zeros((2, 2)), np.array([None, 1]),
    np.array([2**63], np.uint64), np.array([1, 2], "datetime64[s]"), np.timedelta64(1, "s"), [np.timedelta64(1, "s")],
    np.ma.array([1, 2], mask=[0, 1]), np.array([(1, 2)], "i4,i4"), np.array([1, 2], object), [np.uint64(2**63)],
    A, ("a", 0), ("a", "0"), (None, 0), (np.timedelta64(1, "s"), 0), SimpleNamespace(instance_id=[], repetition_id=0),
)
# fmt: on


def draw_junk(chance):
    """A thing of some kind; lists are copied, because they may be spoilt further."""
    junk = chance.choice(JUNK)
    return list(junk) if isinstance(junk, list) else junk


def spoil(output, chance):
    """One random change somewhere in an output."""
    key = chance.choice([key for key in output if output[key] is not None] or ["rewards"])
    column, kind = output.get(key), chance.randrange(9)
    if kind == 0 or not isinstance(column, list) or not column:
        output[key] = draw_junk(chance)
    elif kind == 1:
        del output[key]
    elif kind == 2:
        chance.shuffle(column)
    elif kind == 3:
        del column[chance.randrange(len(column)) :]
    elif kind == 4:
        column.insert(chance.randrange(len(column) + 1), draw_junk(chance))
    elif kind == 5:
        column[chance.randrange(len(column))] = draw_junk(chance)
    else:
        row = column[chance.randrange(len(column))]
        if isinstance(row, list) and row and kind == 6:
            row[chance.randrange(len(row))] = draw_junk(chance)
        elif isinstance(row, list) and row and kind == 7:
            del row[-1]
        elif isinstance(row, list):
            row.append(draw_junk(chance))


def test_no_malformed_output_gives_another_exception():
    chance, read, messages = random.Random(0), 0, []
    valid = make_output()
    for _ in range(10_000):
        output = copy.deepcopy(valid)
        if chance.random() < 0.1:
            output["rewards"] = [1.0, 0.0, 2, True]
        for _ in range(chance.randint(1, 3)):
            spoil(output, chance)
        try:
            groups = from_generator_output(output)
        except ValueError as error:
            messages.append(str(error))
            continue
        read += 1
        assert groups
        assert all(isinstance(group, Group) and group.trajectories for group in groups)
        to_generator_output(groups, merge=True)
    assert 200 < read < 5000
    assert not any("\n" in message for message in messages)
    for junk in JUNK:
        with pytest.raises(ValueError, match=r"."):
            from_generator_output(junk)
