"""Actions of an OpenEnv server: what its schema says of them, in words, and whether a message is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.messages import Message, ToolSpec

KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
HIDDEN = ("metadata",)
"""Fields of an action that are not for the model."""
TOOL = "act"
"""The name of the tool that an action is, if the model calls tools."""


class NoAction(ValueError):
    """A message that is no action; the text is for the model."""


@dataclass(frozen=True, slots=True)
class ActionSchema:
    """The fields of an action.

    Example:
        ActionSchema({"properties": {"text": {"type": "string"}}, "required": ["text"]})
    """

    schema: Mapping[str, Any]
    field: str = ""
    """The field that gets a message which is plain text; empty: the schema decides."""

    @property
    def fields(self) -> dict[str, Mapping[str, Any]]:
        return {name: kind for name, kind in self.schema.get("properties", {}).items() if name not in HIDDEN}

    @property
    def required(self) -> list[str]:
        return [name for name in self.schema.get("required", []) if name in self.fields]

    @property
    def text_field(self) -> str:
        """The field that a plain text is for: the only one that is required, if it is a string; otherwise empty."""
        wanted = self.required or list(self.fields)
        if self.field or len(wanted) != 1:
            return self.field
        return wanted[0] if self.fields[wanted[0]].get("type") == "string" else ""

    def hint(self) -> str:
        """How to write an action, for the model; empty if any text is one."""
        if self.text_field and len(self.fields) <= 1:
            return ""
        lines = [f"- {name}: {self.in_words(name)}" for name in self.fields]
        how = "Write your action as a JSON object with these fields:"
        if self.text_field:
            how = f"Your message is the field {self.text_field}. Or write a JSON object with these fields:"
        return "\n".join([how, *lines])

    def in_words(self, name: str) -> str:
        kind = self.fields[name]
        about = f". {kind['description']}" if isinstance(kind.get("description"), str) else ""
        default = f", default {json.dumps(kind['default'])}" if "default" in kind else ""
        return f"{type_in_words(kind)}, {'required' if name in self.required else 'optional'}{default}{about}"

    @property
    def tool(self) -> ToolSpec:
        """The action as a tool."""
        parameters = {key: value for key, value in self.schema.items() if key in ("$defs", "description")}
        parameters |= {"type": "object", "properties": self.fields, "required": self.required}
        return ToolSpec(TOOL, "Act in the environment.", parameters)

    def action(self, message: Message, by_tool: bool) -> dict[str, Any]:
        """The action that a message is; NoAction if it is none."""
        if by_tool:
            if len(message.calls) != 1 or message.calls[0].name != TOOL:
                raise NoAction(f"Call the tool {TOOL} once.")
            return self.checked(dict(message.calls[0].arguments))
        try:
            value = json.loads(message.content)
        except (ValueError, RecursionError):
            value = None
        if self.text_field and not (isinstance(value, dict) and value and value.keys() <= self.fields.keys()):
            return {self.text_field: message.content}
        if not isinstance(value, dict):
            raise NoAction(self.hint())
        return self.checked(value)

    def checked(self, action: dict[str, Any]) -> dict[str, Any]:
        for name in self.required:
            if name not in action:
                raise NoAction(f"That is no action: the field {name} is missing.")
        for name, value in action.items():
            if name not in self.fields:
                known = ", ".join(self.fields)
                raise NoAction(f"That is no action: there is no field {name[:80]}; the fields are {known}.")
            if not fits(value, self.fields[name]):
                wanted, got = type_in_words(self.fields[name]), json.dumps(value)[:80]
                raise NoAction(f"That is no action: {name} needs to be {wanted}, got {got}.")
        return action


def type_in_words(kind: Mapping[str, Any]) -> str:
    """The type of a field, shortly."""
    if isinstance(kind.get("enum"), list):
        return "one of " + ", ".join(json.dumps(value) for value in kind["enum"])
    if "const" in kind:
        return json.dumps(kind["const"])
    if isinstance(kind.get("anyOf"), list):
        return " or ".join(type_in_words(each) for each in kind["anyOf"])
    if kind.get("type") == "array" and isinstance(kind.get("items"), Mapping):
        return f"array of {type_in_words(kind['items'])}"
    return str(kind.get("type", "any value"))


def fits(value: Any, kind: Mapping[str, Any]) -> bool:
    """Whether a value is of a field's type, as far as the schema says it in place; the server checks the rest."""
    if isinstance(kind.get("enum"), list):
        return value in kind["enum"]
    if isinstance(kind.get("anyOf"), list):
        return any(fits(value, each) for each in kind["anyOf"])
    types = KINDS.get(str(kind.get("type", "")))
    if types is None:
        return True
    if isinstance(value, bool):
        return bool in types
    if kind.get("type") == "array" and isinstance(value, list) and isinstance(kind.get("items"), Mapping):
        return all(fits(each, kind["items"]) for each in value)
    return isinstance(value, types)
