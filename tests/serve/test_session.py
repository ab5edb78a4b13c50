"""A session without HTTP: what is recorded of second tries, concurrent requests, forks, sub-agents and limits."""

import asyncio

import numpy as np
import pytest

from serve.serving import hermes, make_session
from support.acting import hang, run, says, until
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.messages import Message, ToolCall
from turnwise.serve.dialects.ask import Ask, Delivery, Refusal
from turnwise.types import Break, Status, StopReason, Trajectory

ONE, OTHER = Delivery(b"one"), Delivery(b"other")


def ask(*texts, **fields):
    """Messages in turn of a user and the assistant."""
    roles = ("user", "assistant")
    return Ask("policy", tuple(Message(roles[place % 2], text) for place, text in enumerate(texts)), **fields)


async def heard(session, asked, delivery=None):
    """A request served from beginning to end, by a first try that nobody else has made."""
    call = await session.open(asked, delivery or Delivery(f"request {session.num_calls}".encode()))
    answer = await session.hand_over(call)
    session.leave(call, False)
    return answer


def counting(delay=0.0):
    """An engine that says how many calls it has had."""
    calls = []

    async def say(prompt, session, seed):
        calls.append(seed)
        text = f"answer {len(calls)}"
        await asyncio.sleep(delay)
        return text

    return says(say, render=hermes()), calls


def texts(session):
    return [turn.said.content for turn in session.turns()]


# ---------------------------------------------------------------- second tries


def test_a_second_try_joins_the_turn_in_flight():
    engine, calls = counting(delay=0.05)

    async def work():
        session = make_session(engine)
        first = await session.open(ask("go"), ONE)
        await asyncio.sleep(0.01)
        session.leave(first, False)  # the client lost patience
        second = await session.open(ask("go"), Delivery(b"one", retry=1))
        assert second is first
        return session, await session.hand_over(second)

    session, answer = run(work())
    assert answer.content == "answer 1"
    assert len(calls) == 1
    assert texts(session) == ["answer 1"]


def test_a_second_try_is_answered_from_the_turn_made():
    engine, calls = counting()

    async def work():
        session = make_session(engine)
        first = await heard(session, ask("go"), ONE)
        second = await heard(session, ask("go"), Delivery(b"one", retry=2))
        return session, first, second

    session, first, second = run(work())
    assert first == second
    assert len(calls) == 1
    assert len(session.turns()) == 1


def test_a_second_try_of_what_never_arrived_is_a_first():
    engine, calls = counting()

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"), Delivery(b"one", retry=1))
        await heard(session, ask("on"), Delivery(b"other", retry=1))
        return session

    assert texts(run(work())) == ["answer 1", "answer 2"]
    assert len(calls) == 2


def test_an_idempotency_key_is_the_same_request():
    engine, _ = counting()
    keyed = Delivery(b"one", key="k-1")

    async def work():
        session = make_session(engine)
        answers = [await heard(session, ask("go"), keyed) for _ in range(2)]
        with pytest.raises(Refusal, match="another request"):
            await session.open(ask("on"), Delivery(b"other", key="k-1"))
        answers.append(await heard(session, ask("go"), Delivery(b"one", key="k-2")))
        return session, [answer.content for answer in answers]

    session, answers = run(work())
    assert answers == ["answer 1", "answer 1", "answer 2"]
    assert len(session.turns()) == 2


def test_two_identical_concurrent_requests_are_two_samples():
    engine, calls = counting(delay=0.02)

    async def work():
        session = make_session(engine)
        answers = await asyncio.gather(*(heard(session, ask("go"), ONE) for _ in range(2)))
        return session, sorted(answer.content for answer in answers)

    session, answers = run(work())
    assert answers == ["answer 1", "answer 2"]
    assert len(set(calls)) == 2  # noise of their own
    assert len(session.turns()) == 2


def test_a_second_try_takes_the_turn_whose_client_is_gone():
    engine, _ = counting(delay=0.05)

    async def work():
        session = make_session(engine)
        first, second = [await session.open(ask("go"), ONE) for _ in range(2)]
        session.leave(second, False)
        again = await session.open(ask("go"), Delivery(b"one", retry=1))
        return again is second, first.listeners, second.listeners

    assert run(work()) == (True, 1, 1)


def test_a_retry_joins_an_abandoned_call_in_flight_before_an_answered_one():
    """The answered call was heard: its client has no reason to ask again."""
    engine, _ = counting(delay=0.05)

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"), ONE)
        abandoned = [await session.open(ask("go"), ONE) for _ in range(2)]
        for call in abandoned:
            session.leave(call, False)
        retries = [await session.open(ask("go"), Delivery(b"one", retry=1)) for _ in range(2)]
        return [abandoned.index(call) for call in retries]

    assert run(work()) == [0, 1]


def test_a_retry_joins_the_call_that_was_answered_last():
    engine, calls = counting()

    async def work():
        session = make_session(engine)
        for _ in range(2):
            await heard(session, ask("go"), ONE)
        return await heard(session, ask("go"), Delivery(b"one", retry=1))

    assert run(work()).content == "answer 2"
    assert len(calls) == 2


@pytest.mark.parametrize("delay", [0.0, 5.0], ids=["answered", "in flight"])
@pytest.mark.parametrize("key", ["", "k-1"])
def test_a_retry_after_the_call_was_forgotten_is_a_new_call(monkeypatch, delay, key):
    monkeypatch.setattr("turnwise.serve.session.PATIENCE", 0.02)
    delays = [delay, 0.0]

    async def say(prompt, session, seed):
        number = len(delays)
        await asyncio.sleep(delays.pop(0))
        return f"answer with {number - 1} left"

    async def work():
        session = make_session(says(say, render=hermes()))
        forgotten = await session.open(ask("go"), Delivery(b"one", key=key))
        await until(lambda: len(delays) == 1 and (delay or forgotten.work.done()))
        session.leave(forgotten, False)
        await until(lambda: not session.in_flight)
        answer = await heard(session, ask("go"), Delivery(b"one", retry=1, key=key))
        return session, answer.content

    session, answer = run(work())
    assert answer == "answer with 0 left"
    assert texts(session) == ["answer with 0 left"]


def test_an_answer_that_no_client_received_is_not_recorded(monkeypatch):
    monkeypatch.setattr("turnwise.serve.session.PATIENCE", 0.02)
    engine, calls = counting()

    async def work():
        session = make_session(engine, max_turns=2)
        call = await session.open(ask("go"), ONE)
        await session.wait(call)
        session.leave(call, False)
        await until(lambda: not session.in_flight)
        # The limit of turns counts those that were heard.
        await heard(session, ask("go"))
        await heard(session, ask("go"))
        return session

    assert texts(run(work())) == ["answer 2", "answer 3"]
    assert len(calls) == 3


# ---------------------------------------------------------------- conversations


def extends(turn, before):
    known = np.concatenate([before.prompt, before.action])
    return np.array_equal(turn.prompt[: len(known)], known)


def test_forks_go_on_from_the_turn_they_fork_from():
    engine, _ = counting()

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"))
        await heard(session, ask("go", "answer 1", "left"))
        await heard(session, ask("go", "answer 1", "right"))
        await heard(session, ask("go", "answer 1", "left", "answer 2", "further"))
        return session.turns()

    root, left, right, further = turns = run(work())
    assert extends(left, root)
    assert extends(right, root)
    assert extends(further, left)
    assert [turn.broke for turn in turns] == [Break.none, Break.none, Break.history, Break.history]
    assert root.heard == (Message("user", "left"),)
    assert left.heard == (Message("user", "further"),)
    made = Trajectory(tuple(turns), Status.finished)
    assert [turn.broke for turn in made.turns] == [turn.broke for turn in turns]  # none of them unknown


def test_sub_agents_and_compacted_conversations_begin_anew():
    engine, _ = counting()

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"))
        await heard(session, ask("another task altogether"))
        await heard(session, ask("summary of all so far", "answer 1", "on"))
        await heard(session, ask("another task altogether", "answer 2", "more"))
        return session.turns()

    turns = run(work())
    assert [turn.broke for turn in turns] == [Break.none, Break.history, Break.history, Break.history]
    assert extends(turns[3], turns[1])
    text = hermes().decode(turns[2].prompt.tolist())
    assert text.count("<|im_start|>") == 4
    assert "summary of all so far" in text


def test_an_edited_answer_is_a_conversation_of_the_clients():
    engine, _ = counting()

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"))
        await heard(session, ask("go", "answer one", "on"))
        return session.turns()

    turns = run(work())
    assert turns[1].broke is Break.history
    assert "answer one" in hermes().decode(turns[1].prompt.tolist())


def test_what_clients_do_to_an_answer_without_meaning_to_is_no_edit():
    said = '  well\n<tool_call>\n{"name": "get", "arguments": {"b": 1, "a": [2, "é"]}}\n</tool_call>'
    engine = says(said, render=hermes())
    echo = Message("assistant", "well ", calls=(ToolCall("get", {"a": [2, "é"], "b": 1}),))

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"))
        go = Message("user", "go")
        await heard(session, Ask("policy", (go, echo, Message("tool", "found"))))
        return session.turns()

    turns = run(work())
    assert turns[1].broke is Break.none
    assert extends(turns[1], turns[0])


def test_two_equal_samples_are_continued_separately():
    def say(prompt, session, seed):
        """The same answer after other thoughts."""
        return f"<think>\n{seed % 9973}\n</think>\n\nyes" if len(prompt) < 40 else "bye"

    async def work():
        session = make_session(says(say, render=hermes()))
        await asyncio.gather(heard(session, ask("go"), ONE), heard(session, ask("go"), OTHER))
        await heard(session, ask("go", "yes", "left"))
        await heard(session, ask("go", "yes", "right"))
        return session.turns()

    one, other, left, right = run(work())
    assert one.said.thinking != other.said.thinking
    assert extends(left, one)
    assert extends(right, other)


def test_turns_are_in_the_order_they_were_completed():
    async def say(prompt, session, seed):
        slow = "slow" in hermes().decode(prompt.tolist())
        await asyncio.sleep(0.1 if slow else 0.0)
        return "late" if slow else "early"

    async def work():
        session = make_session(says(say, render=hermes()))
        await asyncio.gather(heard(session, ask("slow"), ONE), heard(session, ask("quick"), OTHER))
        return session

    assert texts(run(work())) == ["early", "late"]


def test_tools_are_shown_and_a_change_of_them_is_an_edit():
    from turnwise.messages import ToolSpec

    engine, _ = counting()
    one, other = ToolSpec("get"), ToolSpec("put")

    async def work():
        session = make_session(engine)
        await heard(session, ask("go", tools=(one,)))
        await heard(session, ask("go", "answer 1", "on", tools=(one,)))
        await heard(session, ask("go", "answer 1", "on", "answer 2", "on", tools=(other,)))
        return session.turns()

    turns = run(work())
    assert [turn.broke for turn in turns] == [Break.none, Break.none, Break.history]
    assert '"put"' in hermes().decode(turns[2].prompt.tolist())


def test_a_long_session_keeps_one_copy_of_its_tokens():
    engine, _ = counting()

    async def work():
        session = make_session(engine, max_turns=64)
        said = ["go"]
        for number in range(1, 33):
            await heard(session, ask(*said))
            said += [f"answer {number}", "on"]
        return Trajectory(tuple(session.turns()), Status.finished)

    made = run(work())
    assert all(turn.broke is Break.none for turn in made.turns)
    last = made.turns[-1]
    assert all(np.shares_memory(turn.prompt, last.prompt) for turn in made.turns)


# ---------------------------------------------------------------- noise, limits, failures


def test_noise_is_that_of_the_attempt_and_the_number_of_the_request():
    engine, calls = counting()

    async def work():
        session = make_session(engine)
        await heard(session, ask("go"))
        await heard(session, ask("go"))
        return session.attempt

    which = run(work())
    assert calls == [which.noise(0), which.noise(1)]


def test_the_room_of_an_action_is_what_limits_and_client_leave():
    engine = says("x" * 300, render=hermes())

    async def work():
        session = make_session(engine, max_action_tokens=50, max_trajectory_tokens=4200)
        for limit in (None, 20, 400):
            await heard(session, ask("go", max_tokens=limit))
        return session.turns()

    turns = run(work())
    assert [(len(turn.action), turn.stop) for turn in turns] == [
        (50, StopReason.length),
        (20, StopReason.length),
        (50, StopReason.length),
    ]


def test_a_prompt_that_is_too_long_ends_nothing_by_itself():
    engine, _ = counting()

    async def work():
        session = make_session(engine, max_prompt_tokens=100)
        with pytest.raises(Refusal) as first:
            await session.open(ask("x" * 200), ONE)
        assert (first.value.status, first.value.code) == (400, "context_length_exceeded")
        begun = session.refused
        await heard(session, ask("go"))
        with pytest.raises(Refusal, match="the longest that is served has 100"):
            await session.open(ask("go", "answer 1", "x" * 200), ONE)
        cut = session.refused
        await heard(session, ask("a summary"))  # what an agent does that knows of limits
        return begun, cut, session.refused, len(session.turns())

    assert run(work()) == (Status.prompt_too_long, Status.too_long, None, 2)


def test_requests_at_once_do_not_exceed_the_turns():
    engine, calls = counting(delay=0.02)

    async def work():
        session = make_session(engine, max_turns=3)
        tries = (heard(session, ask("go"), ONE) for _ in range(5))
        done = await asyncio.gather(*tries, return_exceptions=True)
        return session, [getattr(one, "status", 200) for one in done]

    session, statuses = run(work())
    assert sorted(statuses) == [200, 200, 200, 410, 410]
    assert len(session.turns()) == len(calls) == 3


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [(lambda *call: hang(), 504, TimeoutError), (lambda *call: 1 / 0, 500, ZeroDivisionError)],
)
def test_failures_of_the_engine_are_failures_of_the_session(script, status, error):
    async def work():
        session = make_session(says(script, render=hermes()), call_seconds=0.05)
        with pytest.raises(Refusal) as refusal:
            await heard(session, ask("go"))
        return refusal.value.status, session.broken.exception(), session.turns()

    found, broken, turns = run(work())
    assert (found, type(broken), turns) == (status, error, [])


def test_an_engine_that_is_closed_fails_the_session():
    engine = says(lambda *call: hang(), render=hermes())

    async def work():
        session = make_session(engine)
        call = await session.open(ask("go"), ONE)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(Refusal, match="the engine failed"):
            await session.hand_over(call)
        return type(session.broken.exception())

    assert run(work()) is EngineFailure


def test_the_end_of_a_session_ends_its_calls():
    engine = says(lambda *call: hang(), render=hermes())

    async def work():
        session = make_session(engine)
        call = await session.open(ask("go"), ONE)
        waiting = asyncio.create_task(session.hand_over(call))
        await until(lambda: engine.speaking)
        session.end()
        with pytest.raises(Refusal) as refusal:
            await waiting
        await until(lambda: not engine.speaking)
        return refusal.value.status, session.turns()

    assert run(work()) == (410, [])


def test_rewards_go_to_the_turn_made_last():
    engine, _ = counting()

    async def work():
        session = make_session(engine)
        with pytest.raises(ValueError, match="before the first turn"):
            session.pay(1.0)
        await heard(session, ask("go"))
        session.pay(0.25)
        await heard(session, ask("go"))
        session.pay(0.5)
        session.pay(0.25)
        return [turn.reward for turn in session.turns()]

    assert run(work()) == [0.25, 0.75]


def test_other_settings_than_those_of_training_are_named():
    asked = {"temperature": 1, "top_p": 0.5, "top_k": -1, "tool_choice": "required"}

    async def work():
        session = make_session(sampling=Sampling(200))
        return (await heard(session, ask("go", settings=asked))).overridden

    assert run(work()) == {
        "top_p": {"asked": 0.5, "used": 1.0},
        "tool_choice": {"asked": "required", "used": None},
    }


def test_a_far_too_long_request_is_not_tokenised(monkeypatch):
    render = hermes()
    encoded = []
    monkeypatch.setattr(render, "encode", lambda text: encoded.append(len(text)))

    async def work():
        session = make_session(max_prompt_tokens=100)
        for asked in (ask("x" * 5_000_000), Ask("policy", raw="x" * 5_000_000), Ask("policy", raw=(5,) * 101)):
            with pytest.raises(Refusal) as refusal:
                await session.open(asked, ONE)
            assert refusal.value.code == "context_length_exceeded"
        return session.refused

    assert run(work()) is Status.prompt_too_long
    assert encoded == []
