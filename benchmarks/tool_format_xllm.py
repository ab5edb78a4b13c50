"""Outputs and expected calls of xLLM's tests in C++ (googletest), by value from their source.

A test gives `detect_and_parse` a text that it has written out, and then states the number of calls, their names and
values of their arguments. Texts that a loop puts together, and outputs that are streamed, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tool_format_cpp import LITERAL, literals, without_comments
from tool_format_fixtures import parsed
from tool_format_output import Output, Wanted, offered, tool_of
from tool_format_ovms import body_of

FOLDER = "tests/function_call"
FORMATS = {
    "deepseekv3": "deepseek", "deepseekv32": "dsml", "glm45": "glm", "glm47": "glm", "kimik2": "kimi_k2",
    "qwen25": "hermes", "qwen3_coder": "qwen_xml",
}  # fmt: skip
CLASS = re.compile(r"class (\w+) : public ([\w:]+) \{")
TEST = re.compile(r"^TEST_F\((\w+),\s*(\w+)\) \{", re.MULTILINE)
STRUCTURE = re.compile(r"nlohmann::json (\w+) =\s*(?=\{)")
FUNCTION = re.compile(r'JsonFunction(?: \w+)?\(\s*(?=")')
STRING = re.compile(r"std::string (\w+) =\s*")
EVENT = re.compile(
    r"auto (?P<result>\w+) =\s*(?P<detector>\w+)->detect_and_parse\((?P<given>[^;]*), (?P<tools>\w+)\);"
    r"|_EQ\((?P<sized>\w+)\.calls\.size\(\),\s*(?P<size>\d+)U?\)"
    r"|(?:_TRUE\((?P<empty>\w+)\.calls\.empty\(\)|_FALSE\((?P<none>\w+)\.has_calls\(\))\)"
    r"|auto& (?P<call>\w+) = (?P<source>\w+)\.calls\[(?P<place>\d+)\];"
    r"|_EQ\((?P<named>[\w.\[\]]+?)\.name\.value(?:_or)?\([^)]*\),\s*(?=\")(?P<name>)"
    r"|nlohmann::json (?P<values>\w+) =\s*nlohmann::json::parse\(\s*(?P<parsed>[\w.\[\]]+?)\.parameters\);"
    r"|_EQ\((?P<whole>[\w.\[\]]+?)\.parameters,\s*(?=\"|R\")(?P<text>)"
    r"|_(?P<about>EQ|TRUE|FALSE)\(\s*(?P<of>\w+)(?P<path>(?:\[[^\]]*\])*)(?P<method>\.\w+\([^)]*\))?(?P<end>,\s*|\))"
)
KINDS: dict[str, Callable[[Any], bool]] = {
    ".is_string()": lambda value: isinstance(value, str),
    ".is_boolean()": lambda value: isinstance(value, bool),
    ".is_array()": lambda value: isinstance(value, list),
    ".is_object()": lambda value: isinstance(value, dict),
    ".is_number()": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    ".is_number_integer()": lambda value: isinstance(value, int) and not isinstance(value, bool),
    ".is_number_float()": lambda value: isinstance(value, float),
    ".empty()": lambda value: not value,
}
"""What a test asks of a value."""


class NotKnown(ValueError):
    """An expression that is not written out."""


def structure(source: str, position: int) -> tuple[Any, int]:
    """A JSON value as nlohmann writes it, and where it ends: pairs that begin with a text are an object."""
    position = skipped(source, position)
    if source[position] == "{":
        items, position = [], skipped(source, position + 1)
        while source[position] != "}":
            item, position = structure(source, position)
            items.append(item)
            position = skipped(source, position)
        pairs = all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in items)
        return (dict(items) if pairs and items else items), position + 1
    if LITERAL.match(source, position):
        return joined(source, position, {})
    if word := re.compile(r"true|false|-?\d+(?:\.\d+)?").match(source, position):
        return parsed(word[0]), word.end()
    raise NotKnown(source[position : position + 20])


def skipped(source: str, position: int) -> int:
    found = re.compile(r"[\s,]*").match(source, position)
    return found.end() if found else position


def joined(source: str, position: int, texts: dict[str, str]) -> tuple[str, int]:
    """The text of literals and names that begin at a position, and where it ends."""
    parts: list[str] = []
    gap, name = re.compile(r"\s*(\+?)\s*"), re.compile(r"\w+\b(?!\()")
    while True:
        between = gap.match(source, position)
        assert between is not None
        if literal := LITERAL.match(source, between.end()):
            parts += literals(literal[0])
            position = literal.end()
        elif (not parts or between[1]) and (word := name.match(source, between.end())) and word[0] in texts:
            parts.append(texts[word[0]])
            position = word.end()
        elif between[1] or not parts:
            raise NotKnown(source[position : position + 20])
        else:
            return "".join(parts), position


def stated(source: str, position: int, texts: dict[str, str]) -> Any:
    """The value that a test compares with."""
    if word := re.compile(r"(?:true|false|-?\d+(?:\.\d+)?)(?=[\s,)])").match(source, position):
        return parsed(word[0])
    return joined(source, position, texts)[0]


def equal(left: Any, right: Any) -> bool:
    """Equal as nlohmann compares: numbers by value."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def at(arguments: Any, path: list[Any]) -> Any:
    for step in path:
        try:
            arguments = arguments[step]
        except (KeyError, IndexError, TypeError):
            return None
    return arguments


@dataclass
class Read:
    """A text that a test gave to a detector, and what it then states; `calls` is None if it says no number."""

    text: str
    detector: str
    tools: str
    calls: list[Wanted] | None = None


@dataclass
class Names:
    """What the names of a test stand for."""

    texts: dict[str, str] = field(default_factory=dict)
    results: dict[str, Read] = field(default_factory=dict)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)
    values: dict[str, tuple[str, int]] = field(default_factory=dict)

    def call(self, expression: str) -> tuple[str, int] | None:
        if found := re.fullmatch(r"(\w+)\.calls\[(\d+)\]", expression):
            return found[1], int(found[2])
        return self.calls.get(expression)

    def wanted(self, place: tuple[str, int] | None) -> Wanted | None:
        read = self.results.get(place[0]) if place else None
        listed = read.calls if read is not None else None
        return listed[place[1]] if place and listed is not None and place[1] < len(listed) else None


def check_of(match: re.Match[str], body: str, texts: dict[str, str]) -> Callable[[Any], bool] | None:
    """What a statement asks of a value; None if it is not of a form that this knows."""
    method, kind = match["method"] or "", match["about"]
    holds = kind == "TRUE"
    if kind == "EQ" and method in ("", ".size()"):
        value = stated(body, match.end(), texts)
        if method:
            return lambda found: hasattr(found, "__len__") and len(found) == value
        return lambda found: equal(found, value)
    if method in KINDS:
        return lambda found: KINDS[method](found) == holds
    if method.startswith(".contains("):
        key = literals(method)[0]
        return lambda found: isinstance(found, dict) and (key in found) == holds
    if not method and kind != "EQ" and match["path"]:
        return lambda found: found is holds
    return None


def about(match: re.Match[str], body: str, names: Names) -> None:
    """Take what a test states of one value of the arguments."""
    one = names.wanted(names.values.get(match["of"]))
    steps = re.findall(r"\[([^\]]*)\]", match["path"])
    if one is None or not all('"' in step or step.isdigit() for step in steps):
        return
    path = [literals(step)[0] if '"' in step else int(step) for step in steps]
    try:
        check = check_of(match, body, names.texts)
    except NotKnown:
        return
    if check is not None:
        one.checks += (lambda arguments: check(at(arguments, path)),)


def define(match: re.Match[str], body: str, names: Names) -> None:
    """Take a text that a test writes out."""
    names.texts.pop(match[1], None)
    try:
        value, end = joined(body, match.end(), names.texts)
    except NotKnown:
        return
    if body[end] == ";" and not re.search(rf"\b{match[1]}\s*\+=", body):
        names.texts[match[1]] = value


def take(match: re.Match[str], body: str, names: Names) -> None:
    """Take what a test states, or names, of the calls of a result."""
    if sized := match["sized"] or match["empty"] or match["none"]:
        if (found := names.results.get(sized)) is not None and found.calls is None:
            found.calls = [Wanted() for _ in range(int(match["size"] or 0))]
    elif match["call"]:
        names.calls[match["call"]] = (match["source"], int(match["place"]))
    elif match["values"]:
        names.values.pop(match["values"], None)
        if place := names.call(match["parsed"]):
            names.values[match["values"]] = place
    elif match["named"]:
        if (one := names.wanted(names.call(match["named"]))) is not None:
            one.name = stated(body, match.end(), names.texts)
    elif match["whole"]:
        if (one := names.wanted(names.call(match["whole"]))) is not None:
            one.arguments = parsed(stated(body, match.end(), names.texts))
    else:
        about(match, body, names)


def readings(body: str) -> Iterator[Read]:
    """Every text that a test gives to a detector; what it states of the calls is complete at the end."""
    names = Names()
    events = sorted([*STRING.finditer(body), *EVENT.finditer(body)], key=lambda match: match.start())
    for match in events:
        if match.re is STRING:
            define(match, body, names)
        elif match["result"]:
            names.results.pop(match["result"], None)
            try:
                text, _ = joined(match["given"] + ")", 0, names.texts)
            except NotKnown:
                continue
            names.results[match["result"]] = read = Read(text, match["detector"], match["tools"])
            yield read
        else:
            take(match, body, names)


def tools_of(source: str) -> list[dict[str, Any]]:
    """The tools that a piece of source makes."""
    structures = {match[1]: structure(source, match.end())[0] for match in STRUCTURE.finditer(source)}
    found = []
    for match in FUNCTION.finditer(source):
        name, end = joined(source, match.end(), {})
        _, end = joined(source, skipped(source, end), {})
        rest = re.compile(r"\s*(\w+)\)").match(source, skipped(source, end))
        found.append(tool_of(name, structures.get(rest[1] if rest else "")))
    return found


def xllm_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of all tests that do not stream, and how many of these say too little."""
    found: list[Output] = []
    empty = 0
    for path in sorted((folder / FOLDER).glob("*_detector_test.cpp")):
        parser = path.name.removesuffix("_detector_test.cpp")
        source = without_comments(path.read_text(encoding="utf-8"))
        classes = {match[1]: (match[2], body_of(source, match.end() - 1)) for match in CLASS.finditer(source)}
        for test in TEST.finditer(source):
            body = body_of(source, test.end() - 1)
            given = [test[1]]
            while given[-1] in classes and not tools_of(classes[given[-1]][1]):
                given.append(classes[given[-1]][0])
            own = tools_of(classes[given[-1]][1]) if given[-1] in classes else []
            for read in list(readings(body)):
                if read.calls is None:
                    empty += 1
                    continue
                tools = own if read.tools == "tools_" else tools_of(body)
                name = "deepseekv4" if read.detector.startswith("v4") else parser
                place = f"{path.name} {test[2]}"
                tools = offered(tools, read.calls)
                found.append(Output("xllm", place, name, FORMATS[parser], read.text, tools, read.calls))
    return found, empty
