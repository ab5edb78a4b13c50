"""A client's request in a form that does not depend on its dialect, and refusals of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.engines.base import MOST_TOKENS, shown
from turnwise.engines.grammar import Grammar
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.toolcalls import is_text
from turnwise.serve.dialects.body import Unreadable, read_value

Messages = tuple[Message, ...]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


LONGEST_MESSAGE = 500
"""The longest error message, in characters. It may quote the client's text."""


class Refusal(Exception):
    """A request that is not served: the status of the response, the reason in one line, a code for programs, and the
    parameter that is at fault."""

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        one_line = " ".join(message.split())
        super().__init__(one_line if len(one_line) <= LONGEST_MESSAGE else f"{one_line[:LONGEST_MESSAGE]}...")
        self.status = status
        self.code = code
        self.param = param


def unfit(message: str, code: str = "unsupported_value") -> Refusal:
    """A refusal because the request is invalid."""
    return Refusal(400, message, code)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one action.

    Example:
        Ask("policy", messages=(Message("user", "start amber, links 2"),), settings={"temperature": 0.2})
    """

    model: str
    messages: Messages = ()
    tools: tuple[ToolSpec, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """A prompt without a chat template, as text or as tokens; None if there are messages."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The sampling settings of the request, by their names in the dialect."""
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    after: str = ""
    """The id of the answer that the messages continue, if the client relies on the stored conversation."""
    instructions: int = 0
    """How many of the first messages apply to this request only and are not part of the conversation."""
    grammar: Grammar | None = None
    """The form that the answer must have."""
    results: tuple[tuple[str, Message], ...] = ()
    """(id of a call, its result) for calls of the answer that `after` names."""
    store: bool = False
    """Whether the answer is kept, so that later requests can name it."""
    packed_thinking: bool = False
    """Whether the client wants thinking in an opaque field too, to send it back."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that nobody here knows."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Facts that tell whether a request is a retry."""

    fingerprint: bytes
    """Equal for requests with the same bytes."""
    retry: int = 0
    """The number of earlier tries, as the client says."""
    key: str = ""
    """The client's name for the request, the same in every try."""


LONGEST_NAME, MOST_NAMES = 60, 20
"""Characters of a name, and names, in the note of what was ignored. Both are hostile input."""
UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Ignored:
    """The names of ignored fields: without the numbers of messages, each once, few and short, and in characters that a
    header may have."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.more = False
        """Whether there were more than are kept."""

    def add(self, path: str) -> None:
        if len(self.names) < MOST_NAMES:
            self.names[UNSAFE.sub("?", NUMBER.sub("", path[: 4 * LONGEST_NAME]))[:LONGEST_NAME]] = None
        else:
            self.more = True

    @property
    def listed(self) -> tuple[str, ...]:
        return (*sorted(self.names), *(("...",) if self.more else ()))


class Fields:
    """The fields of a JSON object, taken one by one. Fields that remain are ignored and noted: clients and proxies add
    their own. A null is an absent field."""

    def __init__(self, fields: Any, where: str = "", ignored: Ignored | None = None) -> None:
        if not isinstance(fields, dict):
            raise unfit(f"{where or 'the body'} must be an object, got {kind_of(fields)}", "invalid_type")
        self.left = {name: value for name, value in fields.items() if value is not None}
        self.where = where
        self.ignored = Ignored() if ignored is None else ignored

    def under(self, value: Any, where: str) -> Fields:
        """The fields of an object inside this one; what is ignored there is noted with the rest."""
        return Fields(value, where, self.ignored)

    def named(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.left.pop(name, None)
        if value is None:
            return None
        wrong_bool = isinstance(value, bool) and kind is not bool
        if wrong_bool or not isinstance(value, kind):
            raise unfit(f"{self.named(name)} must be {expected}, got {kind_of(value)}", "invalid_type")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.take(name, str, "a string")
        return default if value is None else checked_text(value, self.named(name))

    def required(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise unfit(f"{self.named(name)} is missing", "missing_required_parameter")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.take(name, bool, "true or false"))

    def integer(self, name: str, low: int, high: int = MOST_TOKENS) -> int | None:
        value: int | None = self.take(name, int, "a whole number")
        if value is not None and not low <= value <= high:
            raise unfit(f"{self.named(name)} must be from {low} to {high}, got {shown(value)}", "invalid_value")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value: float | None = self.take(name, (int, float), "a number")
        if value is not None and not low <= value <= high:
            problem = f"{self.named(name)} must be between {low:g} and {high:g}, got {shown(value)}"
            raise unfit(problem, "invalid_value")
        return value

    def items(self, name: str) -> list[Any]:
        value: list[Any] = self.take(name, list, "an array") or []
        return value

    def table(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self.take(name, dict, "an object") or {}
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or an array of strings, none of them empty."""
        value = self.take(name, (str, list), "a string or an array of strings") or []
        texts = tuple(checked_text(text, self.named(name)) for text in ([value] if isinstance(value, str) else value))
        if not all(texts):
            raise unfit(f"{self.named(name)} holds an empty string", "invalid_value")
        return texts

    def ignore(self, *names: str) -> None:
        """Accept fields that do not change the sampling."""
        for name in names:
            self.left.pop(name, None)

    def refuse(self, *names: str, unless: Sequence[Any] = (), why: str = "is not supported; remove it") -> None:
        """Refuse fields that would change the sampling and are not supported. Values without effect are accepted."""
        for name in names:
            value = self.left.pop(name, None)
            if value not in (None, [], {}, *unless):
                raise unfit(f"{self.named(name)} {why}", "unsupported_parameter")

    def note_unknown(self) -> None:
        """Note the fields that remain."""
        for name in self.left:
            self.ignored.add(self.named(name))


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def checked_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise unfit(f"{where} must be a string, got {kind_of(value)}", "invalid_type")
    if not is_text(value):
        raise unfit(f"{where} has half of a surrogate pair", "invalid_value")
    return value


def read_json(raw: bytes) -> Any:
    """The JSON value of a body."""
    try:
        return read_value(raw.decode())
    except Unreadable as error:
        raise unfit(f"the body: {error}", error.code) from None
    except UnicodeDecodeError:
        raise unfit("the body: it is not JSON: it is not UTF-8 text", "invalid_json") from None


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: a string, or parts that are all text."""
    if content is None or isinstance(content, str):
        return checked_text(content or "", where)
    if not isinstance(content, list):
        raise unfit(f"{where} must be a string or an array of parts, got {kind_of(content)}", "invalid_type")
    texts = []
    for index, part in enumerate(content):
        at = f"{where}.{index}"
        fields = Fields(part, at)
        kind = fields.text("type")
        if kind not in kinds:
            raise unfit(
                f"{at}: parts of type {shown(kind)} are not supported; this model reads text", "unsupported_part"
            )
        texts.append(fields.text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def call_of(name: Any, arguments: Any, where: str) -> ToolCall:
    """A call in a conversation; its arguments are an object, or JSON text of an object."""
    if isinstance(arguments, str):
        try:
            arguments = read_value(arguments or "{}")
        except Unreadable as error:
            raise unfit(f"{where}: the arguments of a call must be JSON ({error})", "invalid_value") from None
    try:
        return ToolCall(checked_text(name, where), arguments)
    except (ValueError, TypeError) as error:
        raise unfit(f"{where}: {error}", "invalid_value") from None


def tool_of(name: Any, description: Any, parameters: Any, where: str) -> ToolSpec:
    """A tool from its definition by a client."""
    schema = {"type": "object", "properties": {}} if parameters is None or parameters == {} else parameters
    if not isinstance(schema, dict):
        raise unfit(f"{where}: parameters must be an object, got {kind_of(schema)}", "invalid_type")
    try:
        return ToolSpec(checked_text(name, where), checked_text(description or "", where), schema)
    except ValueError as error:
        raise unfit(f"{where}: {error}", "invalid_value") from None


def function_tools(entries: list[Any], definition_of: Callable[[Fields], Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """The tools of a request in OpenAI's form. The dialects differ in the place of the definition in an entry."""
    tools = []
    for number, entry in enumerate(entries):
        where = f"tools.{number}"
        fields = Fields(entry, where)
        if fields.text("type") != "function":
            raise unfit(f"{where}.type must be function: other tools are not supported", "unsupported_value")
        tool = definition_of(fields)
        tools.append(tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"), where))
    return tuple(tools)


def in_order(results: Sequence[tuple[str, Message]], ids: Sequence[str], where: str) -> list[Message]:
    """Tool results in the order of their calls: chat templates match results and calls only by order."""
    index_of = {name: index for index, name in reversed(list(enumerate(ids)))}
    for name, _ in results:
        if name not in index_of:
            raise unfit(f"{where}: the result for {shown(name)} answers no call of the message before", "invalid_value")
    return [message for _, message in sorted(results, key=lambda result: index_of[result[0]])]
