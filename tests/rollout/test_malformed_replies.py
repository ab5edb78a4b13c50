"""Ten thousand malformed answers of environments, and good ones between them, through the agent loop as it is."""

import asyncio
import functools
import pickle
from collections import Counter, UserDict
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from rollout import hostile
from rollout.hostile import BAD, FIELDS, LooseReply, filled, with_property
from support.acting import TASK, Puppet, attempted, hang, limits, renderer, run, user
from turnwise.engines.base import Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.envs.base import Reply, is_plain
from turnwise.messages import Message, ToolCall
from turnwise.rollout.group import AttemptMaker
from turnwise.types import Status

KINDS = {
    "raises": hostile.raising,
    "no reply": hostile.no_reply,
    "lookalike": hostile.lookalike,
    "loose": hostile.loose,
    "tampered": hostile.tampered,
    "computed": hostile.computed,
    "no text": hostile.no_text,
    "awaitable": hostile.awaitable,
}
SHARES = {
    "refused at birth": 3600,
    "raises": 2000,
    "no reply": 1000,
    "loose": 900,
    "tampered": 900,
    "computed": 500,
    "no text": 400,
    "no method": 300,
    "lookalike": 200,
    "awaitable": 200,
}
MALFORMED, GOOD, IN_THREADS, ATTEMPTS = sum(SHARES.values()), 2_000, 300, 10
DONE = Reply(finished=True, outcome=1.0)


# ---------------------------------------------------------------- environments


@dataclass(frozen=True)
class Step:
    """A good reply to a step as it is given, and what it amounts to."""

    given: dict[str, Any]
    heard: tuple[Message, ...]
    reward: float
    outcome: float
    marks: dict[str, float]


def good_step(random, finished):
    texts = [random.choice(["on", "", "é", "colder", "\0", "<|im_end|>"]) for _ in range(random.randint(0, 2))]
    heard = tuple(Message(random.choice(["user", "user", "tool", "system", "nobody", ""]), text) for text in texts)
    reward, outcome, mark = (random.randint(-16, 16) / 8 for _ in range(3))
    name = random.choice(["tries", "", "\ud800", "naïve"])
    odd_name = hostile.odd_text(random, name, hashable=True) if random.random() < 0.1 else name
    given = {
        "messages": random.choice([list, tuple, iter])([hostile.odd_message(random, message) for message in heard]),
        "reward": hostile.odd_number(random, reward),
        "outcome": hostile.odd_number(random, outcome),
        "finished": finished,
        "marks": random.choice([dict, MappingProxyType, UserDict])({odd_name: hostile.odd_number(random, mark)}),
        "history": user("all anew") if random.random() < 0.1 else None,
        "stop": random.choice([(), ["</a>"], iter(("!", "?"))]),
        "tools": random.choice([None, (), iter(())]),
        "raised": random.choice([(), iter(())]),
        "seats": (),
        "moves_next": 0,
    }
    return Step(given, heard, reward, outcome, {name: mark})


def good_answer(random, given):
    """A reply of these fields, in one of the ways in which that is fine."""
    name = random.choice(FIELDS)
    once = iter([given[name]])
    return random.choice(
        [lambda: Reply(**given)] * 7
        + [
            lambda: LooseReply(**given),
            lambda: filled(Reply, given),
            lambda: with_property(name, lambda self: next(once), given),  # cannot be read a second time
        ]
    )


@dataclass
class Staged:
    """An environment that gives staged answers, by place: "open", 0, 1, ..., "close"."""

    answers: dict[Any, Any]
    steps: list[Step]
    kind: str = "good"
    where: Any = None
    """Place of the malformed answer."""
    wrong: tuple[str, ...] = ()
    """Names of the fields that are refused at birth."""
    number: int = 0
    closed: int = 0
    birth: Exception | None = None
    """What the birth of a reply raised."""
    unawaited: list[Any] = field(default_factory=list)

    def give(self, place):
        made = self.answers[place]()
        if asyncio.iscoroutine(made):
            self.unawaited.append(made)
        return made

    def give_step(self):
        self.number += 1
        return self.give(self.number - 1)

    def give_close(self):
        self.closed += 1
        return self.give("close")

    def born(self, given):
        """A reply of wrong fields."""
        try:
            return Reply(**given)
        except Exception as error:
            self.birth = error
            raise


class InLoop(Staged):
    async def open(self, task):
        return self.give("open")

    async def step(self, message):
        return self.give_step()

    async def close(self):
        return self.give_close()


class InThread(Staged):
    def open(self, task):
        return self.give("open")

    def step(self, message):
        return self.give_step()

    def close(self):
        return self.give_close()


def staged(random, make, kind):
    """An environment with good answers and, unless it is a good one, a malformed one among them."""
    num_turns = random.randint(1, 3)
    steps = [good_step(random, finished=number == num_turns - 1) for number in range(num_turns)]
    late = random.choice([None, Reply(outcome=0.5)])
    answers: dict[Any, Any] = {"open": lambda: Reply(user("go")), "close": lambda: late}
    answers |= {number: good_answer(random, step.given) for number, step in enumerate(steps)}
    environment = make(answers, steps, kind)
    if kind == "good":
        return environment
    places = {
        "no text": ["open", *range(num_turns - 1)],  # what nobody has to read does not need to be readable
        "no method": ["open", 0],
    }
    where = environment.where = random.choice(places.get(kind, ["open", "close", *range(num_turns)]))
    if kind == "no method":
        setattr(environment, "open" if where == "open" else "step", hostile.no_method(random))
    elif kind == "refused at birth":
        given, environment.wrong = hostile.spoilt_fields(random)
        answers[where] = lambda: environment.born(given)
    else:
        answers[where] = KINDS[kind](random)
    if where != "close" and random.random() < 0.05:
        answers["close"] = hostile.raising(random)
    return environment


# ---------------------------------------------------------------- what comes of them


def check(environment, made):
    """What an attempt must have come to."""
    assert environment.closed == 1
    assert_plain(made)
    steps = environment.steps
    if environment.kind == "good":
        assert made.status is Status.finished
        assert [turn.heard for turn in made.turns] == [step.heard for step in steps]
        assert [turn.reward for turn in made.turns] == [step.reward for step in steps]
        late = environment.answers["close"]()
        assert made.outcome == sum(step.outcome for step in steps) + (late.outcome if late else 0.0)
        assert made.marks == {name: mark for step in steps for name, mark in step.marks.items()}
        return
    where = environment.where
    assert len(made.turns) == (where + 1 if isinstance(where, int) else {"open": 0, "close": len(steps)}[where])
    assert made.status in (Status.failed, Status.timed_out)
    if environment.kind == "refused at birth":
        assert type(environment.birth) is ValueError
        assert "\n" not in str(environment.birth)


def assert_plain(made):
    """Nothing that an environment made has come through: only finite values of our own types."""
    assert np.isfinite([made.total, made.outcome, *made.marks.values()]).all()
    assert type(made.outcome) is float
    assert {type(name) for name in made.marks} <= {str}
    for turn in made.turns:
        assert type(turn.reward) is float
        assert {type(message) for message in turn.heard} <= {Message}
        assert {type(text) for message in turn.heard for text in (message.role, message.content)} <= {str}


def attempt_maker(environments, **bounds):
    """Attempts in these environments, one after another."""
    render, left = renderer(), iter(environments)
    engine = ScriptedEngine(lambda *_: "hello", lambda said: [70, 71], end_token=render.end_token)
    makes = {TASK.dataset: lambda: next(left)}
    return AttemptMaker(makes, engine, render, Sampling(64), limits(**bounds), 0, "train", ATTEMPTS)


@pytest.mark.slow
def test_ten_thousand_malformed_answers_are_counted_failures_and_good_ones_succeed(caplog):
    random = Random(20_000)
    kinds = [kind for kind, share in {**SHARES, "good": GOOD}.items() for _ in range(share)]
    makes = [InThread] * IN_THREADS + [InLoop] * (len(kinds) - IN_THREADS)
    random.shuffle(kinds)
    random.shuffle(makes)
    environments = [staged(random, make, kind) for make, kind in zip(makes, kinds, strict=True)]
    statuses, places, fields = Counter(), Counter(), Counter()

    def settle(of_group, group):
        good = [environment for environment in of_group if environment.kind == "good"]
        bad = [environment for environment in of_group if environment.kind != "good"]
        for environment, made in (*zip(good, group.trajectories, strict=True), *zip(bad, group.failed, strict=True)):
            check(environment, made)
            statuses[environment.kind, str(made.status)] += 1
            places["step" if isinstance(environment.where, int) else environment.where] += 1
            fields.update(environment.wrong)
            for one in environment.unawaited:
                one.close()

    maker = attempt_maker(environments, max_turns=3)

    async def scene():
        for start in range(0, len(environments), ATTEMPTS):
            group = await maker.group(TASK, epoch=start)
            settle(environments[start : start + ATTEMPTS], group)
            if start % 1000 == 0:
                assert len(pickle.loads(pickle.dumps(group)).failed) == len(group.failed)

    run(scene(), seconds=1400.0)
    late = statuses.pop(("raises", "timed_out"))  # an environment's own TimeoutError
    statuses["raises", "failed"] += late
    assert 20 < late < 100
    assert statuses == {("good", "finished"): GOOD, **{(kind, "failed"): share for kind, share in SHARES.items()}}
    assert MALFORMED == 10_000
    assert min(places[place] for place in ("open", "step", "close")) > 2_000
    assert min(fields[name] for name in FIELDS) > 400
    failures = maker.environments[TASK.dataset].failures
    assert failures.counted.total() > MALFORMED
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(failures.kinds)  # one line for each kind, and all are counted
    assert all("\n" not in line and line.isprintable() and len(line) < 1200 for line in said)


def test_environments_that_hang_are_counted_and_closed_as_well():
    environments = [
        Puppet(hang, closing=hang if number % 2 else None, opening=hang if number % 3 else None)
        for number in range(ATTEMPTS)
    ]
    group = run(attempt_maker(environments, call_seconds=0.1).group(TASK, 0))
    assert group.trajectories == ()
    assert [made.status for made in group.failed] == [Status.timed_out] * ATTEMPTS
    assert [environment.closed for environment in environments] == [1] * ATTEMPTS


# ---------------------------------------------------------------- what ten thousand answers found, one by one


@pytest.mark.parametrize("name", FIELDS)
def test_whatever_is_wrong_with_a_field_is_a_value_error_of_one_line(name):
    random = Random(name)
    for _ in range(300):
        with pytest.raises(ValueError) as refusal:
            Reply(**{name: BAD[name](random)})
        assert type(refusal.value) is ValueError
        assert "\n" not in str(refusal.value)


def test_a_reply_holds_values_of_our_own_types():
    random = Random(1)
    for _ in range(100):
        name, stop = hostile.odd_text(random, "tries", hashable=True), hostile.odd_text(random, "</a>")
        amount = hostile.odd_number(random, 2.0)
        messages = [hostile.odd_message(random, Message("user", "x"))]
        reply = Reply(messages, amount, amount, marks={name: amount}, history=messages, stop=[stop])
        assert reply.messages == reply.history == user("x")
        assert (reply.reward, reply.outcome, reply.marks, reply.stop) == (2.0, 2.0, {"tries": 2.0}, ("</a>",))
        assert {type(value) for value in (reply.reward, reply.outcome, *reply.marks.values())} == {float}
        texts = [*reply.marks, *reply.stop, reply.messages[0].role, reply.messages[0].content]
        assert {type(text) for text in texts} == {str}


@pytest.mark.parametrize("name", FIELDS)
def test_only_a_reply_of_plain_values_goes_through_without_a_copy(name):
    """Also one whose fields were changed after it was checked."""
    random = Random(name)
    good = {"messages": user("x"), "history": user("y"), "marks": {"tries": 1.0}, "stop": ("</a>",)}
    assert is_plain(Reply(**good))
    for _ in range(300):
        reply = Reply(**good)
        object.__setattr__(reply, name, BAD[name](random))
        assert not is_plain(reply)
    assert not is_plain(object.__new__(Reply))
    assert not is_plain(type("Other", (Reply,), {})(**good))


def test_a_reply_keeps_no_mapping_of_the_environment():
    marks = {"x": 1.0}
    reply = Reply(marks=marks)
    marks["x"] = float("nan")
    assert reply.marks == {"x": 1.0}


@pytest.mark.parametrize("where", ["open", "step", "close"])
def test_a_keyboard_interrupt_is_not_a_failed_attempt(where):
    error = KeyboardInterrupt()
    environment = Puppet(
        error if where == "step" else DONE,
        opening=error if where == "open" else None,
        closing=error if where == "close" else None,
    )
    with pytest.raises(KeyboardInterrupt):
        run(attempted(environment))
    assert environment.closed == 1


def test_an_attempt_whose_loop_is_gone_has_not_failed(caplog):
    """Python closes a forgotten coroutine by a GeneratorExit; swallowed, it would go on with the retries."""
    makes = {TASK.dataset: lambda: Puppet(opening=hang)}
    maker = AttemptMaker(makes, None, renderer(), Sampling(9), limits(), 0, "train", 1, retries=3)
    coroutine = maker.one(TASK, 0, 0)

    async def begin():
        coroutine.send(None)

    run(begin())
    coroutine.close()
    assert not [record for record in caplog.records if " failed: " in record.getMessage() and "clos" not in record.msg]


def test_every_part_of_a_message_comes_through():
    message = Message("assistant", "x", "hm", (ToolCall("get", {"name": "amber"}, "no such tool"),), "no JSON")
    assert all(getattr(message, name) not in ("", ()) for name in Message.__slots__)
    assert Reply((message,), history=[message]).messages == (message,)


class Nameless:
    def __init__(self, method):
        self.method = method

    def __call__(self, *arguments):
        return self.method(*arguments)


@pytest.mark.parametrize("wrap", [functools.partial, Nameless])
def test_a_method_needs_no_name(wrap):
    class Wrapped:
        open, step, close = wrap(lambda task: Reply(user("go"))), wrap(lambda message: DONE), wrap(lambda: None)

    assert run(attempted(Wrapped())).status is Status.finished
