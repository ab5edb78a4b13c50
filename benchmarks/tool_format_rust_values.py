"""Values of Rust tests and what their methods give, for tool_format_rust.py."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any

SAME = {
    "clone", "to_string", "as_ref", "to_owned", "into", "iter", "into_iter", "as_deref", "as_mut", "unwrap_or_default",
    "collect", "cloned", "copied", "borrow", "as_slice", "to_vec", "iter_mut", "await", "as_bytes", "ok", "await_",
}  # fmt: skip
KINDS = {
    "str": (str,), "i64": (int,), "u64": (int,), "f64": (int, float), "bool": (bool,), "array": (list,),
    "object": (dict,), "string": (str,), "number": (int, float), "boolean": (bool,),
}  # fmt: skip
STRINGS = {
    "trim": "strip", "trim_end": "rstrip", "trim_start": "lstrip", "starts_with": "startswith",
    "ends_with": "endswith", "replace": "replace",
}  # fmt: skip
Run = Callable[[dict[str, Any]], Any]


class NotKnown(Exception):
    """Source that this does not interpret."""


class Panic(Exception):
    """What ends a test in Rust: an assertion that does not hold, or a value that is missing."""


class Nothing:
    """Rust's None, which is not JSON's null."""

    def __repr__(self) -> str:
        return "None"


class Content:
    """The content of a message, ids and the like: whatever is done with it says nothing."""


class JsonText(str):
    """Arguments as text, equal to any text of the same values."""

    def __eq__(self, other: object) -> bool:
        try:
            return same(json.loads(self), json.loads(str(other)))
        except ValueError:
            return str(self) == other

    __hash__ = str.__hash__

    def holds(self, part: str) -> bool:
        spaced = json.dumps(json.loads(self), ensure_ascii=False)
        escaped = json.dumps(json.loads(self))
        return any(part in text for text in (str(self), spaced, escaped))


class Calls(list[Any]):
    """Calls as JSON; a single one stands for itself too."""


class Answer(str):
    """Calls as text, or the output itself where there are none."""

    calls: Calls

    def __eq__(self, other: object) -> bool:
        if not self.calls:
            return str(self) == other
        given = parsed(str(other))
        given = [given] if isinstance(given, dict) else given
        mine = [[call["name"], call["arguments"]] for call in self.calls]
        return same(mine, [[call["name"], call.get("arguments", call.get("parameters"))] for call in given])

    __hash__ = str.__hash__


NOTHING, CONTENT = Nothing(), Content()


def same(left: Any, right: Any) -> Any:
    """Equality as in Rust: 1, 1.0 and true differ."""
    if left is CONTENT or right is CONTENT:
        return CONTENT
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(left, str) and isinstance(right, str):
        return right == left if isinstance(right, (JsonText, Answer)) else left == right
    return type(left) is type(right) and left == right


def not_known(why: str) -> Run:
    def run(names: dict[str, Any]) -> Any:
        raise NotKnown(why)

    return run


class Unknown:
    """A value that the interpreter does not know; what is asserted of it is not extracted."""

    def __init__(self, why: str) -> None:
        self.why = why


def parsed(text: Any) -> Any:
    if isinstance(text, Answer):
        return text.calls
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return NOTHING


def joined(parts: list[Any]) -> Any:
    """A text that is collected from parts."""
    if (swallowed := absorbing(*parts)) is not None:
        return swallowed
    return parts[0] if len(parts) == 1 else "".join(parts)


def assign(names: dict[str, Any], name: str, mark: str, value: Any) -> None:
    swallowed = absorbing(value, names[name]) if mark != "=" else None
    added = value if mark in ("=", "+=") or swallowed is not None else -value
    names[name] = swallowed if swallowed is not None else added if mark == "=" else names[name] + added


def absorbing(*values: Any) -> Any:
    """The value that swallows the others, if there is one."""
    return next((one for one in values if isinstance(one, (Unknown, Content))), None)


def negated(mark: str, value: Any) -> Any:
    if isinstance(value, (Unknown, Content)):
        return value
    return -value if mark == "-" else not value


def binary(mark: str, left: Run, right: Run) -> Run:
    order = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}
    sums = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}

    def run(names: dict[str, Any]) -> Any:
        one = left(names)
        if mark in ("&&", "||"):
            if isinstance(one, bool) and one is (mark == "||"):
                return one
            two = right(names)
            unknown = [value for value in (one, two) if isinstance(value, Unknown)]
            return unknown[0] if unknown else one if two is CONTENT else two
        two = right(names)
        if (swallowed := absorbing(one, two)) is not None:
            return swallowed
        if mark in ("==", "!="):
            return negated("!", same(one, two)) if mark == "!=" else same(one, two)
        try:
            return (order.get(mark) or sums[mark])(one, two)
        except TypeError:
            raise NotKnown(mark) from None

    return run


def field(value: Run, name: str) -> Run:
    def run(names: dict[str, Any]) -> Any:
        one = value(names)
        if (swallowed := absorbing(one)) is not None:
            return swallowed
        if one is NOTHING:
            raise Panic(name)
        if isinstance(one, dict) and name in one:
            return one[name]
        raise NotKnown(f".{name}")

    return run


def taken(value: Run, place: int) -> Run:
    def run(names: dict[str, Any]) -> Any:
        one = value(names)
        return one if isinstance(one, (Unknown, Content)) else one[place]

    return run


def indexed(value: Run, place: Run) -> Run:
    def run(names: dict[str, Any]) -> Any:
        one, key = value(names), place(names)
        if (swallowed := absorbing(one, key)) is not None:
            return swallowed
        if isinstance(one, Calls) and isinstance(key, str) and len(one) == 1:
            return one[0].get(key)
        if isinstance(one, list) and isinstance(key, int):
            if key >= len(one):
                raise Panic(f"[{key}]")
            return one[key]
        return one.get(key) if isinstance(one, dict) else None

    return run


def formatted(given: list[Run], constants: dict[str, Run], names: dict[str, Any], name: str) -> Any:
    parts = [one(names) for one in given]
    if any(not isinstance(part, (str, int)) for part in parts):
        raise NotKnown("format")
    if name == "concat":
        return "".join(map(str, parts))
    rest = iter(parts[1:])

    def filled(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        value = names.get(match[1]) if match[1] else next(rest, None)
        value = constants[match[1]]({}) if match[1] in constants else value
        if not isinstance(value, (str, int)):
            raise NotKnown("format")
        return str(value)

    return re.sub(r"\{\{|\}\}|\{(\w*)\}", filled, parts[0])


def method_of(one: Any, name: str, given: list[Any]) -> Any:
    """A method of Rust's strings, lists, options and JSON values."""
    if (swallowed := absorbing(one, *given)) is not None:
        return swallowed
    if name in ("unwrap", "expect"):
        if one is NOTHING:
            raise Panic(name)
        return one
    if name in SAME:
        return one
    if name in ("is_some", "is_ok", "is_none"):
        return (one is NOTHING) == (name == "is_none")
    if name == "is_null":
        return one is None
    if (match := re.fullmatch(r"(as|is)_(\w+)", name)) and match[2] in KINDS:
        fits = isinstance(one, KINDS[match[2]]) and (match[2] in ("bool", "boolean") or not isinstance(one, bool))
        if match[1] == "is":
            return fits
        return (float(one) if match[2] == "f64" else one) if fits else NOTHING
    if name == "unwrap_or":
        return given[0] if one is NOTHING else one
    if one is NOTHING:
        raise Panic(name) if name not in ("map", "and_then") else NotKnown(name)
    return sized(one, name, given)


def sized(one: Any, name: str, given: list[Any]) -> Any:
    """A method of something that has a length."""
    if name in ("len", "count"):
        return len(one.encode()) if isinstance(one, str) and name == "len" else len(list(one))
    if name == "is_empty":
        return not one
    if name == "contains":
        if isinstance(one, JsonText):
            return one.holds(str(given[0]))
        return given[0] in one
    if name == "contains_key":
        return given[0] in one
    if name == "get":
        if not given:
            raise NotKnown(name)
        if isinstance(one, dict):
            return one.get(given[0], NOTHING)
        return one[given[0]] if isinstance(one, list) and given[0] < len(one) else NOTHING
    if name in ("first", "last", "next"):
        return (one[-1 if name == "last" else 0] if one else NOTHING) if isinstance(one, list) else NOTHING
    if isinstance(one, str) and name == "repeat":
        return one * given[0]
    if isinstance(one, str) and name in STRINGS:
        return getattr(str(one), STRINGS[name])(*given)
    if isinstance(one, str) and name == "chars":
        return list(one)
    if isinstance(one, (list, tuple)) and given and callable(given[0]):
        return over(list(one), name, given[0])
    if isinstance(one, list) and name in ("push", "extend"):
        (one.append if name == "push" else one.extend)(given[0])
        return NOTHING
    if isinstance(one, list) and name in ("join", "concat"):
        return (given[0] if given else "").join(one)
    if isinstance(one, list) and name == "enumerate":
        return list(enumerate(one))
    if isinstance(one, dict) and name in ("keys", "values", "insert"):
        return list(getattr(one, name)()) if name != "insert" else one.__setitem__(given[0], given[1])
    if name in ("map", "and_then") and given and callable(given[0]):
        return given[0](one)
    raise NotKnown(f".{name}")


def over(items: list[Any], name: str, function: Callable[..., Any]) -> Any:
    """A method that takes a closure over items."""
    if name == "map":
        return [function(item) for item in items]
    if name not in ("any", "all", "filter", "find", "filter_map", "position"):
        raise NotKnown(name)
    results = [function(item) for item in items]
    if (swallowed := absorbing(*results)) is not None:
        return swallowed
    if name in ("any", "all"):
        return any(results) if name == "any" else all(results)
    if name == "filter_map":
        return [result for result in results if result is not NOTHING]
    kept = [item for item, result in zip(items, results, strict=True) if result]
    return kept if name == "filter" else (kept[0] if kept else NOTHING)
