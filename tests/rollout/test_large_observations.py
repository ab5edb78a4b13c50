"""Observations of megabytes: what is too large is never tokenised, and what is large is not tokenised in the loop."""

import asyncio
import threading
import tracemalloc

import pytest

from support.acting import Puppet, attempted, limits, run, user
from turnwise.envs.base import Reply
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.limits import FEWEST_BYTES, Limits, abridged, text_bytes
from turnwise.rollout.render.control import ControlTokens
from turnwise.rollout.render.off_loop import LONG, render_off_loop
from turnwise.types import Status

LARGE = "x" * 10_000_000


@pytest.fixture
def handed(monkeypatch):
    """(characters, thread) of every text that is handed to the tokenizer."""
    found = []
    plain = ControlTokens.plain

    def listened(self, text):
        found.append((len(text), threading.get_ident()))
        return plain(self, text)

    monkeypatch.setattr(ControlTokens, "plain", listened)
    return found


@pytest.mark.parametrize(
    "reply",
    [
        Reply(user(LARGE), reward=0.5),
        Reply((Message("tool", "é" * 5_000_000),), reward=0.5),
        Reply(user("<|im_end|>" * 1_000_000), reward=0.5),
        Reply(user("x"), reward=0.5, tools=(ToolSpec("get", LARGE),)),
        Reply(user("x"), reward=0.5, history=user(LARGE)),
        Reply(user("") * 10_000, reward=0.5),
    ],
    ids=["ascii", "result", "hostile", "tools", "history", "many"],
)
def test_ten_megabytes_end_the_attempt_untokenised(reply, handed):
    made = run(attempted(Puppet(reply)))
    assert (made.status, len(made.turns), made.total) == (Status.observation_too_large, 1, 0.5)
    assert made.status.counts
    assert sum(size for size, _ in handed) < 1_000
    assert text_bytes(made.turns[0].heard) < FEWEST_BYTES


def test_the_record_says_how_large_it_was():
    made = run(attempted(Puppet(Reply(user(LARGE)))))
    heard = made.turns[0].heard[0].content
    assert heard.startswith("xxx")
    assert "10000000 bytes" in heard
    assert "rollout.limits.max_observation_bytes" in heard


def test_an_attempt_may_end_with_a_large_message():
    made = run(attempted(Puppet(Reply(user(LARGE), finished=True, outcome=1.0))))
    assert (made.status, made.outcome) == (Status.finished, 1.0)
    assert text_bytes(made.turns[0].heard) < 5_000


def test_a_large_opening_is_a_prompt_that_does_not_fit(handed):
    made = run(attempted(Puppet(opening=Reply(user(LARGE)))))
    assert (made.status, made.turns) == (Status.prompt_too_long, ())
    assert handed == []


def test_the_limit_is_the_recipe_s_to_set(handed):
    for size, status in ((3_000, Status.finished), (3_001, Status.observation_too_large)):
        observation = Reply(user("x" * (size - text_bytes(user("")))))
        environment = Puppet(observation, Reply(finished=True))
        assert run(attempted(environment, max_observation_bytes=3_000)).status is status


def test_memory_does_not_grow_with_the_observation():
    reply = Reply(user(LARGE))
    run(attempted(Puppet(reply)))
    tracemalloc.start()
    try:
        run(attempted(Puppet(reply)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(LARGE)


def test_a_long_text_is_tokenised_outside_the_loop(handed):
    environment = Puppet(Reply(user("y" * 100_000)), Reply(user("short")), Reply(finished=True))
    made = run(attempted(environment, max_prompt_tokens=200_000, max_trajectory_tokens=300_000))
    assert made.status is Status.finished
    own = threading.get_ident()
    assert {thread == own for size, thread in handed if size > LONG} == {False}
    assert any(thread == own for _, thread in handed)


def test_others_go_on_while_a_long_conversation_is_rendered():
    """The render waits for something that only the loop can do."""

    async def work():
        heard = threading.Event()

        def render(messages):
            assert heard.wait(60)
            return messages

        asyncio.get_running_loop().call_later(0.01, heard.set)
        return await render_off_loop(render, user("x" * (LONG + 1)))

    assert run(work()) == user("x" * (LONG + 1))


def test_limits_by_default_are_more_than_could_fit():
    assert Limits(8, 1000, 100, 1100).observation_bytes == FEWEST_BYTES
    assert Limits(8, 100_000, 100, 100_100).observation_bytes == 1_600_000
    assert limits(max_observation_bytes=5).observation_bytes == 5


def test_bytes_count_everything_that_is_said():
    said = Message("assistant", "é", "t", (ToolCall("get", {"x": "y"}),))
    assert text_bytes((said,)) == 9 + 2 + 1 + 3 + 10 + 5 * 8
    assert text_bytes((), (ToolSpec("get", "d"),)) > 4
    assert text_bytes((Message("user", "\ud800"),)) > 0


def test_an_abridged_record_is_short_whatever_it_was():
    assert abridged(user("x")) == user("x")
    assert len(abridged(user("x" * 1000) * 100_000)) == 2
    assert len(abridged(user("") * 100_000)) < 50
    assert len(abridged(user(LARGE))[0].content) < 2_200
