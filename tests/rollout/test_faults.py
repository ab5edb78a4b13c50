"""Calls that are not made: the model hears of each, and the calls beside them are made."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from rollout.render.test_toolcalls import CALLS, ONE_CALL, Listener, renderer
from support.acting import attempted, run, says, user
from turnwise.envs.base import Reply
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.faults import with_faults
from turnwise.runs.message_columns import calls_of_json, calls_to_json
from turnwise.types import Break, Status

GET = ToolCall("get", {"name": "amber"})
TOOLS = (ToolSpec("get"), ToolSpec("put"))
NO_TOOL = "there is no such tool; there are get, put"


def written(*names):
    calls = [json.dumps({"name": name, "arguments": {"name": "amber"}}) for name in names]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def heard(text, *replies, template=CALLS, **settings):
    """(first turn, in which the model writes `text`; what the environment heard; second turn; renderer)."""
    render = renderer("hermes", template, **settings)
    environment = Listener(*replies, Reply(finished=True), opening=Reply(user("go"), tools=TOOLS))
    texts = iter([text, "done"])
    made = run(attempted(environment, says(lambda *_: next(texts), render=render), render=render))
    assert made.status is Status.finished, made.failure
    return made.turns[0], environment.heard[:-1], made.turns[1], render


def results(*texts):
    return tuple(Message("tool", text) for text in texts)


def test_a_name_that_is_not_offered_has_an_error_for_its_result():
    turn, calls, after, render = heard(written("fly"))
    assert calls == []
    assert turn.heard == results(f"error: {NO_TOOL}")
    assert turn.said.faults == (NO_TOOL,)
    assert after.broke is Break.none
    assert NO_TOOL in render.decode(after.prompt)


def test_the_good_calls_beside_a_name_that_is_not_offered_are_made_and_results_stay_in_order():
    turn, calls, after, _ = heard(written("fly", "get"), Reply(results("cedar"), reward=0.5))
    assert calls == [Message("assistant", "", calls=(GET,))]
    assert turn.heard == results(f"error: {NO_TOOL}", "cedar")
    assert turn.reward == 0.5
    assert after.broke is Break.none


def test_the_good_calls_beside_a_broken_one_are_made():
    text = f"<tool_call>\n{{broken\n</tool_call>\n{written('get')}"
    turn, calls, after, render = heard(text, Reply(results("cedar")))
    assert [message.calls for message in calls] == [(GET,)]
    assert turn.heard[0] == Message("tool", "cedar")
    assert turn.heard[1].role == "user"
    assert "could not be read" in turn.heard[1].content
    assert "the other calls were read" in turn.heard[1].content
    assert "{broken" in turn.said.content
    assert "{broken" in render.decode(after.prompt)


def test_nothing_is_made_where_the_template_cannot_show_the_good_calls():
    text = f"<tool_call>{{broken</tool_call>{written('get', 'put')}"
    turn, calls, _, _ = heard(text, template=ONE_CALL + CALLS)
    assert calls == []
    assert turn.said.calls == ()
    assert turn.heard == user(turn.said.fault)
    assert "the other calls" not in turn.said.fault


def test_every_name_counts_where_nothing_is_offered():
    render = renderer("hermes", CALLS)
    environment = Listener(Reply(finished=True))
    run(attempted(environment, says(written("fly"), render=render), render=render))
    assert [call.name for call in environment.heard[0].calls] == ["fly"]


FLY = ToolCall("fly", {}, NO_TOOL)


@pytest.mark.parametrize(
    ("reply", "messages", "history"),
    [
        (Reply(user("words")), (*user("words"), Message("user", NO_TOOL)), None),
        (Reply(results("a", "b")), (*results("a", "b"), Message("user", NO_TOOL)), None),
        (Reply((*results("a"), *user("b"))), (*results("a", f"error: {NO_TOOL}"), *user("b")), None),
        (Reply(history=user("short")), (), (*user("short"), Message("user", NO_TOOL))),
    ],
)
def test_a_fault_is_heard_however_the_environment_answers(reply, messages, history):
    answer = with_faults(Message("assistant", "", calls=(GET, FLY)), reply, 1)
    assert (answer.messages, answer.history) == (messages, history)


def test_a_finished_attempt_hears_nothing_more():
    render = renderer("hermes", CALLS)
    environment = Listener(Reply(results("cedar"), finished=True), opening=Reply(user("go"), tools=TOOLS))
    made = run(attempted(environment, says(written("get", "fly"), render=render), render=render))
    assert made.turns[0].heard == results("cedar")


def test_the_fault_of_a_call_is_recorded():
    calls = (GET, FLY)
    assert calls_of_json(calls_to_json(calls)) == calls
    assert calls_of_json('[["get", {"name": "amber"}]]') == (GET,)
    assert pickle.loads(pickle.dumps(FLY)) == FLY
    assert replace(Message("assistant", "", calls=calls), fault="x").faults == ("x", NO_TOOL)
    with pytest.raises(ValueError, match="fault of a ToolCall"):
        ToolCall("get", {}, 3)
