"""Values without types: text that becomes the value which the JSON schema of an offered tool declares.

XML-like formats write <parameter=count>3</parameter>, and only the schema says whether that is 3 or "3". The order in
which types are tried is that of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwise.messages import TOOL_NAME, ToolCall, ToolSpec
from turnwise.rollout.render.formats.literals import read_literal
from turnwise.rollout.render.toolcalls import Fault, read_json, real_number, whole_number

ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "int32": "integer", "int64": "integer", "uint": "integer", "long": "integer", "short": "integer",
    "float": "number", "float32": "number", "float64": "number", "double": "number",
    "bool": "boolean", "dict": "object", "list": "array", "arr": "array", "sequence": "array", "tuple": "array",
}  # fmt: skip
ORDER = ("null", "integer", "number", "boolean", "object", "array", "string")
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
DEEPEST_SCHEMA = 8


def properties_of(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Any]:
    """The declared arguments of a tool; none if it is not offered."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def coerced(text: str, schema: Any) -> Any:
    """The value that a text means under a schema; the text itself if nothing declared fits, or nothing is declared."""
    types = types_of(schema)
    for kind in ORDER:
        if kind not in types:
            continue
        if kind == "string":
            return text
        try:
            return READERS[kind](text.strip())
        except ValueError:
            continue
    return text if not types else guessed(text)


def guessed(text: str) -> Any:
    """The JSON value of a text, or the text."""
    try:
        return whole(*read_json(text, 0), len(text))
    except Fault:
        return text


def inferred(text: str) -> Any:
    """The value of a text that no schema declares: JSON, a constant of Python, or the text."""
    value = guessed(text)
    return PYTHON_CONSTANTS.get(text, text) if value is text else value


def types_of(schema: Any, deepest: int = DEEPEST_SCHEMA) -> set[str]:
    """The names of all types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict) or not deepest:
        return set()
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {ALIASES.get(name.strip().lower(), name.strip().lower()) for name in names if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        types |= {kind_of(value) for value in schema["enum"]}
    for field in ("anyOf", "oneOf", "allOf"):
        for choice in schema[field] if isinstance(schema.get(field), list) else ():
            types |= types_of(choice, deepest - 1)
    if not types:
        types |= {kind for field, kind in (("properties", "object"), ("items", "array")) if field in schema}
    if not types and "$ref" in schema:
        types = {"object", "array", "string"}
    return types


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), "null")


def specs_of(calls: Iterable[ToolCall]) -> tuple[ToolSpec, ...]:
    """Tools whose schemas declare the types of the values in these calls, so that a text of the calls reads as them."""
    declared: dict[str, dict[str, set[str]]] = {}
    for call in calls:
        if TOOL_NAME.fullmatch(call.name):
            properties = declared.setdefault(call.name, {})
            for key, value in call.arguments.items():
                properties.setdefault(key, set()).add(kind_of(value))
    return tuple(
        ToolSpec(
            name,
            parameters={
                "type": "object",
                "properties": {key: {"type": sorted(kinds)} for key, kinds in properties.items()},
            },
        )
        for name, properties in declared.items()
    )


# ---------------------------------------------------------------- one type


def read_null(text: str) -> None:
    if text.lower() != "null":
        raise Fault("it is not null")


def read_integer(text: str) -> int:
    if len(text) > 20:
        raise Fault("a whole number has more than 64 bits")
    return whole_number(text)


def read_number(text: str) -> float | int:
    return real_number(text) if {".", "e", "E"} & set(text[:64]) else read_integer(text)


def read_boolean(text: str) -> bool:
    lower = text[:8].lower()
    if lower not in ("true", "1", "false", "0"):
        raise Fault("it is not true or false")
    return lower in ("true", "1")


def read_object(text: str) -> dict[str, Any]:
    value = read_either(text)
    if not isinstance(value, dict):
        raise Fault("it is not an object")
    return value


def read_array(text: str) -> list[Any]:
    value = read_either(text)
    if not isinstance(value, list):
        raise Fault("it is not a list")
    return value


def read_either(text: str) -> Any:
    """JSON, perhaps escaped once too often, or else a Python literal: some templates write str() of a value."""
    if text[:3] in ("[{\\", '[\\"') or text.startswith('{\\"'):
        inside, end = read_json(f'"{text}"', 0)
        text = whole(inside, end, len(text) + 2)
    try:
        return whole(*read_json(text, 0), len(text))
    except Fault:
        return whole(*read_literal(text, 0), len(text))


def whole(value: Any, end: int, size: int) -> Any:
    if end != size:
        raise Fault("more follows")
    return value


READERS = {
    "null": read_null,
    "integer": read_integer,
    "number": read_number,
    "boolean": read_boolean,
    "object": read_object,
    "array": read_array,
}
