"""Messages of a conversation, the tool calls in them, and the tools that a model may call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: its name and its arguments, which are JSON values.

    Example:
        ToolCall("get", {"name": "amber"})
    """

    name: str
    arguments: Mapping[str, Any] = field(compare=False)
    fault: str = ""
    """Why the call is not made, in a line that the model hears in place of a result."""
    text: str = field(init=False, repr=False)
    """The arguments as text. Calls are equal where it is: 1, 1.0 and true are not."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise ValueError(f"a ToolCall needs a name, got {self.name!r}")
        if type(self.fault) is not str:
            raise ValueError("the fault of a ToolCall is a string")
        text, arguments = as_json(self.arguments, "the arguments of a ToolCall are a mapping to JSON values")
        object.__setattr__(self, "arguments", MappingProxyType(arguments))
        object.__setattr__(self, "text", text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ToolCall, (self.name, dict(self.arguments), self.fault)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a model may call: its name, what it does, and a JSON schema of its arguments.

    Example:
        ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}}, compare=False)
    text: str = field(init=False, repr=False)
    """The parameters as text. Tools are equal where it is, down to the order of their arguments, which is shown."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not TOOL_NAME.fullmatch(self.name):
            raise ValueError(f'the name of a ToolSpec is letters, digits, "_", "-" and ".", got {self.name!r}')
        if type(self.description) is not str:
            raise ValueError(f"the description of a ToolSpec is a string, got {type(self.description).__name__}")
        text, schema = as_json(self.parameters, f"the parameters of the tool {self.name} are a JSON schema")
        if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), dict):
            raise ValueError(
                f'the parameters of the tool {self.name} are a JSON schema like {{"type": "object", "properties": ...}}'
            )
        object.__setattr__(self, "parameters", MappingProxyType(schema))
        object.__setattr__(self, "text", text)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's interface have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def __reduce__(self) -> tuple[Any, ...]:
        return ToolSpec, (self.name, self.description, dict(self.parameters))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as a chat template sees it.

    Example:
        Message("user", "Start at amber. Follow 2 links.")
        Message("assistant", "", thinking="amber first", calls=(ToolCall("get", {"name": "amber"}),))
    """

    role: str
    content: str
    thinking: str = ""
    """Reasoning, where it is known apart from the content."""
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""
    """What is wrong with calls that could not be read, in a line for the model; their text is part of the content."""

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not isinstance(self.content, str):
            raise ValueError(
                f"a Message is two strings, got {type(self.role).__name__} and {type(self.content).__name__}"
            )
        if type(self.thinking) is not str or type(self.fault) is not str:
            raise ValueError("the thinking and the fault of a Message are strings")
        if type(self.calls) is not tuple:
            object.__setattr__(self, "calls", tuple(self.calls))
        if any(type(call) is not ToolCall for call in self.calls):
            raise ValueError("the calls of a Message are ToolCall values")

    def __reduce__(self) -> tuple[Any, ...]:
        """What dataclasses do by themselves takes three times as long, and a group has a thousand messages."""
        return Message, (self.role, self.content, self.thinking, self.calls, self.fault)

    @property
    def faults(self) -> tuple[str, ...]:
        """What the model did wrong: calls that could not be read, and calls that are not made."""
        return tuple(dict.fromkeys(fault for fault in (self.fault, *(call.fault for call in self.calls)) if fault))


def as_json(values: Mapping[str, Any], expected: str) -> tuple[str, dict[str, Any]]:
    """A mapping as JSON text, and as the plain values that the text holds; ValueError with what was expected where it
    cannot be written."""
    try:
        text = json.dumps(dict(values), ensure_ascii=False, allow_nan=False)
        return text, json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{expected} ({error})") from None
