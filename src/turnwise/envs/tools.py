"""Tools: typed Python functions that a model may call, and environments that are made of them.

What a model calls a tool with is hostile input, and what a tool does with it may go wrong. Both become a line that the
model hears, never a traceback and never the end of the attempt; a tool that hangs is left behind.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from turnwise.envs.base import Reply
from turnwise.envs.daemon_threads import DaemonThreads
from turnwise.envs.raised import Raised, error_line, home_of
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.types import Task

SECONDS = 10.0
"""How long a call may take, unless the tool says otherwise."""
LONGEST = 4000
"""Characters of a result that the model hears."""
LONGEST_ERROR = 300
MOST_CALLS = 8
"""Calls of one message that are answered."""
threads = DaemonThreads("tools", most_hanging=64)

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolError(Exception):
    """What the model hears in place of a result."""


class ToolRaised(ToolError):
    """A ToolError that the tool did not intend: an error in its code, which is also logged."""

    def __init__(self, text: str, raised: Raised) -> None:
        super().__init__(text)
        self.raised = raised


class ToolBroken(RuntimeError):
    """The tool itself does not work. The attempt fails, and the model is not to blame."""


class Untitled(GenerateJsonSchema):
    """Schemas without the titles that pydantic makes of names: they would only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A typed function that a model may call.

    Example:
        def price(item: str, pieces: int = 1) -> float:
            '''What some pieces of an item cost.

            Args:
                item: Its name.
            '''
        Tool.of(price).spec.schema
    """

    function: Callable[..., Any]
    spec: ToolSpec
    arguments: type[BaseModel]
    """What arguments are checked against; its fields have the parameters' names as aliases."""
    seconds: float = SECONDS

    @classmethod
    def of(cls, function: Callable[..., Any], *, seconds: float = SECONDS, is_method: bool = False) -> Tool:
        """The tool that a function makes, with its schema from the signature and the docstring (Google's style)."""
        from transformers.utils.chat_template_utils import parse_google_format_docstring

        name = function.__name__
        about, parameter_docs, _ = parse_google_format_docstring(inspect.getdoc(function) or "")
        if not about:
            raise ValueError(f"the tool {name} needs a docstring, which tells the model what it does")
        try:
            arguments = arguments_of(function, parameter_docs or {}, is_method)
            schema = arguments.model_json_schema(schema_generator=Untitled)
        except (NameError, PydanticUserError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"the tool {name} takes what has no JSON schema: {why}") from None
        parameters = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
        shown = {key: type_first(value) for key, value in parameters["properties"].items()}
        parameters = type_first({**parameters, "properties": shown})
        return cls(function, ToolSpec(name, one_line(about), parameters), arguments, seconds)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the signature."""
        try:
            read = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()]
            raise ToolError("; ".join(wrong)) from None
        fields = self.arguments.model_fields
        return {str(field.alias): getattr(read, name) for name, field in fields.items()}

    async def call(self, arguments: Mapping[str, Any], *owner: Any) -> Any:
        """What the function gives. Raises ToolError for the model to hear."""
        values = self.checked(arguments)

        def work() -> Any:
            return self.function(*owner, **values)

        waiting = asyncio.ensure_future(awaited(work) if is_async(self.function) else in_thread(work, self.spec.name))
        try:
            await asyncio.wait({waiting}, timeout=self.seconds)
        finally:
            waiting.cancel()
        if not waiting.done():
            text = f"{self.spec.name} took longer than {self.seconds:g} seconds and was given up"
            raise ToolRaised(text, Raised("TimeoutError", home_of(self.function), text, ""))
        return waiting.result()


def arguments_of(function: Callable[..., Any], parameter_docs: Mapping[str, str], is_method: bool) -> type[BaseModel]:
    """A model of a function's parameters, but for the object of a method."""
    hints = get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the tool {function.__name__} takes {parameter}; a tool names all its parameters")
        if parameter.name not in hints:
            raise ValueError(f"the tool {function.__name__} needs a type for {parameter.name}")
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        description: dict[str, Any] = (
            {"description": parameter_docs[parameter.name]} if parameter.name in parameter_docs else {}
        )
        # Under a name of our own: a parameter may have any, such as that of a method of pydantic's models.
        fields[f"a{index}"] = hints[parameter.name], Field(default, alias=parameter.name, **description)
    return create_model(
        function.__name__, __config__=ConfigDict(extra="forbid", coerce_numbers_to_str=True, strict=False), **fields
    )


def type_first(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema in the order in which models have seen schemas."""
    return {key: schema[key] for key in sorted(schema, key=lambda key: key != "type")}


def one_line(text: str) -> str:
    return " ".join(text.split())


def shown(error: BaseException) -> str:
    """An error in a line that is short enough for a model."""
    return error_line(error)[:LONGEST_ERROR]


# ---------------------------------------------------------------- calls


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


async def awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    """What a coroutine function gives, or its error for the model to hear."""
    try:
        return await work()
    except (ToolError, ToolBroken, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ToolRaised(shown(error), Raised.of(error)) from error


async def in_thread(work: Callable[[], Any], name: str) -> Any:
    """The same for a plain function, which runs in a daemon thread."""
    if complaint := threads.complaint():
        raise ToolBroken(complaint)
    return await threads.run(work, name, for_model)


def for_model(error: BaseException) -> BaseException:
    """What a tool raised, as the model hears it."""
    return error if isinstance(error, (ToolError, ToolBroken)) else ToolRaised(shown(error), Raised.of(error))


# ---------------------------------------------------------------- environments

MARK = "turnwise_tool_seconds"


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(*, seconds: float) -> Callable[[Function], Function]: ...
def tool(function: Any = None, *, seconds: float = SECONDS) -> Any:
    """Marks a method of a ToolEnvironment as a tool; the method stays as it is."""

    def mark(function: Function) -> Function:
        setattr(function, MARK, seconds)
        return function

    return mark if function is None else mark(function)


class ToolEnvironment:
    """An environment in which the model calls tools until it answers in words.

    Say what is asked, what an answer is worth, and which methods are tools. A tool gives any value, shown as JSON where
    it is no text, or a Reply, which may pay or end the attempt.

    Example:
        class Shop(ToolEnvironment):
            system = "Find out what the basket costs and say the number."

            def question(self, task: Task) -> str:
                return ", ".join(task.data["basket"])

            def score(self, answer: str) -> float:
                return float(answer.strip() == self.task.data["total"])

            @tool
            def price(self, item: str) -> float:
                '''What an item costs.'''
                return PRICES[item]
    """

    reads_calls = True
    """Recipes need a format of calls, `rollout.tools`."""
    system: str = ""
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Tools that are plain functions, besides the methods marked as tools."""
    longest: int = LONGEST
    """Characters of a result that the model hears."""

    task: Task
    tool_errors: Counter[str] | None = None
    """Of this attempt, by tool."""

    def question(self, task: Task) -> str:
        """What the model is asked."""
        raise NotImplementedError(f"{type(self).__name__} needs a method question(task)")

    def score(self, answer: str) -> float:
        """The outcome of an attempt that ends with these words."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(answer)")

    async def open(self, task: Task) -> Reply:
        self.task = task
        system = (Message("system", self.system),) if self.system else ()
        offered = tuple(tool.spec for tool in self.offered().values())
        return Reply((*system, Message("user", self.question(task))), tools=offered)

    async def step(self, message: Message) -> Reply:
        if not message.calls:
            return Reply(finished=True, outcome=self.score(message.content))
        replies: list[Reply] = []
        for place, call in enumerate(message.calls):
            if place >= MOST_CALLS:
                replies.append(self.observed(f"error: a message may have {MOST_CALLS} calls"))
                continue
            replies.append(await self.run(call))
            if replies[-1].finished:
                break
        return joined(replies)

    async def close(self) -> Reply | None:
        return None

    @classmethod
    def tools(cls) -> dict[str, Tool]:
        """The tools by name, in the order in which they are written down."""
        return tools_of(cls)  # type: ignore[arg-type]

    def offered(self) -> dict[str, Tool]:
        """The tools of this attempt: all, unless an environment says otherwise."""
        return self.tools()

    async def run(self, call: ToolCall) -> Reply:
        """What one call comes to."""
        found = self.offered().get(call.name)
        if found is None:
            return self.observed(f"error: there is no such tool; there are {', '.join(self.offered())}")
        owner = () if found.function in self.functions else (self,)
        try:
            value = await found.call(call.arguments, *owner)
        except ToolError as error:
            heard = self.observed(f"error: {one_line(str(error))[:LONGEST_ERROR]}")
            return self.counted(call.name, error, heard) if isinstance(error, ToolRaised) else heard
        return value if isinstance(value, Reply) else self.observed(text_of(value))

    def counted(self, name: str, error: ToolRaised, heard: Reply) -> Reply:
        """What the model hears of an error inside a tool, with what people shall see of it."""
        if self.tool_errors is None:
            self.tool_errors = Counter()
        self.tool_errors[name] += 1
        marks = {f"tools/{name}/errors": float(self.tool_errors[name])}
        about = replace(error.raised, text=f"{error.raised.text} (in the tool {name})".strip())
        return replace(heard, marks=marks, raised=(about,))

    def observed(self, text: str) -> Reply:
        """The result of a call, not longer than the model shall read."""
        if len(text) > self.longest:
            text = f"{text[: self.longest]}\n... cut after {self.longest} of {len(text)} characters"
        return Reply((Message("tool", text),))


@cache
def tools_of(kind: type[ToolEnvironment]) -> dict[str, Tool]:
    methods = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    marked = [
        Tool.of(value, seconds=seconds, is_method=True)
        for value in methods.values()
        if callable(value) and (seconds := getattr(value, MARK, None)) is not None
    ]
    plain = [Tool.of(each, seconds=getattr(each, MARK, SECONDS)) for each in kind.functions]
    tools = {each.spec.name: each for each in (*plain, *marked)}
    if not tools or len(tools) < len(plain) + len(marked):
        raise ValueError(f"{kind.__name__} needs tools with names of their own; mark methods with @tool")
    return tools


def joined(replies: list[Reply]) -> Reply:
    """The replies to the calls of one message, as one."""
    last = replies[-1]
    return Reply(
        tuple(message for reply in replies for message in reply.messages),
        reward=sum(reply.reward for reply in replies),
        outcome=sum(reply.outcome for reply in replies),
        finished=last.finished,
        marks={name: mark for reply in replies for name, mark in reply.marks.items()},
        history=last.history,
        stop=last.stop,
        tools=next((reply.tools for reply in reversed(replies) if reply.tools is not None), None),
        raised=tuple(raised for reply in replies for raised in reply.raised),
    )


def text_of(value: Any) -> str:
    """A result as the model hears it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return "a result that cannot be shown"
