"""Outputs and expected calls of mlx-swift-lm's ToolTests.swift, by value from its source.

A test gives a parser a whole text, or a processor pieces of one, which are joined, and then states the number of calls,
names and single arguments. Where a parser is given the inside of a block, the tags of that parser are put around it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tool_format_output import Output, Wanted, offered, tool_of

FILE = "Tests/MLXLMTests/ToolTests.swift"
PARSERS = {
    "JSONToolCallParser": "hermes", "PythonicToolCallParser": "lfm2", "XMLFunctionParser": "qwen_xml",
    "Qwen35ToolCallParser": "qwen_xml", "GLM4ToolCallParser": "glm", "GemmaFunctionParser": "gemma",
    "KimiK2ToolCallParser": "kimi_k2", "MiniMaxM2ToolCallParser": "minimax", "Llama3ToolCallParser": "llama",
    "MistralToolCallParser": "mistral", ".json": "hermes", ".lfm2": "lfm2", ".xmlFunction": "qwen_xml",
    ".qwen35": "qwen_xml", ".glm4": "glm", ".gemma4": "gemma", ".gemma": "functiongemma", ".kimiK2": "kimi_k2",
    ".minimaxM2": "minimax", ".mistral": "mistral", ".llama3": "llama",
}  # fmt: skip
TAGS = {"qwen_xml": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]", "")}
PLAIN = re.compile(r'"""\n(.*?)"""|"((?:[^"\\\n]|\\.)*)"', re.DOTALL)
HASHED = re.compile(r'#"""\n(.*?)"""#|#"(.*?)"#', re.DOTALL)
FUNCTION = re.compile(r"^    func (\w+)\(", re.MULTILINE)


class NotKnown(Exception):
    """An expression that is no literal."""


class Values:
    """Reads Swift literals: strings, numbers, lists, dictionaries and the cases of a JSON value."""

    def __init__(self, text: str, names: dict[str, Any]) -> None:
        self.text, self.names, self.at = text, names, 0

    def space(self) -> None:
        found = re.compile(r"(?:\s|//[^\n]*\n|as \[[^\]]*\])*").match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, mark: str) -> bool:
        self.space()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def string(self) -> str | None:
        self.space()
        for pattern, escapes in ((HASHED, False), (PLAIN, True)):
            if found := pattern.match(self.text, self.at):
                self.at = found.end()
                lines = found[1]
                value = textwrap.dedent(lines).removesuffix("\n").rstrip(" ") if lines is not None else found[2]
                if lines is not None:
                    value = value.removesuffix("\n")
                return json.loads(f'"{value}"') if escapes and lines is None else value
        return None

    def value(self) -> Any:
        text = self.string()
        if text is not None:
            return text
        if self.take("["):
            return self.items()
        if number := re.compile(r"-?\d[\d_]*(\.\d+)?").match(self.text, self.at):
            self.at = number.end()
            return json.loads(number[0].replace("_", ""))
        word = re.compile(r"(?:Self)?\.?[A-Za-z_]\w*").match(self.text, self.at)
        if word is None:
            raise NotKnown(self.text[self.at : self.at + 30])
        self.at = word.end()
        name = word[0].removeprefix("Self")
        constants = {"true": True, "false": False, "nil": None, ".null": None}
        if name in constants:
            return constants[name]
        if name in (".string", ".int", ".double", ".bool", ".array", ".object") and self.take("("):
            inside = self.value()
            self.take(")")
            return float(inside) if name == ".double" else inside
        if name == "toolSchemas" and self.take("("):
            given = [self.value()]
            while self.take(","):
                given.append(self.value())
            self.take(")")
            return [{"function": {"name": one}} for one in given]
        if name.removeprefix(".") in self.names:
            return self.names[name.removeprefix(".")]
        raise NotKnown(name)

    def items(self) -> Any:
        listed: list[Any] = []
        fields: dict[str, Any] = {}
        if self.take(":"):
            self.take("]")
            return fields
        while not self.take("]"):
            one = self.value()
            if self.take(":"):
                fields[one] = self.value()
            else:
                listed.append(one)
            self.take(",")
            if self.at >= len(self.text):
                raise NotKnown("a list does not end")
        return fields or listed


@dataclass
class Reading:
    """What a test has given so far, and what it has stated of it."""

    parser: str
    format: str
    tools: Any = None
    whole: bool = True
    text: str = ""
    number: int | None = None
    wanted: dict[int, Wanted] = field(default_factory=dict)


EVENT = re.compile(
    r"let (?P<parser>\w+) = (?P<made>\w+(?:Parser|Processor)|ToolCallProcessor)\("
    r"|(?:let|var) (?P<name>\w+)(?:\s*:\s*[^=\n]+)?\s*=\s*(?=[\"#\[]|toolSchemas)"
    r"|for (?P<item>\w+) in (?P<list>\w+) \{"
    r"|(?:let (?P<result>\w+) = )?(?:try #require\()?(?:\w+\.)?(?P<how>parse\(\s*content:|parseEOS\()\s*"
    r"|let (?P<bound>\w+) =\s*(?:try #require\()?processor\.toolCalls(?:\.(?P<first>first)|\[(?P<index>\d)\])"
    r"|processChunk(?:Outputs)?\(\s*"
    r"|#expect\(\s*(?P<who>[\w.]+?(?:\[\d\])?\??)\.(?P<about>function\.name|function\.arguments\.isEmpty"
    r"|function\.arguments\.count|function\.arguments\[\"(?P<key>[^\"]+)\"\]|count|isEmpty)\s*(?P<equal>==)?\s*"
    r"|(?P<nothing>==\s*nil\))"
)


def outputs_of(name: str, body: str, names: dict[str, Any]) -> Iterator[Reading]:
    """The readings of a test, in order; NotKnown if it has something else."""
    names = dict(names)
    current: Reading | None = None
    kind = ("", "", None)
    bound: dict[str, int] = {}
    done: list[Reading] = []
    loop: tuple[str, str] | None = None
    for event in EVENT.finditer(body):
        values = Values(body, names)
        values.at = event.end()
        if event["parser"]:
            kind = made(event["made"], body[event.end() :], names)
            if event["made"] == "ToolCallProcessor":
                current = Reading(*kind, whole=False)
                done.append(current)
                bound = {}
        elif event["name"]:
            try:
                names[event["name"]] = values.value()
            except (NotKnown, ValueError):
                continue
        elif event["item"]:
            loop = (event["item"], event["list"])
        elif event["how"]:
            given = values.value() if not (loop and re.match(rf"{loop[0]}\b", body[event.end() :])) else None
            texts = [given] if given is not None else list(names.get(loop[1], ())) if loop else []
            tools = re.compile(r"[^()]*?tools:\s*").match(body, values.at if given is not None else event.end())
            if tools:
                values.at = tools.end()
                kind = (kind[0], kind[1], values.value())
            refused = re.compile(r"[^()]*\)\s*==\s*nil").match(body, values.at) is not None
            for text in texts:
                current = Reading(*kind, text=text, number=0 if refused else None if "EOS" in event["how"] else 1)
                done.append(current)
            bound = {event["result"]: 0} if event["result"] else {}
        elif event[0].startswith("processChunk") and current is not None and not current.whole:
            if loop and body.startswith(loop[0], event.end()):
                current.text += "".join(names[loop[1]])
            elif body.startswith("String(", event.end()):
                raise NotKnown("pieces that are cut from a text")
            else:
                current.text += values.value()
        elif event["bound"]:
            bound[event["bound"]] = 0 if event["first"] else int(event["index"])
        elif event["about"] and current is not None:
            state(current, event, values, bound)
    yield from done


def state(current: Reading, event: re.Match[str], values: Values, bound: dict[str, int]) -> None:
    """Take one statement of a test."""
    who, about = event["who"], event["about"]
    if about in ("count", "isEmpty"):
        if re.fullmatch(r"processor\.toolCalls|toolCalls\d?", who):
            current.number = 0 if about == "isEmpty" else values.value()
        return
    if who in bound:
        place = bound[who]
    elif index := re.search(r"\[(\d)\]$", who):
        place = int(index[1])
    elif who.endswith("last?"):
        place = -1
    else:
        place = 0
    wanted = current.wanted.setdefault(place, Wanted())
    if about.endswith("isEmpty"):
        wanted.arguments = {}
    elif not event["equal"]:
        return
    elif event["key"]:
        value = values.value()
        if value is not None or values.text[values.at - 5 : values.at] == ".null":
            wanted.some[event["key"]] = value
    elif about.endswith("count"):
        wanted.count = values.value()
    else:
        wanted.name = values.value()


def made(kind: str, rest: str, names: dict[str, Any]) -> tuple[str, str, Any]:
    """(parser, format, tools) of a constructor."""
    inside = rest[: rest.index(")")] if ")" in rest else rest
    tools = None
    if kind == "ToolCallProcessor":
        kind = (re.findall(r"format: (\.\w+)", inside) or [".json"])[0]
        if given := re.search(r"tools:\s*", rest.split("\n        let ")[0].split("\n        #")[0]):
            if rest.startswith("[tool.schema]", given.end()):
                tools = [{"function": {"name": "get_weather"}}]  # the only one that such tests have
            else:
                values = Values(rest, names)
                values.at = given.end()
                tools = values.value()
    tag = re.findall(r'startTag: "([^"]+)"', rest.split("\n        let ")[0])
    name = PARSERS.get(kind)
    if name is None or (kind == "JSONToolCallParser" and tag[:1] != ["<tool_call>"]):
        raise NotKnown(kind)
    if kind == "GemmaFunctionParser" and tag[:1] == ["<start_function_call>"]:
        name = "functiongemma"
    return kind, name, tools


def swift_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of all tests, and how many tests that name calls gave none."""
    source = (folder / FILE).read_text(encoding="utf-8")
    starts = [*FUNCTION.finditer(source)]
    names: dict[str, Any] = {}
    for static in re.finditer(r"static let (\w+): [^=]+= ", source):
        values = Values(source, names)
        values.at = static.end()
        names[static[1]] = values.value()
    found: list[Output] = []
    empty = 0
    for place, start in enumerate(starts):
        body = source[start.end() : starts[place + 1].start() if place + 1 < len(starts) else len(source)]
        try:
            readings = list(outputs_of(start[1], body, names))
        except (NotKnown, ValueError, KeyError, TypeError):
            readings = []
        before = len(found)
        for one in readings:
            if one.number is None or not one.text:
                continue
            wanted = [Wanted() for _ in range(one.number)]
            for at, stated in one.wanted.items():
                if -len(wanted) <= at < len(wanted):
                    wanted[at] = stated
            if any(not stated.name for stated in wanted):
                wanted_names = [stated.name for stated in wanted]
                if not any(wanted_names) and wanted and not any(stated.some for stated in wanted):
                    continue
            before_tag, after_tag = TAGS.get(one.format, ("", ""))
            text = (
                one.text
                if not one.whole or before_tag in one.text.split("[ARGS]")[0]
                else f"{before_tag}{one.text}{after_tag}"
            )
            tools = [tool_of(tool["function"]["name"], tool["function"].get("parameters")) for tool in one.tools or ()]
            found.append(Output("mlx-swift-lm", start[1], one.parser, one.format, text, offered(tools, wanted), wanted))
        empty += len(found) == before and ("toolCall" in body or "parser" in body)
    return found, empty
