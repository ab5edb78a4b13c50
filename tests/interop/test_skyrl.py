import copy
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import make_turn, trajectories
from turnwise.interop.skyrl import TrajectoryID, from_generator_output, to_generator_output
from turnwise.messages import Message
from turnwise.types import Group, Status, StopReason, Task, Trajectory, turns_of

many = settings(max_examples=250, deadline=None)
PER_TOKEN = ("response_ids", "rewards", "loss_masks", "rollout_logprobs")


@dataclass
class ForeignID:
    """As SkyRL declares it."""

    instance_id: str
    repetition_id: int


def make_output(**changes):
    """Two attempts at "a" (two turns, one turn) and one at "b", as SkyRL's generator gives them."""
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5], [1, 2], [7]],
        "response_ids": [[3, 4], [6], [9, 9, 9], [8, 8]],
        "rewards": [[0.0, 0.5], [1.0], [0.0, 0.0, 0.25], [0.0, -1.0]],
        "loss_masks": [[1, 1], [1], [1, 1, 1], [1, 1]],
        "stop_reasons": ["stop", "length", "stop", "abort"],
        "rollout_logprobs": [[-0.5, -0.25], [-1.0], [-0.5, -0.5, 0.0], [-2.0, -0.125]],
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("a", 1), TrajectoryID("b", 0)],
        "is_last_step": [False, True, True, True],
        "rollout_metrics": None,
        "rollout_expert_indices": None,
        **changes,
    }


def one_row(prompt, response, mask, rewards, **changes):
    row = {
        "prompt_token_ids": [prompt],
        "response_ids": [response],
        "rewards": [rewards],
        "loss_masks": [mask],
        "stop_reasons": ["stop"],
        "rollout_logprobs": None,
        "trajectory_ids": ["a_0"],
        "is_last_step": [True],
    }
    return {**row, **changes}


def plain(turn):
    """What the format holds of a turn."""
    return turn.prompt.tolist(), turn.action.tolist(), turn.logprobs.tolist(), turn.reward


def read_turns(output):
    return [(*plain(turn)[:2], turn.reward) for turn in turns_of(from_generator_output(output))]


def expected_turns(trajectory):
    """The turns that reading should give for a written attempt, by the words of the module's docstring."""
    kept, early = [], 0.0
    for turn in trajectory.turns:
        if len(turn.action):
            kept.append([*plain(turn)[:3], turn.reward + early])
            early = 0.0
        elif kept:
            kept[-1][3] += turn.reward
        else:
            early += turn.reward
    if not kept:
        return [(trajectory.turns[0].prompt.tolist(), [], [], trajectory.total)]
    kept[-1][3] += trajectory.outcome
    return [tuple(turn) for turn in kept]


def group_lists(**how):
    attempts = st.lists(trajectories(max_turns=4, **how), min_size=1, max_size=3)
    return st.lists(attempts, min_size=1, max_size=3).map(
        lambda made: [Group(Task(f"task_{i}", "test"), tuple(group)) for i, group in enumerate(made)]
    )


# ---------------------------------------------------------------- round trips


@many
@given(group_lists(), st.booleans())
def test_what_is_written_is_read_back(groups, merge):
    back = from_generator_output(to_generator_output(groups, merge=merge))
    assert [group.task.id for group in back] == [group.task.id for group in groups]
    for group, was in zip(back, groups, strict=True):
        assert group.failed == ()
        for attempt, before in zip(group.trajectories, was.trajectories, strict=True):
            assert [plain(turn) for turn in attempt.turns] == expected_turns(before)
            assert (attempt.total, attempt.outcome, attempt.status) == (before.total, 0.0, Status.finished)
            assert all(turn.said == Message("assistant", "") and turn.heard == () for turn in attempt.turns)


def merge_rows(output):
    """The rows of an output, each joined to the row before wherever its prompt begins with that and adds to it."""
    rows = []
    for index in range(len(output["response_ids"])):
        row = {key: column[index] for key, column in output.items() if column is not None}
        before = rows[-1] if rows and not rows[-1]["is_last_step"] else {"prompt_token_ids": [-1], "response_ids": []}
        whole = before["prompt_token_ids"] + before["response_ids"]
        gap = row["prompt_token_ids"][len(whole) :]
        if gap and row["prompt_token_ids"][: len(whole)] == whole:
            for key in PER_TOKEN:
                between = gap if key == "response_ids" else [0] * len(gap)
                before[key] = before[key] + between + row[key]
            before |= {key: row[key] for key in ("stop_reasons", "is_last_step")}
        else:
            rows.append(row)
    return {key: [row[key] for row in rows] for key in rows[0]}


@many
@given(group_lists(min_action=1))
def test_merging_is_joining_rows_that_continue_each_other(groups):
    one, merged = to_generator_output(groups), to_generator_output(groups, merge=True)
    assert one["response_ids"] == [turn.action.tolist() for turn in turns_of(groups)]
    assert {key: column for key, column in merged.items() if column is not None} == merge_rows(one)


@st.composite
def outputs(draw, merged):
    """Outputs as SkyRL gives them, one row per turn or merged, with masked tokens after last rows (or after none)."""
    rewards = st.integers(-8, 8).map(lambda eighths: eighths / 8)
    token, rows = st.integers(0, 99), []
    for instance in range(draw(st.integers(1, 3))):
        for repetition in range(draw(st.integers(1, 3))):
            num_rows = draw(st.integers(1, 3))
            for place in range(num_rows):
                # a first token of its own keeps a merged row from continuing the row before
                row: dict[str, Any] = {"prompt_token_ids": [100 + place, *draw(st.lists(token, max_size=3))]}
                row |= {key: [] for key in PER_TOKEN}
                for turn in range(draw(st.integers(1, 3)) if merged else 1):
                    between = draw(st.lists(token, min_size=1, max_size=3)) if turn else []
                    action = draw(st.lists(token, min_size=1, max_size=3))
                    row["response_ids"] += between + action
                    row["loss_masks"] += [0] * len(between) + [1] * len(action)
                    row["rewards"] += [0.0] * (len(between) + len(action) - 1) + [draw(rewards)]
                    row["rollout_logprobs"] += [0.0] * len(between) + [-draw(st.integers(0, 9)) / 4 for _ in action]
                row["stop_reasons"] = draw(st.sampled_from(["stop", "length", "abort"]))
                row["trajectory_ids"] = TrajectoryID(f"i{instance}", repetition)
                row["is_last_step"] = place == num_rows - 1
                rows.append(row)
    return {key: [row[key] for row in rows] for key in rows[0]} | {"rollout_metrics": None}


@many
@given(st.booleans().flatmap(lambda merged: st.tuples(st.just(merged), outputs(merged))), st.randoms())
def test_what_is_read_is_written_back(drawn, chance):
    merged, output = drawn
    longer = copy.deepcopy(output)
    for row, last in enumerate(output["is_last_step"]):
        tail = chance.randrange(4) if last else 0
        longer["response_ids"][row] += [chance.randrange(99) for _ in range(tail)]
        for key in PER_TOKEN[1:]:
            longer[key][row] += [0] * tail
    for given_output in (output, longer):
        written = to_generator_output(from_generator_output(given_output), merge=merged)
        assert {key: written[key] for key in output} == output
    longer["rewards"] = [sum(rewards) for rewards in longer["rewards"]]
    if not merged:
        written = to_generator_output(from_generator_output(longer))
        assert {key: written[key] for key in output} == output


@many
@given(st.data())
def test_any_mask_is_read_and_keeps_totals_and_trained_tokens(data):
    size = data.draw(st.integers(0, 8))
    response = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    rewards = data.draw(st.lists(st.integers(-8, 8).map(float), min_size=size, max_size=size))
    groups = from_generator_output(one_row([1], response, mask, rewards))
    (attempt,) = groups[0].trajectories
    assert attempt.total == sum(rewards)
    trained = [token for token, kept in zip(response, mask, strict=True) if kept]
    assert [token for turn in attempt.turns for token in turn.action.tolist()] == trained
    again = from_generator_output(to_generator_output(groups, merge=data.draw(st.booleans())))
    assert [plain(turn)[:2] for turn in turns_of(again)] == [plain(turn)[:2] for turn in turns_of(groups)]
    assert [turn.reward for turn in turns_of(again)] == [turn.reward for turn in turns_of(groups)]


# ---------------------------------------------------------------- reading


def test_a_whole_output():
    a, b = from_generator_output(make_output())
    assert [g.task for g in (a, b)] == [Task("a", "skyrl"), Task("b", "skyrl")]
    assert [len(t.turns) for t in a.trajectories] == [2, 1]
    first, second = a.trajectories[0].turns
    assert plain(first) == ([1, 2], [3, 4], [-0.5, -0.25], 0.5)
    assert plain(second) == ([1, 2, 3, 4, 5], [6], [-1.0], 1.0)
    assert [turn.stop for turn in turns_of([a, b])] == ["end_token", "length", "end_token", "abort"]
    assert first.versions.tolist() == [0, 0]


def test_masked_tokens_are_context_and_rewards_reach_to_the_next_turn():
    #                       obs  act  act  eos  obs  act  eos
    output = one_row([1], [10, 11, 12, 13, 14, 15, 16], [0, 1, 1, 0, 0, 1, 0], [8.0, 1.0, 2.0, 4.0, 16.0, 32.0, 64.0])
    assert read_turns(output) == [([1, 10], [11, 12], 31.0), ([1, 10, 11, 12, 13, 14], [15], 96.0)]
    assert read_turns({**output, "rewards": [3.0]})[-1][2] == 3.0


def test_a_reward_before_a_later_rows_first_action_belongs_to_the_turn_before():
    output = make_output(
        loss_masks=[[1, 1], [1], [0, 1, 1], [1, 1]],
        trajectory_ids=["a_0"] * 4,
        is_last_step=[0, 0, 0, 1],
        rewards=[[0.0, 0.5], [1.0], [0.25, 0.0, 2.0], [0.0, -1.0]],
    )
    assert [turn[2] for turn in read_turns(output)] == [0.5, 1.25, 2.0, -1.0]


def test_a_row_without_trained_tokens_is_a_turn_without_action():
    output = make_output(loss_masks=[[1, 1], [0], [0, 0, 0], [1, 1]])
    groups = from_generator_output(output)
    assert read_turns(output)[1:3] == [([1, 2, 3, 4, 5], [], 1.0), ([1, 2], [], 0.25)]
    written = to_generator_output(groups)
    assert written["rewards"] == [[0.0, 1.5], [0.25], [0.0, -1.0]]
    assert written["loss_masks"] == [[1, 1], [0], [1, 1]]
    assert read_turns(make_output(response_ids=[[3, 4], [], [9] * 3, [8, 8]], loss_masks=[[1, 1], [], [1] * 3, [1, 1]],
                                  rewards=[1, 2, 3, 4], rollout_logprobs=None))[1][1:] == ([], 2.0)  # fmt: skip


@pytest.mark.parametrize("absent", [{}, {"rollout_logprobs": None, "stop_reasons": None}])
def test_optional_keys(absent):
    output = make_output()
    del output["rollout_logprobs"], output["stop_reasons"]
    turns = list(turns_of(from_generator_output(output | absent)))
    assert all(np.isnan(turn.logprobs).all() and turn.stop == StopReason.end_token for turn in turns)
    assert to_generator_output(from_generator_output(output))["rollout_logprobs"] is None


@pytest.mark.parametrize(
    "of",
    [
        lambda name, number: ForeignID(name, number),
        lambda name, number: SimpleNamespace(instance_id=name, repetition_id=np.int64(number)),
        lambda name, number: (name, number),
        lambda name, number: [name, number],
        lambda name, number: f"{name}_{number}",
        lambda name, number: np.str_(f"{name}_{number}"),
    ],
)
def test_ways_to_name_an_attempt(of):
    ids = [of("x_1", 3), of("x_1", 3), of("x_1", 0), of("x", 1)]
    groups = from_generator_output(make_output(trajectory_ids=ids))
    assert [(group.task.id, len(group.trajectories)) for group in groups] == [("x_1", 2), ("x", 1)]


def test_numbers_of_any_make_mean_the_same():
    torch = pytest.importorskip("torch")
    plain_output = make_output()
    expected = to_generator_output(from_generator_output(plain_output))
    ways = [np.array, tuple, torch.tensor, lambda row: list(np.array(row)), lambda row: np.array(row, object)]
    for way in ways:
        other = {key: [way(row) for row in plain_output[key]] for key in (*PER_TOKEN, "prompt_token_ids")}
        flags = way(plain_output["is_last_step"])
        output = plain_output | other | {"is_last_step": flags if way is not torch.tensor else flags.numpy()}
        assert to_generator_output(from_generator_output(output)) == expected
    for mask in (np.bool_, bool, float, np.float32, np.int8):
        masks = [[mask(value) for value in row] for row in plain_output["loss_masks"]]
        flags = [mask(value) for value in plain_output["is_last_step"]]
        assert to_generator_output(from_generator_output(make_output(loss_masks=masks, is_last_step=flags))) == expected
    square = one_row([1], [2, 3], [1, 1], [0.0, 1.0])
    stacked = square | {key: np.array(square[key]) for key in ("prompt_token_ids", *PER_TOKEN[:3])}
    assert read_turns(stacked) == read_turns(square) == read_turns(square | {"rewards": np.array([1.0])})


# ---------------------------------------------------------------- writing


def written(turns, outcome=0.0, merge=False, **fields):
    output = to_generator_output([Group(Task("a", "t"), (Trajectory(turns, Status.finished, outcome),))], merge=merge)
    return [output[key] for key in fields.get("keys", ("prompt_token_ids", "response_ids", "rewards", "loss_masks"))]


def test_one_row_per_turn_and_one_row_per_chain():
    turns = (make_turn([1], [2, 3], reward=0.5), make_turn([1, 2, 3, 4], [5], reward=0.25), make_turn([1, 9], [6, 7]))
    assert written(turns, 2.0) == [
        [[1], [1, 2, 3, 4], [1, 9]],
        [[2, 3], [5], [6, 7]],
        [[0.0, 0.5], [0.25], [0.0, 2.0]],
        [[1, 1], [1], [1, 1]],
    ]
    assert written(turns, 2.0, merge=True) == [
        [[1], [1, 9]],
        [[2, 3, 4, 5], [6, 7]],
        [[0.0, 0.5, 0.0, 0.25], [0.0, 2.0]],
        [[1, 1, 0, 1], [1, 1]],
    ]
    ids = written(turns, merge=True, keys=("trajectory_ids", "is_last_step", "stop_reasons", "rollout_metrics"))
    assert ids == [[("a", 0), ("a", 0)], [False, True], ["stop", "stop"], None]
    assert ids[0][0].to_string() == "a_0"


def test_turns_that_nothing_lies_between_stay_two_rows():
    turns = (make_turn([1], [2, 3]), make_turn([1, 2, 3], [4]))
    assert written(turns, merge=True)[1] == [[2, 3], [4]]


def test_the_reward_of_an_empty_action_is_paid_with_the_action_before():
    turns = [
        make_turn([1], [], reward=1.0),
        make_turn([1], [2, 3], reward=2.0),
        make_turn([1, 2, 3, 4], [], reward=4.0),
    ]
    more = [*turns, make_turn([1, 2, 3, 4, 5], [6], reward=8.0), make_turn([7], [], reward=16.0)]
    assert written(turns, 32.0)[1:3] == [[[2, 3]], [[0.0, 39.0]]]
    assert written(more, 32.0, merge=True)[1:3] == [[[2, 3, 4, 5, 6]], [[0.0, 7.0, 0.0, 0.0, 56.0]]]


def test_an_attempt_that_sampled_nothing_keeps_its_total():
    turns = (make_turn([1, 2], [], reward=0.5), make_turn([3], [], reward=0.25))
    assert written(turns, 1.0) == [[[1, 2]], [[2]], [[1.75]], [[0]]]
    assert written(turns, keys=("rollout_logprobs",)) == [[[0.0]]]


def test_unknown_logprobs_are_none_for_the_whole_output():
    known, unknown = make_turn([1], [2]), make_turn([1], [2], logprobs=[math.nan])
    assert written((known,), keys=("rollout_logprobs",))[0] is not None
    assert written((known, unknown), keys=("rollout_logprobs",)) == [None]


def test_stop_reasons_are_those_skyrl_knows():
    for stop, word in zip(StopReason, ("stop", "stop", "length", "abort"), strict=True):
        assert written((replace(make_turn([1], [2]), stop=stop),), keys=("stop_reasons",)) == [[word]]
    words = from_generator_output(make_output(stop_reasons=["error", "tool_calls", "", "length"]))
    assert [turn.stop for turn in turns_of(words)] == ["abort", "abort", "abort", "length"]


def test_failed_attempts_are_not_written_and_nothing_is_an_error():
    attempt, failed = Trajectory((make_turn([1], [2]),), Status.too_long), Trajectory((), Status.failed)
    assert len(to_generator_output([Group(Task("a", "t"), (attempt,), (failed,))])["response_ids"]) == 1
    for groups in ([], [Group(Task("a", "t"), (), (failed,))]):
        with pytest.raises(ValueError, match="no attempt that counts"):
            to_generator_output(groups)


def test_what_the_format_would_mix_up_is_refused():
    group = Group(Task("a", "t"), (Trajectory((make_turn([1], [2]),), Status.finished),))
    with pytest.raises(ValueError, match="'a' has two groups"):
        to_generator_output([group, group])
    large = Trajectory((make_turn([1], [2], reward=-1e308), make_turn([1], [2], reward=1e308)), Status.finished, 1e308)
    with pytest.raises(ValueError, match="finite"):
        to_generator_output([Group(Task("a", "t"), (large,))])
