import asyncio
import logging
import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.acting import TASK, Puppet, attempted, hang, renderer, run, says, slot_engine, user
from turnwise.engines.base import Completion, EngineFailure, Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.rollout.scene import Attempt
from turnwise.types import Status, StopReason, Task, Trajectory

DONE = Reply(finished=True, outcome=1.0)
SHORT = {"call_seconds": 0.1, "attempt_seconds": 1000.0}


class Spy(ScriptedEngine):
    """A scripted engine that keeps what it was asked."""

    def __init__(self, text="hello", **settings):
        render = renderer()
        super().__init__(lambda *_: text, lambda said: render.encode(said).tolist(), end_token=2, **settings)
        self.asked = []

    async def generate(self, prompt, sampling, *, session, seed, on_tokens=None):
        self.asked.append((prompt.tolist(), sampling, session, seed))
        return await super().generate(prompt, sampling, session=session, seed=seed)


def plain(environment):
    """The same environment with blocking methods instead of coroutines."""

    class Plain:
        def open(self, task):
            return asyncio.run(environment.open(task))

        def step(self, message):
            return asyncio.run(environment.step(message))

        def close(self):
            return asyncio.run(environment.close())

    return Plain()


# ---------------------------------------------------------------- an attempt


@pytest.mark.parametrize("wrap", [lambda environment: environment, plain])
def test_a_turn_holds_what_was_sent_and_sampled_and_what_came_back(wrap):
    environment = Puppet(
        Reply(user("colder"), reward=0.5, marks={"tries": 1, "mood": 2.0}),
        Reply(finished=True, outcome=2, marks={"tries": 2}),
    )
    engine = Spy("try this")
    made = run(attempted(wrap(environment), engine))
    assert made.status is Status.finished
    assert made.outcome == 2.0
    assert made.total == 2.5
    assert dict(made.marks) == {"tries": 2.0, "mood": 2.0}
    assert environment.heard == ["try this", "try this"]
    assert environment.closed == 1
    assert [turn.prompt.tolist() for turn in made.turns] == [prompt for prompt, *_ in engine.asked]
    render = renderer()
    for turn in made.turns:
        assert render.decode(turn.action) == "try this<|im_end|>"
        assert turn.stop is StopReason.end_token
        assert turn.said == Message("assistant", "try this")
        assert turn.logprobs.tolist() == [-0.5] * len(turn.action)
    first, second = made.turns
    assert first.reward == 0.5
    assert first.heard == user("colder")
    assert second.reward == 0.0
    assert second.heard == ()
    assert (made.opening, made.tools) == (user("go"), ())
    assert render.decode(second.prompt) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\ntry this<|im_end|>\n"
        "<|im_start|>user\ncolder<|im_end|>\n<|im_start|>assistant\n"
    )


def test_outcomes_add_up_over_open_step_and_close():
    environment = Puppet(
        Reply(user("x"), outcome=0.25),
        DONE,
        opening=Reply(user("go"), outcome=0.5),
        closing=Reply(outcome=-2.0, marks={"late": 1.0}),
    )
    made = run(attempted(environment))
    assert made.outcome == -0.25
    assert made.total == -0.25
    assert made.status is Status.finished
    assert dict(made.marks) == {"late": 1.0}


def test_a_chosen_history_is_what_the_model_sees():
    window = (*user("question"), *user("last"))
    environment = Puppet(Reply(user("seen by people"), history=window), Reply(user("and on")), DONE)
    made = run(attempted(environment))
    render = renderer()
    assert made.turns[0].heard == user("seen by people")
    assert made.turns[1].prompt.tolist() == render.first(window).tokens.tolist()
    after = (*window, Message("assistant", "hello"), *user("and on"))
    assert made.turns[2].prompt.tolist() == render.first(after).tokens.tolist()


def test_an_opening_may_choose_the_history():
    opening = Reply(user("for people"), history=user("for the model"))
    made = run(attempted(Puppet(DONE, opening=opening)))
    assert made.turns[0].prompt.tolist() == renderer().first(user("for the model")).tokens.tolist()


def test_noise_depends_on_the_attempt_and_the_turn_only():
    def asked(**changes):
        engine = Spy()
        which = Attempt(**{"seed": 0, "split": "train", "task": TASK, **changes})
        run(attempted(Puppet(Reply(user("on")), DONE), engine, which=which))
        assert len({session for *_, session, _ in engine.asked}) == 1
        return engine.asked[0][2], tuple(seed for *_, seed in engine.asked)

    base = asked()
    assert base == asked()
    assert len(set(base[1])) == 2
    others = [
        asked(seed=1),
        asked(split="heldout"),
        asked(task=Task("t-2", "hops")),
        asked(task=Task("t-1", "guess")),
        asked(epoch=1),
        asked(number=1),
        asked(retry=1),
    ]
    seeds = [seed for _, pair in (base, *others) for seed in pair]
    assert len(set(seeds)) == len(seeds)
    assert len({session for session, _ in (base, *others)}) == len(others)  # seeds share a session, nothing else does


# ---------------------------------------------------------------- limits


def sizes_of_prompts(num=3):
    made = run(attempted(Puppet(*[Reply(user("on and on"))] * num, DONE)))
    return [len(turn.prompt) for turn in made.turns]


def test_the_limit_is_checked_on_the_prompt_that_is_sent():
    """Field bug: the length limit was checked against the previous turn's prompt."""
    sizes = sizes_of_prompts()
    assert all(size < later for size, later in pairwise(sizes))
    for place, size in enumerate(sizes):
        for limit, sent in ((size, place + 1), (size - 1, place)):
            engine = Spy()
            made = run(attempted(Puppet(*[Reply(user("on and on"))] * 3, DONE), engine, max_prompt_tokens=limit))
            assert [len(prompt) for prompt, *_ in engine.asked] == sizes[:sent]
            assert len(made.turns) == sent
            if sent == len(sizes):
                assert made.status is Status.finished
            else:
                assert made.status is (Status.too_long if sent else Status.prompt_too_long)


def test_a_first_prompt_that_does_not_fit_is_an_attempt_without_turns():
    environment = Puppet(opening=Reply(user("x" * 5000), outcome=0.5))
    engine = Spy()
    made = run(attempted(environment, engine))
    assert made.status is Status.prompt_too_long
    assert made.turns == ()
    assert made.outcome == 0.5
    assert engine.asked == []
    assert environment.closed == 1
    assert environment.heard == []


def test_a_huge_observation_ends_the_attempt_as_too_long():
    environment = Puppet(Reply(user("é" * 30_000), reward=0.5))
    made = run(attempted(environment))
    assert made.status is Status.too_long
    assert len(made.turns) == 1
    assert made.total == 0.5
    assert made.turns[0].heard[0].content == "é" * 30_000


@pytest.mark.parametrize("by", ["context", "max_trajectory_tokens"])
def test_an_action_is_capped_by_what_is_left(by):
    first, second, *_ = sizes_of_prompts()
    for left in (1, 3, 6):
        engine = Spy(context=second + left if by == "context" else 1 << 20)
        bounds = {"max_trajectory_tokens": second + left} if by == "max_trajectory_tokens" else {}
        made = run(attempted(Puppet(Reply(user("on and on")), Reply(user("x"))), engine, **bounds))
        assert [sampling.max_tokens for _, sampling, *_ in engine.asked] == [second + left - first, left]
        assert made.status is Status.too_long
        assert len(made.turns[1].action) == min(left, 6)
        assert made.turns[1].stop is (StopReason.length if left < 6 else StopReason.end_token)


def test_actions_have_a_separate_limit():
    engine = Spy("a long story")
    made = run(attempted(Puppet(Reply(user("on")), DONE), engine, sampling=Sampling(200, 0.7), max_action_tokens=6))
    assert [(s.max_tokens, s.temperature) for _, s, *_ in engine.asked] == [(6, 0.7)] * 2
    assert made.turns[0].said.content == "a long"
    assert made.turns[0].stop is StopReason.length
    assert renderer().decode(made.turns[1].prompt).count("a long<|im_end|>\n<|im_start|>user") == 1


def test_an_attempt_ends_after_its_turns():
    environment = Puppet(*[Reply(user("on"), reward=0.1)] * 9)
    made = run(attempted(environment, max_turns=3))
    assert made.status is Status.too_many_turns
    assert len(made.turns) == 3
    assert made.total == pytest.approx(0.3)
    assert environment.closed == 1


def test_finishing_on_the_last_turn_is_finishing():
    made = run(attempted(Puppet(Reply(user("on")), Reply(user("on")), DONE), max_turns=3))
    assert made.status is Status.finished
    assert len(made.turns) == 3


def test_a_single_turn_with_a_last_observation_that_would_not_fit():
    """Nothing is rendered that nobody will see."""
    made = run(attempted(Puppet(Reply(user("x" * 100_000))), max_turns=1))
    assert made.status is Status.too_many_turns


def test_stop_strings_of_the_environment_hold_for_the_next_turn_only():
    engine = Spy()
    environment = Puppet(
        Reply(user("on"), stop=("</b>", "!")), Reply(user("on")), DONE, opening=Reply(user("go"), stop=("</a>",))
    )
    run(attempted(environment, engine, sampling=Sampling(99, stop=("</end>",))))
    assert [sampling.stop for _, sampling, *_ in engine.asked] == [
        ("</end>", "</a>"),
        ("</end>", "</b>", "!"),
        ("</end>",),
    ]


# ---------------------------------------------------------------- environments that misbehave


class Odd(ValueError):
    pass


FAILURES = [
    RuntimeError("boom"),
    Odd("odd"),
    KeyError("missing"),
    AssertionError(),
    RecursionError("deep"),
    MemoryError(),
]
NONSENSE = [
    None,
    "a string",
    3,
    {"messages": []},
    [],
    (Message("user", "x"),),
    Reply,
    float("nan"),
    SimpleNamespace(messages=(), reward=1.0, outcome=float("nan"), finished=True, marks={}, history=None, stop=()),
]


@pytest.mark.parametrize("where", ["opening", "step"])
@pytest.mark.parametrize("answer", [*FAILURES, *NONSENSE], ids=repr)
@pytest.mark.parametrize("wrap", [lambda environment: environment, plain], ids=["async", "plain"])
def test_an_environment_that_raises_or_answers_nonsense_is_a_failed_attempt(where, answer, wrap):
    if where == "opening":
        environment = Puppet()
        environment.opening = answer
    else:
        environment = Puppet(Reply(user("on"), reward=0.25), answer)
    made = run(attempted(wrap(environment)))
    assert made.status is Status.failed
    # The turn that broke it is there too, unpaid: a penalty has to reach what caused it.
    assert [turn.reward for turn in made.turns] == ([] if where == "opening" else [0.25, 0.0])
    assert environment.closed == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "hello"},
        {"messages": Message("user", "x")},
        {"messages": ("hello",)},
        {"messages": ({"role": "user", "content": "x"},)},
        {"messages": None},
        {"messages": 3},
        {"history": "hello"},
        {"history": (None,)},
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"reward": "1"},
        {"reward": None},
        {"reward": True},
        {"reward": 10**400},
        {"outcome": float("-inf")},
        {"outcome": [1.0]},
        {"marks": {"x": float("nan")}},
        {"marks": {"x": "much"}},
        {"marks": None},
        {"finished": 1},
        {"finished": None},
        {"stop": ("",)},
        {"stop": (3,)},
        {"stop": None},
    ],
    ids=repr,
)
def test_a_reply_with_nonsense_in_it_is_a_failed_attempt(fields):
    async def answer():
        return Reply(**fields)

    environment = Puppet(answer)
    made = run(attempted(environment))
    assert made.status is Status.failed
    assert [turn.reward for turn in made.turns] == [0.0]
    assert environment.closed == 1


@pytest.mark.parametrize(
    "make",
    [lambda: (_ for _ in ()).throw(Odd("no")), lambda: None, lambda: object(), lambda: Puppet],
    ids=["raises", "None", "object", "class"],
)
def test_a_constructor_that_gives_no_environment(make):
    made = run(attempted(make))
    assert made.status is Status.failed
    assert made.turns == ()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_no_text(text):
    environment = Puppet(Reply(user(text)))
    assert run(attempted(environment)).status is Status.failed
    assert environment.closed == 1
    assert run(attempted(Puppet(opening=Reply(user(text))))).status is Status.failed


def test_a_template_that_refuses_the_conversation():
    refuses = "{{ raise_exception('only users') if messages[-1].role != 'user' }}{{ messages[-1].content }}<|im_end|>"
    render = renderer(template=refuses)
    environment = Puppet(Reply((Message("tool", "4"),)))
    made = run(attempted(environment, render=render))
    assert made.status is Status.failed
    assert environment.closed == 1
    assert len(made.turns) == 1


@pytest.mark.parametrize("where", ["opening", "step"])
def test_an_environment_that_hangs_times_out(where):
    environment = Puppet(Reply(user("on")), hang, opening=hang if where == "opening" else None)
    made = run(attempted(environment, **SHORT))
    assert made.status is Status.timed_out
    assert environment.closed == 1
    assert len(made.turns) == (0 if where == "opening" else 2)


@pytest.mark.parametrize("where", ["open", "step", "close"])
def test_an_environment_that_blocks_times_out_and_delays_no_other(where):
    released = threading.Event()
    counts = dict.fromkeys(("open", "step", "close"), 0)

    def answer(name, reply):
        def method(*_):
            counts[name] += 1
            if name == where:
                released.wait(20)
            return reply

        return method

    class Blocks:
        open, step, close = (
            staticmethod(answer(*pair)) for pair in (("open", Reply(user("go"))), ("step", DONE), ("close", None))
        )

    async def scene():
        blocked = asyncio.create_task(attempted(Blocks(), **SHORT))
        other = await attempted(Puppet(*[Reply(user("on"))] * 5, DONE), **SHORT)
        assert not blocked.done()
        return await blocked, other

    try:
        made, other = run(scene())
    finally:
        released.set()
    assert other.status is Status.finished
    assert made.status is (Status.failed if where == "close" else Status.timed_out)
    assert counts["close"] == 1


def test_each_call_has_its_own_deadline():
    """Calls that are each in time, of the environment and of the engine in turns, do not add up to a late one."""

    async def slowly():
        await asyncio.sleep(0.2)
        return Reply(user("on"))

    async def think(*_):
        await asyncio.sleep(0.2)
        return "hello"

    environment = Puppet(slowly, DONE, opening=slowly)
    made = run(attempted(environment, says(think), call_seconds=0.35, attempt_seconds=20.0))
    assert made.status is Status.finished
    assert len(made.turns) == 2


def test_an_attempt_has_a_deadline_over_all_its_turns():
    async def slowly():
        await asyncio.sleep(0.02)
        return Reply(user("on"), reward=1.0)

    environment = Puppet(*[slowly] * 100)
    made = run(attempted(environment, max_turns=100, call_seconds=5.0, attempt_seconds=0.2))
    assert made.status is Status.timed_out
    assert 1 <= len(made.turns) < 20
    assert made.total in (len(made.turns), len(made.turns) - 1)  # the last may have been cut short
    assert environment.closed == 1


def test_a_deadline_of_the_environment_itself():
    environment = Puppet(TimeoutError("the database took too long"))
    made = run(attempted(environment))
    assert not made.status.counts
    assert environment.closed == 1


def test_an_environment_that_ignores_its_cancellation_is_not_an_exception():
    async def stubborn():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return Reply(user("still here"))

    environment = Puppet(stubborn, hang)
    made = run(attempted(environment, **SHORT))
    assert not made.status.counts
    assert environment.closed == 1


@pytest.mark.parametrize("closing", [RuntimeError("boom"), hang, "nonsense", 3], ids=["raises", "hangs", "str", "int"])
@pytest.mark.parametrize(
    ("reply", "status"),
    [(DONE, Status.failed), (RuntimeError("before"), Status.failed), (hang, Status.timed_out)],
    ids=["finished", "failed", "timed out"],
)
def test_an_environment_that_cannot_be_closed_does_not_count(closing, reply, status):
    environment = Puppet(reply, closing=closing)
    made = run(attempted(environment, **SHORT))
    assert made.status is status
    assert environment.closed == 1


def test_a_prompt_too_long_stays_one_when_closing_fails():
    environment = Puppet(opening=Reply(user("x" * 9000)), closing=RuntimeError("boom"))
    assert run(attempted(environment)).status is Status.prompt_too_long


def test_plain_methods_run_outside_the_loop():
    seen = []

    class Plain:
        def open(self, task):
            seen.append(threading.current_thread())
            return Reply(user("go"))

        async def step(self, message):
            seen.append(threading.current_thread())
            return DONE

        def close(self):
            seen.append(threading.current_thread())

    assert run(attempted(Plain())).status is Status.finished
    assert [thread is threading.main_thread() for thread in seen] == [False, True, False]
    assert seen[0].daemon  # one that never returns does not keep the process alive


def test_failures_are_logged_with_the_attempt_and_the_reason(caplog):
    with caplog.at_level(logging.WARNING, "turnwise"):
        run(attempted(Puppet(Odd("the server is down"))))
        run(attempted(Puppet(hang), **SHORT))
    failed, late = (record.getMessage() for record in caplog.records)
    assert "train/hops/t-1/0/0/0 failed: Odd: the server is down" in failed
    assert "timed out" in late
    assert "call_seconds" in late


def test_a_plain_method_that_raises_stop_iteration_is_a_failed_attempt():
    class Plain(Puppet):
        def step(self, message):
            return next(iter(()))

    assert run(attempted(Plain(), **SHORT)).status is Status.failed


@pytest.mark.parametrize("where", ["opening", "step", "closing"])
@pytest.mark.parametrize("wrap", [lambda environment: environment, plain], ids=["async", "plain"])
def test_an_environment_that_exits_is_a_failed_attempt(where, wrap):
    async def leave():
        raise SystemExit(3)

    environment = Puppet(leave if where == "step" else DONE, **({} if where == "step" else {where: leave}))
    try:
        made = run(attempted(wrap(environment)))
    except SystemExit:
        pytest.fail("the process would have ended")
    assert made.status is Status.failed
    assert environment.closed == 1


@pytest.mark.parametrize(
    "where",
    [
        "opening",
        "step",
        "closing",
    ],
)
def test_an_inner_cancellation_of_the_environment_is_a_failed_attempt(where):
    """For instance a task of its own that it cancelled and awaits; nobody has cancelled the attempt."""

    async def inner():
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task

    environment = Puppet(inner if where == "step" else DONE, **({} if where == "step" else {where: inner}))

    async def scene():
        call = asyncio.ensure_future(attempted(environment))
        await asyncio.wait([call])
        assert not call.cancelled()
        return call.result()

    assert run(scene()).status is Status.failed
    assert environment.closed == 1


@pytest.mark.parametrize("paid", [{"outcome": 1.7e308}, {"reward": -1.7e308}, {"reward": 10**400}])
def test_pay_that_no_statistic_could_hold_is_a_failed_attempt(paid):
    async def overpay():
        return Reply(finished=True, **paid)

    assert run(attempted(Puppet(overpay))).status is Status.failed


def test_a_late_reward_is_paid_to_the_attempt():
    made = run(attempted(Puppet(Reply(user("on"), reward=0.5), DONE, closing=Reply(reward=2.0, outcome=4.0))))
    assert made.total == 7.5
    assert made.outcome == 7.0


@pytest.mark.parametrize("opening", [{"reward": 2.0}, {"finished": True}])
def test_an_opening_that_pays_for_a_turn_or_ends_the_attempt_has_failed(opening):
    engine = Spy()
    environment = Puppet(DONE, opening=Reply(user("go"), **opening))
    assert run(attempted(environment, engine)).status is Status.failed
    assert engine.asked == []
    assert environment.closed == 1


def test_numbers_of_numpy_become_plain_ones():
    """A float32 would be summed in float32, and JSON does not know it."""
    paid = {"reward": np.float32(0.1), "outcome": np.float32(0.1), "marks": {"x": np.int64(3)}}
    made = run(attempted(Puppet(Reply(user("on"), **paid), Reply(finished=True, **paid), closing=Reply(**paid))))
    numbers = [made.outcome, made.total, *made.marks.values(), *(turn.reward for turn in made.turns)]
    assert {type(number) for number in numbers} == {float}


# ---------------------------------------------------------------- engines that misbehave, and cancellation


class Broken(Spy):
    def __init__(self, error, working_turns=1):
        super().__init__()
        self.error = error
        self.working_turns = working_turns

    async def generate(self, prompt, sampling, *, session, seed, on_tokens=None):
        if len(self.asked) < self.working_turns:
            return await super().generate(prompt, sampling, session=session, seed=seed)
        if self.error is None:
            await hang()
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFailure("out of memory"), Status.failed),
        (ValueError("too long"), Status.failed),
        (None, Status.timed_out),
    ],
)
def test_an_engine_that_fails_or_hangs(error, status):
    environment = Puppet(*[Reply(user("on"))] * 5)
    made = run(attempted(environment, Broken(error), **SHORT))
    assert made.status is status
    assert len(made.turns) == 1
    assert environment.closed == 1


def test_an_action_without_tokens_is_a_turn():
    class Silent(Spy):
        async def generate(self, prompt, sampling, *, session, seed, on_tokens=None):
            empty = np.zeros(0, np.int32)
            self.asked.append((prompt.tolist(), sampling, session, seed))
            return Completion(empty, np.zeros(0, np.float32), empty, StopReason.abort)

    environment = Puppet(Reply(user("on"), reward=0.5), DONE)
    made = run(attempted(environment, Silent()))
    assert made.status is Status.finished
    assert [len(turn.action) for turn in made.turns] == [0, 0]
    assert environment.heard == ["", ""]
    assert made.total == 1.5


@pytest.mark.parametrize("where", ["opening", "step", "engine", "close"])
def test_a_cancelled_attempt_closes_its_environment_once(where):
    environment = Puppet(
        hang if where == "step" else DONE,
        opening=hang if where == "opening" else None,
        closing=hang if where == "close" else None,
    )
    engine = Broken(None, 0) if where == "engine" else Spy()

    async def scene():
        call = asyncio.create_task(attempted(environment, engine))
        await asyncio.sleep(0.02)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(scene())
    assert environment.closed == 1


def test_a_turn_in_time_frees_the_slot_of_an_engine_it_leaves():
    """The deadline of a call reaches the engine: the request is forgotten."""
    from support.acting import Parrot, byte_tokenizer

    tokenizer = byte_tokenizer()
    engine = slot_engine(
        Parrot([70] * 9, len(tokenizer)), slots=1, context=4096, end_tokens=[2], decode=tokenizer.decode
    )

    async def scene():
        await engine.pause()
        made = await attempted(Puppet(DONE), engine, **SHORT)
        await engine.resume()
        again = await attempted(Puppet(DONE), engine, max_action_tokens=3)
        return made, again

    made, again = run(scene())
    assert made.status is Status.timed_out
    assert again.status is Status.finished
    assert not engine.model.busy


# ---------------------------------------------------------------- anything at all

NUMBERS = st.one_of(st.integers(-(10**400), 10**400), st.floats(-1e300, 1e300), st.sampled_from([float("nan"), 1e400]))
TEXT = st.text(max_size=8)
MESSAGE = st.builds(Message, st.sampled_from(["user", "tool", "assistant", ""]), TEXT | st.just("\ud800"))
GARBAGE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, TEXT, st.binary(max_size=4), MESSAGE, st.just(Reply), st.just(object())
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=2), st.tuples(inner, inner)
    ),
    max_leaves=5,
)
FIELDS = {
    "messages": st.lists(MESSAGE, max_size=3),
    "reward": st.floats(-1e3, 1e3),
    "outcome": st.floats(-1e3, 1e3),
    "finished": st.sampled_from([False, False, False, True]),
    "marks": st.dictionaries(TEXT, st.floats(-1e3, 1e3), max_size=2),
    "history": st.none() | st.lists(MESSAGE, min_size=1, max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
}
GOOD = st.fixed_dictionaries({}, optional=FIELDS).map(lambda fields: ("reply", fields))
SPOILT = st.tuples(st.fixed_dictionaries({}, optional=FIELDS), st.sampled_from(sorted(FIELDS)), GARBAGE).map(
    lambda drawn: ("reply", {**drawn[0], drawn[1]: drawn[2]})
)
WRONG = st.one_of(
    GARBAGE.map(lambda value: ("value", value)),
    st.sampled_from([("raise", ValueError("x")), ("raise", Exception()), ("raise", OSError(5, "disk"))]),
)
ANSWER = st.integers(0, 9).flatmap(lambda dice: GOOD if dice < 7 else SPOILT if dice < 9 else WRONG)
OPENING = st.integers(0, 9).flatmap(lambda dice: st.just(("value", Reply(user("go")))) if dice < 7 else ANSWER)
CLOSING = st.integers(0, 9).flatmap(lambda dice: st.just(("value", None)) if dice < 6 else ANSWER)
RENDER = renderer()


@settings(max_examples=400, deadline=None)
@given(OPENING, st.lists(ANSWER, max_size=4), CLOSING)
def test_no_answer_of_an_environment_is_an_exception(opening, replies, closing):
    def reply(kind, value):
        async def answer():
            if kind == "raise":
                raise value
            return Reply(**value) if kind == "reply" else value

        return answer

    environment = Puppet(*(reply(*one) for one in replies), opening=reply(*opening), closing=reply(*closing))
    made = run(attempted(environment, render=RENDER, max_turns=4))
    assert isinstance(made, Trajectory)
    assert environment.closed == 1
    assert np.isfinite([made.total, *made.marks.values(), *(turn.reward for turn in made.turns)]).all()
    assert len(made.turns) <= 4
    assert made.turns or not made.status.counts
    assert len(made.turns) <= len(environment.heard) <= len(made.turns) + 1
