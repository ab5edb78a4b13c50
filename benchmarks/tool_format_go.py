"""Outputs and expected calls of ollama's tests in Go, by value from the tables in their source, for tool_formats.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.messages import ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)|(?P<raw>`[^`]*`)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<rune>'(?:[^'\\]|\\.)+')"""
    r"""|(?P<number>\d[\w.]*(?:[eE][+-]\d+)?)|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(?P<mark>:=|.)""",
    re.DOTALL,
)
MARKS = {
    "glm": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma": ("<|tool_call>", "<tool_call|>"),
    "olmo": ("<function_calls>", "</function_calls>"),
}
"""What a parser has taken off when the test is about the inside of a block."""
FILES = {
    "cogito": "deepseek", "deepseek3": "deepseek", "functiongemma": "functiongemma", "gemma4": "gemma", "glm46": "glm",
    "glm47": "glm", "laguna": "glm", "lfm2": "lfm2", "ministral": "mistral", "nemotron3nano": "qwen_xml",
    "olmo3": "olmo", "olmo3_think": "olmo", "qwen35": "qwen_xml", "qwen38": "qwen_xml", "qwen3": "hermes",
    "qwen3coder": "qwen_xml", "qwen3vl_nonthinking": "hermes", "qwen3vl_thinking": "hermes", "cohere": "cohere",
}  # fmt: skip
INSIDE = re.compile(
    r"parseToolCalls?Content|ParseGemma4ToolCall|ToolCallParsing|ParseOlmo3FunctionCalls", re.IGNORECASE
)
WANTED = ("expectedCalls", "expectedToolCalls", "wantToolCall", "want", "expected")


class NotKnown(Exception):
    """An expression that is no literal."""


class Source:
    """The tokens of a Go file, and the values of its names as they are assigned."""

    def __init__(self, text: str) -> None:
        found = [(match.lastgroup or "", match[0], match.start()) for match in TOKEN.finditer(text)]
        self.tokens = [token for token in found if token[0] != "skip"]
        self.names: dict[str, Any] = {"true": True, "false": False, "nil": None}
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place][1] if place < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        text = self.peek()
        if not text or (expected and text != expected):
            raise NotKnown(f"{expected} is missing at {text}")
        self.at += 1
        return text

    def value(self) -> Any:
        left = self.primary()
        while self.peek() == "+":
            self.take()
            left = left + self.primary()
        return left

    def primary(self) -> Any:
        kind, text, _ = self.tokens[self.at]
        if text in ("&", "-"):
            self.take()
            return self.primary() if text == "&" else -self.primary()
        if kind == "raw":
            return self.take()[1:-1]
        if kind == "text":
            return json.loads(re.sub(r"\\x([0-9a-f]{2})", r"\\u00\1", self.take()).replace("\\'", "'"))
        if kind == "number":
            return json.loads(self.take().replace("_", ""))
        if text in ("[", "map", "struct"):
            self.type()
            return self.literal("")
        if kind == "name":
            self.take()
            if self.peek() == "{":
                return self.literal(text)
            if self.peek() == "(":
                return self.called(text)
            if text in self.names:
                return self.names[text]
        raise NotKnown(text)

    def type(self) -> None:
        text = self.take()
        if text == "[":
            if self.peek() != "]":
                self.take()
            self.take("]")
            self.type()
        elif text == "map":
            self.take("[")
            self.type()
            self.take("]")
            self.type()
        elif text == "*":
            self.type()
        elif text in ("struct", "interface"):
            depth = 0
            while True:
                token = self.take()
                depth += (token == "{") - (token == "}")
                if not depth:
                    return

    def literal(self, kind: str) -> Any:
        """A composite literal: a mapping if it has keys, else a list."""
        self.take("{")
        fields: dict[Any, Any] = {"": kind} if kind else {}
        items: list[Any] = []
        keyed = False
        while self.peek() != "}":
            if self.tokens[self.at][0] == "name" and self.peek(1) == ":":
                key: Any = self.take()
            else:
                key = self.literal("") if self.peek() == "{" else self.value()
            if self.peek() == ":":
                self.take()
                keyed = True
                fields[key] = self.literal("") if self.peek() == "{" else self.value()
            else:
                items.append(key)
            if self.peek() == ",":
                self.take()
        self.take("}")
        return fields if keyed else items

    def called(self, name: str) -> Any:
        self.take("(")
        given = []
        while self.peek() != ")":
            given.append(self.value())
            if self.peek() == ",":
                self.take()
        self.take(")")
        if name == "tool":
            return {"Function": {"Name": given[0], "Parameters": {"Properties": given[1]}}}
        if name == "args":
            return json.loads(given[0])
        if len(given) == 1 and (name.startswith("test") or name in ("float64", "int", "int64", "string")):
            return given[0]
        raise NotKnown(name)

    def tables(self) -> Iterator[tuple[str, int, list[Any]]]:
        """(test, position, rows) of every table; names are bound on the way."""
        test = ""
        while self.at < len(self.tokens):
            start = self.at
            if self.peek() == "func" and self.peek(1).startswith("Test"):
                test = self.peek(1)
            name = self.peek() if self.peek(1) in (":=", "=") and self.tokens[start][0] == "name" else ""
            self.at += 2 if name else 0
            is_list = (self.peek(), self.peek(1)) == ("[", "]")
            if not name and not (is_list and self.peek(2) == "struct"):
                self.at = start + 1
                continue
            try:
                if not is_list:
                    self.names[name] = self.value()
                    continue
                self.type()
                rows = list(self.rows())
                self.names[name] = rows
                yield test, self.tokens[start][2], rows
            except (NotKnown, ValueError, TypeError, IndexError):
                self.at = start + 1

    def rows(self) -> Iterator[Any]:
        """The items of a list; one that is no literal is left out."""
        self.take("{")
        while self.peek() != "}":
            start = self.at
            try:
                yield self.literal("") if self.peek() == "{" else self.value()
            except (NotKnown, ValueError, TypeError):
                self.at = start
                self.skip()
            if self.peek() == ",":
                self.take()
        self.take("}")

    def skip(self) -> None:
        """Pass over an item, up to the comma or the bracket after it."""
        depth = 0
        while depth or self.peek() not in (",", "}"):
            token = self.take()
            depth += (token in "({[") - (token in ")}]")


def wanted_calls(row: dict[Any, Any]) -> list[tuple[str, Any]] | None:
    """The calls that a row expects; None if it does not speak of calls."""
    if row.get("expectError") or row.get("wantErr"):
        return []
    named = [row[key] for key in WANTED if key in row]
    if not named:
        return []
    calls = [named[0]] if isinstance(named[0], dict) else named[0] or []
    if not isinstance(calls, list):
        return None
    found = []
    for call in calls:
        function = call.get("Function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "Name" not in function:
            return None
        arguments = function.get("Arguments") or {}
        found.append((function["Name"], arguments if isinstance(arguments, dict) else {}))
    return found


def output_of(row: dict[Any, Any], test: str, name: str) -> str | None:
    """The whole output of a row."""
    if INSIDE.search(test) or "rawToolCall" in row:
        inside = next((row[key] for key in ("rawToolCall", "content", "input") if isinstance(row.get(key), str)), None)
        before, after = MARKS.get(name, ("", ""))
        return None if inside is None else f"{before}{inside}{after}"
    if isinstance(row.get("chunks"), list) and all(isinstance(part, str) for part in row["chunks"]):
        return "".join(row["chunks"])
    return row["input"] if isinstance(row.get("input"), str) else None


def of_steps(row: dict[Any, Any]) -> tuple[str, list[tuple[str, Any]]] | None:
    """(output, calls) of a row of streamed pieces, where its events name calls."""
    steps = row.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return None
    events = [event for step in steps for event in step.get("wantEvents") or []]
    if any(not isinstance(event, dict) or "Raw" in event.get("", "") for event in events):
        return None
    calls = [event for event in events if event[""].endswith("ToolCall")]
    if any("name" not in call or not isinstance(call.get("args", ""), str) for call in calls):
        return None
    return "".join(step["input"] for step in steps), [(call["name"], json.loads(call["args"])) for call in calls]


def specs_of_row(row: dict[Any, Any]) -> list[ToolSpec]:
    found = []
    for tool in row.get("tools") or []:
        function = tool["Function"]
        given = (function.get("Parameters") or {}).get("Properties") or {}
        properties = {key: schema_of(value) for key, value in given.items() if key}
        found.append(ToolSpec(function["Name"], "", {"type": "object", "properties": properties}))
    return found


def schema_of(given: dict[str, Any]) -> dict[str, Any]:
    choices = [schema_of(choice) for choice in given.get("AnyOf") or []]
    return {"anyOf": choices} if choices else {"type": given.get("Type") or []}


def ollama_outcomes(folder: Path) -> list[dict[str, str]]:
    """The outcome of every row that has a whole output and says which calls it holds."""
    found = []
    for path in sorted((folder / "model" / "parsers").glob("*_test.go")):
        name = FILES.get(path.name.removesuffix("_test.go"))
        how = FORMATS.get(name or "")
        if name is None or how is None:
            continue
        text = path.read_text(encoding="utf-8")
        for test, place, rows in Source(text).tables():
            speaks = any(isinstance(row, dict) and set(WANTED) & row.keys() for row in rows)
            for row in rows:
                if not isinstance(row, dict):
                    continue
                streamed = of_steps(row)
                output, wanted = streamed or (output_of(row, test, name), wanted_calls(row) if speaks else None)
                if output is None or wanted is None:
                    continue
                read = how.parse(output, specs_of_row(row))
                calls = [(call.name, dict(call.arguments)) for call in read.calls]
                offered = [pair for pair, call in zip(calls, read.calls, strict=True) if not call.fault]
                about = str(row.get("name") or row.get("desc"))
                found.append(
                    {
                        "format": name,
                        "test": f"{path.name}:{text.count(chr(10), 0, place) + 1} {test} {about}",
                        "outcome": "right" if wanted in (calls, offered) else "wrong",
                        "refused": "yes" if offered != calls else "",
                        "why": f"{calls} != {wanted} | fault: {'; '.join(read.faults)} | {output!r}",
                    }
                )
    return found
