import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, group_lists, make_trajectory, make_turn, make_turns, trajectories
from turnwise.messages import Message, ToolSpec
from turnwise.tokens import extends, lost_tokens, pack_tokens
from turnwise.types import Break, Group, Status, StopReason, Task, Trajectory, Turn, TurnTiming, by_seat, turns_of

ARRAYS = ("prompt", "action", "logprobs", "versions")
COUNT = [Status.finished, Status.too_many_turns, Status.too_long, Status.observation_too_large, Status.penalised]
DO_NOT_COUNT = [Status.prompt_too_long, Status.timed_out, Status.failed]
HEARD = Message("user", "heard")


def turn_fields(**changes):
    plain = {
        "prompt": [1, 2, 3],
        "action": [4, 5],
        "logprobs": [-0.5, -0.25],
        "versions": [3, 4],
        "stop": StopReason.length,
        "reward": 0.5,
        "said": Message("assistant", "said"),
    }
    return {**plain, **changes}


def assert_same(one, other):
    """Equal in every field, bit for bit where they are arrays."""
    assert type(one) is type(other)
    if isinstance(one, (Group, Trajectory, Turn)):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


# ---------------------------------------------------------------- messages and tasks


@pytest.mark.parametrize(("role", "content"), [(1, "text"), ("user", None), ("user", ["text"])])
def test_a_message_is_two_strings(role, content):
    with pytest.raises(ValueError, match="two strings"):
        Message(role, content)


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_task_needs_a_string_id(name):
    with pytest.raises(ValueError, match="non-empty string id"):
        Task(name, "hops")


def test_the_data_of_a_task_is_a_mapping():
    with pytest.raises(ValueError, match="task a: data must be a mapping, got list"):
        Task("a", "hops", [1])


def test_a_task_keeps_its_own_data():
    data = {"links": 2}
    task = Task("a", "hops", data)
    data["links"] = 3
    assert task.data == {"links": 2}


def test_equal_ids_of_a_dataset_are_the_same_task():
    assert Task("a", "hops", {"x": 1}) == Task("a", "hops", {"x": [2]})
    assert hash(Task("a", "hops", {"x": 1})) == hash(Task("a", "hops", {"x": [2]}))
    assert Task("a", "hops") != Task("b", "hops")
    assert Task("a", "hops") != Task("a", "guess")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Message("user", "x"), "content"),
        (Task("a", "b"), "id"),
        (TurnTiming(), "queued"),
        (Turn(**turn_fields()), "reward"),
        (Trajectory((Turn(**turn_fields()),), Status.finished), "outcome"),
        (Group(Task("a", "b"), ()), "failed"),
    ],
)
def test_values_are_frozen_and_have_no_place_for_anything_else(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, getattr(value, field))
    with pytest.raises((AttributeError, TypeError)):
        value.note = 1
    assert not hasattr(value, "__dict__")


# ---------------------------------------------------------------- turns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.5]}, "2 tokens, 1 logprobs and 2 versions"),
        ({"versions": [3]}, "2 tokens, 2 logprobs and 1 versions"),
        ({"action": []}, "0 tokens, 2 logprobs and 2 versions"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, -1]}, "negative"),
        ({"action": [-4, 5]}, "negative"),
        ({"prompt": [[1, 2]]}, r"Turn.prompt must be one-dimensional, got shape \(1, 2\)"),
        ({"action": 4}, r"Turn.action must be one-dimensional, got shape \(\)"),
        ({"prompt": [1.5]}, "Turn.prompt must hold whole numbers of 32 bits"),
        ({"action": [4, math.nan]}, "Turn.action must hold whole numbers"),
        ({"versions": [3, 2**31]}, "Turn.versions must hold whole numbers"),
        ({"logprobs": [-0.5, 0.01]}, "must not be positive"),
        ({"logprobs": [-0.5, math.inf]}, "must not be positive"),
        ({"logprobs": [math.nan, 0.5]}, "must not be positive"),
        ({"reward": math.nan}, "reward must be finite"),
        ({"reward": -math.inf}, "reward must be finite"),
        ({"stop": "because"}, "because"),
    ],
)
def test_a_turn_that_makes_no_sense_is_not_born(changes, message):
    with pytest.raises(ValueError, match=message):
        Turn(**turn_fields(**changes))


def test_a_turn_holds_arrays_of_its_own_types():
    turn = Turn(**turn_fields(stop="abort", heard=[HEARD]))
    assert [getattr(turn, name).dtype for name in ARRAYS] == [np.int32, np.int32, np.float32, np.int32]
    assert turn.stop is StopReason.abort
    assert turn.heard == (HEARD,)
    assert turn.timing == TurnTiming(0.0, 0.0, 0.0, 0.0)


def test_unknown_logprobs_and_an_empty_action_are_allowed():
    assert np.isnan(Turn(**turn_fields(logprobs=[math.nan, -1.0])).logprobs[0])
    assert len(Turn(**turn_fields(action=[], logprobs=[], versions=[])).action) == 0


def test_rounding_may_put_a_logprob_a_little_above_zero():
    assert Turn(**turn_fields(logprobs=[1e-6, 0.0])).logprobs[0] > 0


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_turn_are_read_only_and_not_the_callers(name):
    dtype = np.float32 if name == "logprobs" else np.int32
    mine = np.array(turn_fields()[name], dtype)
    turn = Turn(**turn_fields(**{name: mine}))
    with pytest.raises(ValueError, match="read-only"):
        getattr(turn, name)[0] = 0
    before = getattr(turn, name).copy()
    mine[:] = 0
    np.testing.assert_array_equal(getattr(turn, name), before)


def test_a_read_only_array_is_taken_without_a_copy():
    mine = np.arange(3, dtype=np.int32)
    mine.flags.writeable = False
    assert Turn(**turn_fields(prompt=mine)).prompt is mine


def test_a_read_only_view_of_a_writable_array_is_not_trusted():
    mine = np.arange(3, dtype=np.int32)
    view = mine[:]
    view.flags.writeable = False
    turn = Turn(**turn_fields(prompt=view))
    mine[0] = -1
    assert turn.prompt[0] == 0


def remake_by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("remake", [remake_by_pickle, copy.copy, copy.deepcopy])
def test_a_lone_turn_survives_copies(remake):
    turn = Turn(**turn_fields(heard=(HEARD,), timing=TurnTiming(1.0, 2.0, 3.0, 4.0)))
    assert_same(remake(turn), turn)


@pytest.mark.parametrize("remake", [remake_by_pickle, copy.deepcopy])
def test_a_lone_turn_stays_read_only_through_copies(remake):
    assert not any(getattr(remake(Turn(**turn_fields())), name).flags.writeable for name in ARRAYS)


# ---------------------------------------------------------------- trajectories and groups


@pytest.mark.parametrize("status", COUNT)
def test_an_attempt_that_counts_has_a_turn(status):
    assert status.counts
    with pytest.raises(ValueError, match=f"ended as {status} has at least one turn"):
        Trajectory((), status)


@pytest.mark.parametrize("status", DO_NOT_COUNT)
def test_an_attempt_that_does_not_count_may_have_none(status):
    assert not status.counts
    assert Trajectory((), status).num_action_tokens == 0


def test_every_status_counts_or_does_not():
    assert set(COUNT) | set(DO_NOT_COUNT) == set(Status)


@pytest.mark.parametrize("outcome", [math.nan, math.inf])
def test_an_outcome_is_finite(outcome):
    with pytest.raises(ValueError, match="outcome must be finite"):
        Trajectory((Turn(**turn_fields()),), Status.finished, outcome)


def test_a_status_is_one_of_those_known():
    with pytest.raises(ValueError, match="gave_up"):
        Trajectory((Turn(**turn_fields()),), "gave_up")


def test_marks_are_numbers_and_read_only():
    given_marks = {"lookups": 2}
    trajectory = Trajectory((Turn(**turn_fields()),), "finished", 1, given_marks)
    given_marks["lookups"] = 3
    assert dict(trajectory.marks) == {"lookups": 2.0}
    with pytest.raises(TypeError):
        trajectory.marks["lookups"] = 3.0
    with pytest.raises(ValueError, match="many"):
        Trajectory((Turn(**turn_fields()),), "finished", 1, {"lookups": "many"})


def test_total_is_the_outcome_and_all_rewards():
    trajectory = make_trajectory([(1, 1)] * 3, outcome=1.0, rewards=[0.25, -0.5, 4.0])
    assert trajectory.total == 4.75


def test_total_does_not_depend_on_the_order_of_rewards():
    rewards = [1e16, 1.0, -1e16, 1.0]
    totals = {make_trajectory([(1, 1)] * 4, rewards=order).total for order in (rewards, rewards[::-1], sorted(rewards))}
    assert totals == {2.0}


def test_num_action_tokens_counts_actions_only():
    assert make_trajectory([(5, 2), (3, 0), (4, 7)]).num_action_tokens == 9


@pytest.mark.parametrize("status", COUNT)
def test_an_attempt_that_counts_is_not_among_the_failed(status):
    with pytest.raises(ValueError, match=r"belongs in Group\.trajectories"):
        Group(Task("a", "b"), (), (make_trajectory([(1, 1)], status=status),))


@pytest.mark.parametrize("status", DO_NOT_COUNT)
def test_an_attempt_that_does_not_count_is_not_among_those_compared(status):
    with pytest.raises(ValueError, match=r"belongs in Group\.failed"):
        Group(Task("a", "b"), (Trajectory((), status),))


def test_turns_of_is_group_by_group_attempt_by_attempt_without_the_failed():
    first = make_trajectory([(1, 1), (1, 2)])
    second = make_trajectory([(1, 3)])
    third = make_trajectory([(1, 4)])
    lost = make_trajectory([(1, 9)], status=Status.failed)
    groups = [Group(Task("a", "x"), [first, second], [lost]), Group(Task("b", "x"), [third])]
    assert [len(turn.action) for turn in turns_of(groups)] == [1, 2, 3, 4]


# ---------------------------------------------------------------- shared storage


def buffers_of(trajectory):
    return {id(array.base) for turn in trajectory.turns for array in (turn.prompt, turn.action)}


def test_a_growing_history_is_stored_once():
    trajectory = make_trajectory([(6, 3), (4, 2), (5, 1)])
    last = trajectory.turns[-1]
    assert len(buffers_of(trajectory)) == 1
    assert last.prompt.base.nbytes == 4 * (len(last.prompt) + len(last.action))
    for turn in trajectory.turns[:-1]:
        assert np.shares_memory(turn.prompt, last.prompt)
        assert np.shares_memory(turn.action, last.prompt)


def test_a_history_that_did_not_grow_is_stored_whole():
    trajectory = make_trajectory([(6, 3), (4, 2)], growing=False)
    one, other = trajectory.turns
    assert not np.shares_memory(one.prompt, other.prompt)
    assert one.prompt.base.nbytes == 4 * (6 + 3 + 4 + 2)


@pytest.mark.parametrize("place", [0, 2, 3, 4])
def test_one_different_token_breaks_the_sharing(place):
    first = make_turn([1, 2, 3], [4, 5])
    prompt = [1, 2, 3, 4, 5, 6]
    assert extends(make_turn(prompt, [7]), first)
    prompt[place] = 9
    second = make_turn(prompt, [7])
    assert not extends(second, first)
    trajectory = Trajectory((first, second), Status.finished)
    assert trajectory.turns[1].prompt.tolist() == prompt
    assert not np.shares_memory(trajectory.turns[0].prompt, trajectory.turns[1].prompt)


def test_a_prompt_shorter_than_the_turn_before_does_not_extend_it():
    assert not extends(make_turn([1, 2, 3, 4], [7]), make_turn([1, 2, 3], [4, 5]))
    assert extends(make_turn([1, 2, 3, 4, 5], [7]), make_turn([1, 2, 3], [4, 5]))


@few
@given(trajectories(max_turns=5), trajectories(max_turns=3))
def test_packed_tokens_give_every_turn_back(one, other):
    turns = (*one.turns, *other.turns)
    buffer, spans = pack_tokens(turns)
    for turn, (start, middle, end) in zip(turns, spans, strict=True):
        assert buffer[start:middle].tolist() == turn.prompt.tolist()
        assert buffer[middle:end].tolist() == turn.action.tolist()
    unique, before = 0, []
    for turn in turns:
        known = len(before) if turn.prompt[: len(before)].tolist() == before else 0
        before = [*turn.prompt.tolist(), *turn.action.tolist()]
        unique += len(before) - known
    assert len(buffer) == unique
    assert not buffer.flags.writeable


def test_no_turns_pack_into_nothing():
    buffer, spans = pack_tokens(())
    assert (buffer.shape, spans.shape) == ((0,), (0, 3))
    assert buffer.dtype == np.int32


def unique_bytes(trajectory):
    """Bytes of all tokens stored once, their logprobs and versions, and the text."""
    text = sum(len(m.content.encode()) for turn in trajectory.turns for m in (turn.said, *turn.heard))
    last = trajectory.turns[-1]
    return 4 * (len(last.prompt) + len(last.action)) + 8 * trajectory.num_action_tokens + text


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_growing_trajectory_of_64_turns_pickles_within_1_2_of_its_unique_bytes(protocol):
    turns = [
        make_turn(turn.prompt, turn.action, said=Message("assistant", f"{place:03d} " * 64), heard=(HEARD,))
        for place, turn in enumerate(make_turns([(60, 40)] * 64))
    ]
    trajectory = Trajectory(tuple(turns), Status.finished, 1.0)
    naive = sum(turn.prompt.nbytes for turn in turns)
    dumped = len(pickle.dumps(Group(Task("a", "b"), (trajectory,)), protocol=protocol))
    assert dumped <= 1.2 * unique_bytes(trajectory)
    assert naive > 10 * dumped, "the test must be able to tell shared from repeated"
    again = pickle.loads(pickle.dumps(trajectory, protocol=protocol))
    assert again.turns[0].prompt.base.nbytes == trajectory.turns[0].prompt.base.nbytes


def test_an_unpickled_trajectory_is_the_same_without_being_checked_again(monkeypatch):
    heard = Message("user", "heard", calls=()), Message("tool", "found")
    timing = TurnTiming(0.1, 0.2, 0.3, 0.4)
    first = Turn(**turn_fields(heard=heard, timing=timing, reward=0.5))
    second = Turn(**turn_fields(prompt=[1, 2, 3, 4, 5, 6], action=[7], logprobs=[-1.0], versions=[5]))
    third = Turn(**turn_fields(prompt=[9], broke=Break.history))
    made = Trajectory((first, second, third), Status.finished, 1.0, {"lookups": 2.0}, seat=1, opening=heard)
    data = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
    for kind in (Turn, Trajectory):
        monkeypatch.setattr(kind, "__post_init__", lambda _: pytest.fail("it was checked again"))
    again = pickle.loads(data)
    for name in ("status", "outcome", "marks", "failure", "seat", "opening", "tools"):
        assert getattr(again, name) == getattr(made, name)
    assert (again.spans == made.spans).all()
    assert type(again.marks) is type(made.marks)
    for turn, other in zip(again.turns, made.turns, strict=True):
        for name in ARRAYS:
            one, two = getattr(turn, name), getattr(other, name)
            assert one.dtype == two.dtype
            assert one.tolist() == two.tolist()
            with pytest.raises(ValueError, match="read-only"):
                one[0] = 1
        assert np.shares_memory(turn.prompt, again.buffer)
        assert np.shares_memory(turn.action, again.buffer)
        for name in ("stop", "reward", "said", "heard", "timing", "broke", "allowed", "routes"):
            assert getattr(turn, name) == getattr(other, name)
            assert type(getattr(turn, name)) is type(getattr(other, name))


@pytest.mark.parametrize("remake", [remake_by_pickle, copy.copy, copy.deepcopy])
@few
@given(group_lists(min_groups=1, max_groups=1, max_turns=5), st.sampled_from(DO_NOT_COUNT))
def test_groups_survive_pickle_and_copies(remake, groups, status):
    lost = Trajectory((), status, 0.5, {"mark": 1.0})
    group = Group(Task("a", "b", {"x": [1]}), groups[0].trajectories, (lost,))
    again = remake(group)
    assert_same(again, group)
    assert again.task.data == group.task.data
    for before, after in zip(group.trajectories, again.trajectories, strict=True):
        remade = remake(before)
        assert_same(remade, before)
        for trajectory in (after, remade):
            assert len(buffers_of(trajectory)) == 1
            assert trajectory.turns[0].prompt.base.nbytes == before.turns[0].prompt.base.nbytes
            assert not any(getattr(turn, name).flags.writeable for turn in trajectory.turns for name in ARRAYS)


def test_a_prefix_that_broke_has_a_cause_and_a_cost():
    first = make_turn([1, 2, 3], [4, 5])
    grew = make_turn([1, 2, 3, 4, 5, 6], [7])
    assert lost_tokens(grew, first) == 0
    assert lost_tokens(make_turn([1, 2, 9, 4, 5, 6], [7]), first) == 3
    assert lost_tokens(make_turn([1, 2, 3, 4], [7]), first) == 1
    assert lost_tokens(make_turn([8], [7]), first) == 5
    anew = make_turn([1, 2], [7])
    stripped = make_turn([1, 2], [7], broke=Break.template)
    for turns, broke in (((first, grew), "none"), ((first, anew), "unknown"), ((first, stripped), "template")):
        trajectory = Trajectory(turns, Status.finished)
        assert [turn.broke for turn in trajectory.turns] == [Break.none, broke]
        again = pickle.loads(pickle.dumps(trajectory))
        assert [turn.broke for turn in again.turns] == [Break.none, broke]
        assert pickle.loads(pickle.dumps(trajectory.turns[1])).broke is Break(broke)


# ---------------------------------------------------------------- tools

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}, "deep": {"type": "boolean"}}}


def test_a_tool_is_a_value():
    tool = ToolSpec("get", "Where a name leads.", SCHEMA)
    again = pickle.loads(pickle.dumps(tool))
    assert tool == again
    assert hash(tool) == hash(again)
    assert tool.schema == {
        "type": "function",
        "function": {"name": "get", "description": "Where a name leads.", "parameters": SCHEMA},
    }
    assert json.dumps(tool.schema) == json.dumps(again.schema)
    others = [
        ToolSpec("got", "Where a name leads.", SCHEMA),
        ToolSpec("get", "", SCHEMA),
        ToolSpec("get", "Where a name leads."),
        ToolSpec("get", "Where a name leads.", {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}),
    ]
    assert len({tool, *others}) == 5


def test_a_tool_does_not_change_with_what_it_was_made_of():
    schema = json.loads(json.dumps(SCHEMA))
    tool = ToolSpec("get", "", schema)
    schema["properties"]["name"]["type"] = "integer"
    assert tool.schema["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 129, None, 3, "get\n"])
def test_a_name_that_no_call_could_have(name):
    with pytest.raises(ValueError, match="name of a ToolSpec"):
        ToolSpec(name)


@pytest.mark.parametrize("parameters", [None, [], "x", {}, {"type": "string"}, {"type": "object", "properties": []}])
def test_parameters_are_the_schema_of_an_object(parameters):
    with pytest.raises(ValueError, match="JSON schema"):
        ToolSpec("get", "", parameters)


@few
@given(group_lists(), st.data())
def test_seats_are_split_without_moving_a_turn(groups, data):
    seated = [
        Group(
            group.task,
            tuple(replace(one, seat=data.draw(st.integers(0, 2))) for one in group.trajectories),
            group.failed,
        )
        for group in groups
    ]
    parts = by_seat(seated)
    assert [id(turn) for turn in turns_of(parts)] == [id(turn) for turn in turns_of(seated)]
    assert all(len({one.seat for one in part.trajectories}) <= 1 for part in parts)
    assert [part for part, group in zip(by_seat(groups), groups, strict=True) if part is not group] == []


def test_the_seat_of_an_attempt_is_kept():
    played = replace(make_trajectory([(3, 2), (1, 1)], outcome=1.0), seat=1)
    assert pickle.loads(pickle.dumps(played)).seat == 1
    assert [one.seat for one in Group(Task("t", "x"), (played, make_trajectory([(2, 1)]))).trajectories] == [0, 1]
