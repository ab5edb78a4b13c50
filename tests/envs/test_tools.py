import asyncio
import threading
from datetime import date
from enum import StrEnum
from functools import partial
from typing import Annotated, Literal

import pytest
from pydantic import Field

from support.acting import attempted, byte_tokenizer, run, says
from turnwise.envs import tools
from turnwise.envs.base import Reply
from turnwise.envs.daemon_threads import DaemonThreads
from turnwise.envs.tools import Tool, ToolBroken, ToolEnvironment, ToolError, tool
from turnwise.messages import Message, ToolCall
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt
from turnwise.runs.describe import describe
from turnwise.types import Group, Status, Task

TASK = Task("t", "shop", {"basket": ["apple", "pear"], "total": "5"})
PRICES = {"apple": 2, "pear": 3}


class Size(StrEnum):
    small = "small"
    large = "large"


def price(
    item: str,
    pieces: Annotated[int, Field(ge=1, description="How many.")] = 1,
    size: Size = Size.small,
    day: date | None = None,
    how: Literal["net", "gross"] = "net",
    names: list[str] = [],  # noqa: B006
) -> float:
    """What some pieces
    of an item cost.

    Args:
        item: Its name,
            in English.
        day: When.
    """
    assert isinstance(size, Size)
    assert day is None or isinstance(day, date)
    return PRICES[item] * pieces


# ---------------------------------------------------------------- schemas


def test_a_signature_and_a_docstring_become_a_schema():
    spec = Tool.of(price).spec
    assert (spec.name, spec.description) == ("price", "What some pieces of an item cost.")
    assert spec.parameters["type"] == "object"
    assert spec.parameters["required"] == ["item"]
    shown = spec.parameters["properties"]
    assert list(shown) == ["item", "pieces", "size", "day", "how", "names"]
    assert shown["item"] == {"type": "string", "description": "Its name, in English."}
    assert shown["pieces"] == {"type": "integer", "minimum": 1, "default": 1, "description": "How many."}
    assert shown["how"] == {"type": "string", "enum": ["net", "gross"], "default": "net"}
    assert shown["day"]["description"] == "When."


def nameless(x: int):
    pass


def untyped(x):
    """Something."""


def stars(*x: int):
    """Something."""


def pair(**x: int):
    """Something."""


def silly(x: threading.Thread):
    """Something."""


@pytest.mark.parametrize(
    ("function", "says"),
    [(nameless, "docstring"), (untyped, "a type for x"), (stars, "names all"), (pair, "names all"), (silly, "JSON")],
)
def test_a_function_that_is_no_tool_is_refused_in_one_line(function, says):
    with pytest.raises(ValueError, match=says) as refused:
        Tool.of(function)
    assert "\n" not in str(refused.value)


def test_parameters_may_have_any_name():
    def odd(schema: int, copy: int, self: int, model_config: int, json: int = 4) -> list[int]:
        """Something."""
        return [schema, copy, self, model_config, json]

    made = Tool.of(odd)
    assert list(made.spec.parameters["properties"]) == ["schema", "copy", "self", "model_config", "json"]
    assert run(made.call({"schema": 1, "copy": 2, "self": 3, "model_config": 5})) == [1, 2, 3, 5, 4]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "cost"),
    [
        ({"item": "apple"}, 2),
        ({"item": "pear", "pieces": "2", "size": "large", "day": "2013-01-31", "names": []}, 6),
        ({"item": "pear", "pieces": 2.0, "day": None}, 6),
    ],
)
def test_arguments_come_in_the_types_of_the_signature(arguments, cost):
    assert run(Tool.of(price).call(arguments)) == cost


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "item: Field required"),
        ({"item": ["apple"]}, "item: Input should be a valid string"),
        ({"item": "apple", "pieces": 0}, "pieces: .*greater than or equal to 1"),
        ({"item": "apple", "pieces": 1.5}, "pieces: "),
        ({"item": "apple", "colour": "red"}, "colour: Extra inputs"),
        ({"item": "apple", "a0": "pear"}, "a0: Extra inputs"),
        ({"item": "apple", "day": "yesterday"}, "day"),
        ({"item": "apple", "size": "huge", "how": "free"}, "size: .*; how: "),
        ({"item": "plum"}, "KeyError: 'plum'"),
    ],
)
def test_wrong_arguments_and_errors_are_one_line(arguments, says):
    with pytest.raises(ToolError, match=says) as heard:
        run(Tool.of(price).call(arguments))
    assert "\n" not in str(heard.value)
    assert "Traceback" not in str(heard.value)


# ---------------------------------------------------------------- time, and what goes wrong


async def sleepy(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "awake"


async def stubborn() -> None:
    """Never gives up."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if release.is_set():
                raise


def blocked() -> None:
    """Never returns."""
    release.wait()


release = threading.Event()


@pytest.mark.parametrize("function", [stubborn, blocked])
def test_a_tool_that_hangs_is_given_up(function):
    release.clear()

    async def hang():
        with pytest.raises(ToolError, match="took longer than 0.1 seconds"):
            await Tool.of(function, seconds=0.1).call({})
        release.set()

    run(hang())


def test_calls_in_time_are_answered():
    assert run(Tool.of(sleepy).call({"seconds": 0})) == "awake"


def test_too_many_threads_left_behind_are_a_failure_of_ours(monkeypatch):
    monkeypatch.setattr(tools, "threads", DaemonThreads("tools", most_hanging=2))
    release.clear()

    async def hang():
        for _ in range(2):
            with pytest.raises(ToolError):
                await Tool.of(blocked, seconds=0.05).call({})
        with pytest.raises(ToolBroken, match="2 calls of tools hang"):
            await Tool.of(price).call({"item": "pear"})
        release.set()
        while any(thread.is_alive() for thread in tools.threads.hanging):
            await asyncio.sleep(0.01)
        assert await Tool.of(price).call({"item": "pear"}) == 3

    run(hang())


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [SystemExit(3), StopIteration(), Unspeakable(), ValueError("a\nb" * 999), GeneratorExit()]
)
@pytest.mark.parametrize("plain", [True, False])
def test_whatever_a_tool_raises_is_a_line(error, plain):
    def fails() -> None:
        """Fails."""
        raise error

    async def fails_later() -> None:
        """Fails."""
        raise error

    with pytest.raises(ToolError) as heard:
        run(Tool.of(fails if plain else fails_later).call({}))
    assert "\n" not in str(heard.value)
    assert len(str(heard.value)) <= tools.LONGEST_ERROR


def test_an_attempt_that_is_given_up_takes_its_call_along():
    async def cancelled():
        calling = asyncio.ensure_future(Tool.of(sleepy, seconds=60).call({"seconds": 60}))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(cancelled())


# ---------------------------------------------------------------- environments


class Shop(ToolEnvironment):
    system = "Find out what the basket costs and say the number."
    functions = (price,)

    def question(self, task):
        return ", ".join(task.data["basket"])

    def score(self, answer):
        return float(answer.strip() == self.task.data["total"])

    @tool
    def count(self) -> int:
        """How many items there are."""
        return len(self.task.data["basket"])

    @tool(seconds=0.2)
    async def wait(self, seconds: float) -> dict[str, float]:
        """Waits."""
        await asyncio.sleep(seconds)
        return {"waited": seconds}

    @tool
    def steal(self) -> Reply:
        """Takes it all."""
        return Reply((Message("tool", "caught"),), reward=-1.0, finished=True, marks={"stolen": 1.0})


def call(name, **arguments):
    return ToolCall(name, arguments)


async def stepped(*calls, content=""):
    shop = Shop()
    await shop.open(TASK)
    return await shop.step(Message("assistant", content, calls=calls))


def test_ten_lines_make_an_environment():
    reply = run(Shop().open(TASK))
    assert [message.content for message in reply.messages] == [Shop.system, "apple, pear"]
    assert [each.name for each in reply.tools] == ["price", "count", "wait", "steal"]
    assert reply.tools[1].parameters == {"type": "object", "properties": {}}
    assert run(stepped(content=" 5")) == Reply(finished=True, outcome=1.0)
    assert run(stepped(content="6")).outcome == 0.0


def test_every_call_has_its_result_in_order():
    calls = (call("price", item="pear"), call("count"), call("sell"), call("wait", seconds=9), call("wait", seconds=0))
    reply = run(stepped(*calls))
    assert not reply.finished
    assert {message.role for message in reply.messages} == {"tool"}
    assert [message.content for message in reply.messages] == [
        "3",
        "2",
        "error: there is no such tool; there are price, count, wait, steal",
        "error: wait took longer than 0.2 seconds and was given up",
        '{"waited": 0.0}',
    ]


def test_a_tool_may_end_the_attempt():
    reply = run(stepped(call("count"), call("steal"), call("count")))
    assert reply == Reply(
        (Message("tool", "2"), Message("tool", "caught")), reward=-1.0, finished=True, marks={"stolen": 1.0}
    )


def test_calls_and_results_have_a_limit():
    reply = run(stepped(*[call("count")] * 11))
    assert len(reply.messages) == 11
    assert [message.content for message in reply.messages[7:9]] == ["2", "error: a message may have 8 calls"]

    class Chatty(Shop):
        longest = 10

    (message,) = Chatty().observed("x" * 99).messages
    assert message.content == "x" * 10 + "\n... cut after 10 of 99 characters"


def test_two_tools_cannot_have_the_same_name():
    class Double(Shop):
        @tool
        def price(self) -> int:
            """Another."""
            return 0

    for kind in (ToolEnvironment, Double):
        with pytest.raises(ValueError, match="names of their own"):
            kind.tools()


def test_a_broken_tool_fails_the_attempt_and_not_the_model():
    class Broken(Shop):
        @tool
        def look(self) -> int:
            """Looks."""
            raise ToolBroken("the server is down")

    render = Renderer(byte_tokenizer(), tools="hermes")
    engine = says('<tool_call>{"name": "look", "arguments": {}}</tool_call>', render=render)
    made = run(attempted(Broken(), engine, render=render))
    assert made.status is Status.failed


def test_through_the_agent_loop():
    render = Renderer(byte_tokenizer(), tools="hermes")
    texts = iter(
        [
            '<tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call>',
            '<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>',
            "5",
        ]
    )
    which = Attempt(0, "train", TASK)
    made = run(attempted(Shop, says(lambda *_: next(texts), render=render), render=render, which=which))
    assert made.status is Status.finished
    assert made.outcome == 1.0
    assert [[message.content for message in turn.heard] for turn in made.turns] == [
        ["2"],
        ["error: item: Field required; fruit: Extra inputs are not permitted"],
        [],
    ]
    assert "What some pieces of an item cost." in render.decode(made.turns[0].prompt)


class Typo(Shop):
    """Tools with a mistake in their code, one of them in a coroutine."""

    functions = ()  # type: ignore[assignment]

    @tool
    def weigh(self, item: str) -> int:
        """What an item weighs."""
        return WEIGHTS[item]  # type: ignore[name-defined]  # noqa: F821 - the mistake

    @tool
    async def ripen(self) -> str:
        """Wait until everything is ripe."""
        return "ripe" + 1  # type: ignore[operator]  # the other mistake

    @tool
    def refuse(self) -> str:
        """Nothing."""
        raise ToolError("closed today")


def next_of(texts, *_):
    return next(texts)


def calls_of(*names):
    calls = {name: '{"item": "apple"}' if name == "weigh" else "{}" for name in names}
    return "".join(f'<tool_call>{{"name": "{name}", "arguments": {calls[name]}}}</tool_call>' for name in names)


def test_an_error_inside_a_tool_is_counted_by_tool_and_shown_once(caplog):
    render = Renderer(byte_tokenizer(), tools="hermes")
    said = [calls_of("weigh", "ripen"), calls_of("weigh", "refuse"), calls_of("nothing"), "5"]
    attempts = []
    for number in range(2):
        engine = says(partial(next_of, iter(said)), render=render)
        which = Attempt(0, "train", TASK, number=number)
        attempts.append(run(attempted(Typo, engine, render=render, which=which)))
        assert len(caplog.records) == 2 * (number + 1)  # each attempt has failures of its own here
    first, second = (record.getMessage() for record in caplog.records[:2])
    for line, place, words in ((first, "# noqa: F821 - the mistake", "WEIGHTS"), (second, "# the other", "str")):
        with open(__file__) as file:
            number = next(number for number, text in enumerate(file, 1) if place in text and "place" not in text)
        assert f"test_tools.py:{number}" in line
        assert words in line
    assert "(in the tool weigh)" in first
    assert "return WEIGHTS[item]" in caplog.text
    assert dict(attempts[0].marks) == {"tools/weigh/errors": 2.0, "tools/ripen/errors": 1.0}
    assert [made.status for made in attempts] == [Status.finished] * 2
    metrics = describe([Group(TASK, attempts)], [], version=0, success_at=1.0)
    assert (metrics["tools/weigh/errors"], metrics["tools/ripen/errors"]) == (4.0, 2.0)
    assert not [name for name in metrics if name.startswith(("tools/refuse", "marks/tools"))]
    assert "Traceback" not in str([turn.heard for turn in attempts[0].turns])


def test_a_tool_that_takes_too_long_is_an_error_inside_it():
    class Slow(Shop):
        functions = ()  # type: ignore[assignment]

        @tool(seconds=0.05)
        async def wait(self) -> None:  # type: ignore[override]
            """Waits."""
            await asyncio.sleep(60)

    reply = run(Slow().run(ToolCall("wait", {})))
    assert reply.marks == {"tools/wait/errors": 1.0}
    assert reply.raised[0].kind == "TimeoutError"
    assert "test_tools.py:" in reply.raised[0].where
