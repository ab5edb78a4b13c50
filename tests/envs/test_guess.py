from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.acting import limits, renderer, run
from turnwise.envs.guess import Guess
from turnwise.messages import Message
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.types import Status, Task


def opened(low=1, high=16, secret=11, **chosen):
    environment = Guess(**chosen)
    run(environment.open(Task("t", "guess", {"low": low, "high": high, "secret": secret})))
    return environment


def say(environment, text):
    return run(environment.step(Message("assistant", text)))


def heard(environment, text):
    return [message.content for message in say(environment, text).messages]


def bisect(low, high, secret, guesses=6):
    """What an expert without mistakes comes to, without the agent loop."""
    environment = Guess(guesses)

    async def talk():
        await environment.open(Task("t", "guess", {"low": low, "high": high, "secret": secret}))
        while not (
            reply := await environment.step(Message("assistant", environment.demonstrate(0.0, Random(0))))
        ).finished:
            pass
        return reply.outcome

    return run(talk())


def test_the_expert_always_succeeds():
    expert = Demonstrator({"guess": Guess}, renderer(), limits(max_turns=6), 0, noise=0.0)
    for split in ("train", "heldout"):
        for task in Guess.tasks(split, 7, count=20, high=60):
            (made,) = run(expert.group(task, 0)).trajectories
            assert made.status is Status.finished
            assert made.outcome == 1.0
            assert made.marks["guesses"] == len(made.turns)


@pytest.mark.parametrize("high", [2, 7, 63])
def test_the_expert_finds_every_number_within_its_guesses(high):
    assert [bisect(1, high, secret) for secret in range(1, high + 1)] == [1.0] * high


def test_the_expert_can_solve_every_task_of_the_defaults():
    assert bisect(1, 64, 64, guesses=Guess().guesses) == 1.0


def test_a_mistaken_expert_stays_within_the_bounds():
    environment = opened(low=5, high=9, secret=6)
    said = {int(environment.demonstrate(1.0, Random(seed))) for seed in range(60)}
    assert said == {5, 6, 7, 8, 9}
    say(environment, "8")
    assert {int(environment.demonstrate(1.0, Random(seed))) for seed in range(60)} == {5, 6, 7}


def test_guesses_are_answered():
    environment = opened(secret=11)
    assert heard(environment, "8") == ["higher"]
    assert heard(environment, "maybe 14?") == ["lower"]
    assert heard(environment, "no idea") == ["say a number"]
    reply = say(environment, "I say 11")
    assert reply.finished
    assert reply.outcome == 1.0
    assert reply.marks == {"guesses": 4}


def test_a_window_shows_what_is_known_now_and_nothing_else():
    environment = Guess(guesses=4, window=True)
    task = Task("t", "guess", {"low": 1, "high": 16, "secret": 11})
    first = run(environment.open(task))
    assert first.messages[-1].content == "between 1 and 16, 4 left"
    for said, shown in (
        ("8", "higher: between 9 and 16, 3 left"),
        ("7", "higher: between 9 and 16, 2 left"),
        ("what", "say a number: between 9 and 16, 1 left"),
    ):
        reply = say(environment, said)
        assert [message.content for message in reply.messages] == [shown]
        assert reply.history == (first.messages[0], *reply.messages)


def test_the_first_number_counts():
    assert not say(opened(secret=11), "10 or 11").finished
    assert not say(opened(secret=11), "-11").finished
    assert say(opened(secret=11), "11 or 10").finished


def test_guesses_run_out():
    environment = opened(guesses=3)
    replies = [say(environment, text) for text in ("x", "1", "2")]
    assert [reply.finished for reply in replies] == [False, False, True]
    assert replies[-1].outcome == 0.0
    assert replies[-1].marks == {"guesses": 3}


def test_the_last_guess_may_be_right():
    environment = opened(guesses=2)
    say(environment, "1")
    assert say(environment, "11").outcome == 1.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=30), st.integers().map(str), st.text("0123456789- ٣²", max_size=15)), max_size=9
    )
)
def test_hostile_text_never_raises(texts):
    environment = opened(guesses=9)

    async def talk():
        for text in texts:
            reply = await environment.step(Message("assistant", text))
            assert reply.outcome in (0.0, 1.0)
            assert reply.outcome == 0.0 or "11" in text
            if reply.outcome == 1.0:
                break
            assert 1 <= environment.low <= 11 <= environment.high <= 16
            assert environment.low <= int(environment.demonstrate(1.0, Random(0))) <= environment.high
        await environment.close()

    run(talk())


def test_a_seed_decides_the_tasks_and_they_differ():
    first, again, other = (list(Guess.tasks("heldout", seed, count=100)) for seed in (0, 0, 1))
    assert [t.data for t in first] == [t.data for t in again]
    assert len({t.id for t in first}) == 100
    assert {t.id for t in first} != {t.id for t in other}
    for task in first:
        assert 1 <= task.data["low"] <= task.data["secret"] <= task.data["high"] <= 64
        assert task.data["low"] < task.data["high"]


def test_more_tasks_than_there_are():
    assert len(list(Guess.tasks("train", 0, count=4, high=3))) == 4
    with pytest.raises(ValueError, match="guess has fewer than 50 different train tasks"):
        list(Guess.tasks("train", 0, count=50, high=3))


def test_bounds_that_make_no_task_are_a_mistake():
    with pytest.raises(ValueError, match="at least 2"):
        Guess.tasks("train", 0, high=1)


def test_the_bounds_of_held_out_tasks_never_occur_in_training():
    train, held = (
        {(task.data["low"], task.data["high"]) for task in Guess.tasks(split, 0, count=400, high=32)}
        for split in ("train", "heldout")
    )
    assert not train & held
