import math

import numpy as np
import pytest

from turnwise.envs.base import Reply
from turnwise.messages import Message, ToolSpec

SOME = Message("user", "x")


def test_an_empty_reply_says_nothing_pays_nothing_and_goes_on():
    reply = Reply()
    assert (reply.messages, reply.reward, reply.outcome, reply.finished, reply.history, reply.stop) == (
        (),
        0.0,
        0.0,
        False,
        None,
        (),
    )
    assert reply.marks == {}


def test_sequences_become_tuples():
    """A list that the environment goes on filling must not change a reply."""
    messages, stop = [SOME], ["</a>"]
    reply = Reply(messages, history=messages, stop=stop)
    messages.append(SOME)
    stop.append("x")
    assert reply.messages == reply.history == (SOME,)
    assert reply.stop == ("</a>",)
    assert Reply(message for message in messages).messages == (SOME, SOME)


@pytest.mark.parametrize("amount", [0, 1, -2.5, np.float64(0.5), 10**20])
def test_finite_numbers_are_rewards(amount):
    assert Reply(reward=amount, outcome=amount, marks={"a": amount}).reward == amount


@pytest.mark.parametrize("amount", [math.nan, math.inf, -math.inf, True, "1", None, [1], 1j, 10**400])
@pytest.mark.parametrize("where", ["reward", "outcome", "marks"])
def test_anything_else_is_not(where, amount):
    with pytest.raises(ValueError, match="finite numbers"):
        Reply(**{where: {"a": amount} if where == "marks" else amount})


@pytest.mark.parametrize("messages", ["hello", SOME, ["hello"], [{"role": "user", "content": "x"}], [None]])
@pytest.mark.parametrize("where", ["messages", "history"])
def test_messages_are_messages(where, messages):
    with pytest.raises(ValueError):
        Reply(**{where: messages})


@pytest.mark.parametrize("finished", [0, 1, None, "no", np.True_])
def test_finished_is_a_bool(finished):
    with pytest.raises(ValueError, match="finished is a bool"):
        Reply(finished=finished)


@pytest.mark.parametrize("stop", [("",), (1,), (None,), ("ok", "")])
def test_stop_strings_are_strings_with_something_in_them(stop):
    with pytest.raises(ValueError, match="non-empty strings"):
        Reply(stop=stop)


def test_a_single_stop_string_is_not_taken_for_its_letters():
    try:
        reply = Reply(stop="</answer>")
    except ValueError:
        return
    assert reply.stop == ("</answer>",)


@pytest.mark.parametrize("amount", [np.float32(0.5), np.int64(1)])
def test_numbers_of_numpy_are_numbers(amount):
    assert Reply(reward=amount).reward == amount


GET = ToolSpec("get", "Where a name leads.")


def test_tools_are_those_of_before_unless_a_reply_says_others():
    assert Reply().tools is None
    assert Reply(tools=[]).tools == ()
    assert Reply(tools=iter([GET, ToolSpec("answer")])).tools == (GET, ToolSpec("answer"))


@pytest.mark.parametrize("tools", ["get", GET, GET.schema, [GET.schema], ["get"], [GET, GET], [None], 3])
def test_tools_are_different_tools(tools):
    with pytest.raises(ValueError):
        Reply(tools=tools)
