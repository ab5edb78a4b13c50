"""The values that a key of a recipe may have, in words: choices, types and ranges."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from turnwise.recipe.built_in import BUILT_IN, CHOICES
from turnwise.recipe.keys import RecipeKey, keys_of
from turnwise.recipe.section import Choice

TYPES = {int: "integer", float: "number", str: "text", bool: "true | false"}
SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


def allowed_values(key: RecipeKey) -> str:
    """The values of a key.

    Example:
        allowed_values(...) == 'integer >= 1', '"tree" | "packed"', 'number > 0, <= 1'
    """
    path = f"{key.table}.{key.name}" if key.table else key.name
    if path in CHOICES:
        return " | ".join(f'"{name}"' for name in CHOICES[path])
    if path == "env.name":
        return " | ".join(f'"{name}"' for name in (*sorted(BUILT_IN), "module:Class", "library:name"))
    return in_words(key.field.annotation) + range_of(key.field)


def in_words(kind: Any) -> str:
    """A type as a person reads it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(toml(value) for value in inner)
    if origin in (types.UnionType, Union):
        return " | ".join(in_words(one) for one in inner if one is not type(None))
    if origin is tuple and Ellipsis in inner:
        return f"list of {in_words(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(in_words(one) for one in inner)}]"
    if origin is dict:
        return "table"
    return TYPES.get(kind, "table")


def range_of(field: FieldInfo) -> str:
    """The bounds of a number."""
    found = []
    for limit in field.metadata:
        for kind, name, sign in SIGNS:
            if isinstance(limit, kind):
                found.append(f"{sign} {getattr(limit, name):g}")
    return f" {', '.join(found)}" if found else ""


def default_value(field: FieldInfo) -> str:
    """The default of a key as a recipe writes it."""
    if field.default is not PydanticUndefined:
        return toml(field.default)
    return "required" if field.default_factory is None else "{}"


def toml(value: Any) -> str:
    """A value as a recipe writes it; none is what a recipe cannot write."""
    if isinstance(value, Choice):
        return f'"{value.name}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def list_keys(word: str | None) -> Iterator[str]:
    """Lines for a person: the keys of the short list, or all whose name has a word, those with their meaning."""
    found = [
        (f"{key.table}.{key.name}" if key.table else key.name, key)
        for key in keys_of()
        if (key.in_short_list if word is None else word in f"{key.table}.{key.name}")
    ]
    if not found:
        yield f"no key has {word} in its name; turnwise train --keys . lists all"
    width = max((len(path) for path, _ in found), default=0)
    for path, key in found:
        default = "required" if key.field.is_required() else f"default: {default_value(key.field)}"
        yield f"  {path:{width}}  {allowed_values(key)}  ({default})"
        if word is not None:
            yield f"  {'':{width}}    {' '.join((key.field.description or '').split())}"
