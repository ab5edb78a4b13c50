"""Tests in Rust run against our readers, for tool_formats.py: a small interpreter of the tests' own source.

A test function runs statement by statement. Where it calls a parser, our reader reads the output, and the test's own
assertions judge the calls. Statements about content say nothing here. An assertion that the interpreter cannot evaluate
makes its output "not extracted", never right or wrong. An assertion belongs to the output that was read last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tool_format_rust_values import (
    NOTHING,
    Content,
    JsonText,
    NotKnown,
    Panic,
    Run,
    Unknown,
    absorbing,
    assign,
    binary,
    field,
    formatted,
    indexed,
    joined,
    method_of,
    negated,
    not_known,
    parsed,
    same,
    taken,
)

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)|(?P<raw>r(?P<hash>\#*)"(?:.*?)"(?P=hash))|(?P<text>b?"(?:[^"\\]|\\.)*")"""
    r"""|(?P<char>'(?:[^'\\\n]|\\(?:u\{\w+\}|x\w\w|.))')|(?P<life>'\w+)|(?P<number>\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?\w*)"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<mark>::|->|=>|==|!=|<=|>=|&&|\|\||\+=|-=|\.\.=|\.\.|.)""",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(\n\s*|u\{(\w+)\}|x(\w\w)|.)", re.DOTALL)
PLAIN = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}
LEVELS = [("||",), ("&&",), ("==", "!=", "<", ">", "<=", ">="), ("+", "-"), ("*", "/", "%")]


def text_of(kind: str, token: str) -> str:
    """The value of a string or character literal."""
    if kind == "raw":
        return token[token.index('"') + 1 : token.rindex('"')]
    return ESCAPE.sub(escaped, token[token.index(token[-1]) + 1 : -1])


def escaped(match: re.Match[str]) -> str:
    if code := match[2] or match[3]:
        return chr(int(code, 16))
    return "" if match[1].startswith("\n") else PLAIN.get(match[1], match[0])


class Source:
    """The functions of a Rust file, as Python functions of their names."""

    def __init__(self, text: str, called: Callable[..., Any]) -> None:
        found = [(m.lastgroup or "", m[0], m.start()) for m in TOKEN.finditer(text)]
        self.tokens = [("raw" if kind == "hash" else kind, *rest) for kind, *rest in found if kind != "skip"]
        self.at = 0
        self.called = called
        self.functions: dict[str, tuple[list[Any], Run]] = {}
        self.constants: dict[str, Any] = {}
        self.tests: list[tuple[str, int, list[list[Run]]]] = []
        self.broken: list[str] = []

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place][1] if place < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        text = self.peek()
        if not text or (expected and text != expected):
            raise NotKnown(f"{expected} is missing at {text}")
        self.at += 1
        return text

    def took(self, *marks: str) -> bool:
        if self.kind() in ("mark", "name") and self.peek() in marks:
            self.at += 1
            return True
        return False

    def skip(self) -> None:
        """Pass over a bracket and what is within it."""
        depth = 0
        while True:
            bracket = self.kind() == "mark"
            token = self.take()
            depth += bracket * ((token in "({[") - (token in ")}]"))
            if not depth:
                return

    def skip_type(self, *ends: str) -> None:
        depth = 0
        while depth > 0 or self.peek() not in ends:
            token = self.take()
            depth += (token in ("<", "(", "[")) - (token in (">", ")", "]"))

    def read_file(self) -> None:
        """Find every function and constant of the file."""
        attributes: list[str] = []
        cases: list[list[Run]] = []
        while self.at < len(self.tokens):
            start = self.at
            try:
                if self.peek() == "#" and self.peek(1) == "[":
                    attributes.append(self.peek(2) + self.peek(3) + self.peek(4))
                    if self.peek(2) == "case" and self.peek(3) == "(":
                        self.at += 4
                        cases.append(self.listed(")"))
                        self.take("]")
                    else:
                        self.at += 1
                        self.skip()
                elif self.took("const", "static") and self.kind() == "name":
                    name = self.take()
                    self.skip_type("=")
                    self.take("=")
                    self.constants[name] = self.expression()
                elif self.took("fn"):
                    name, place = self.take(), self.tokens[start][2]
                    try:
                        self.function(name)
                        if any(re.search(r"test", one) for one in attributes):
                            self.tests.append((name, place, cases))
                    except NotKnown:
                        self.broken.append(name)
                        raise
                    attributes, cases = [], []
                elif self.peek() in ("async", "pub", "mod", "struct", "use"):
                    self.at += 1
                else:
                    self.at += 1
            except (NotKnown, IndexError):
                self.at = start + 1
                attributes, cases = [], []

    def function(self, name: str) -> None:
        if self.peek() == "<":
            self.skip_type("(")
        self.take("(")
        patterns = []
        while not self.took(")"):
            while self.took("#"):
                self.skip()
            patterns.append(self.pattern())
            if self.took(":"):
                self.skip_type(",", ")")
            self.took(",")
        if self.took("->"):
            self.skip_type("{")
        self.functions[name] = (patterns, self.block())

    def block(self) -> Run:
        self.take("{")
        statements: list[Run] = []
        last: Run | None = None
        while not self.took("}"):
            if last is not None:
                statements.append(last)
                last = None
            if self.took(";"):
                continue
            if self.peek() == "#":
                self.take()
                self.skip()
                continue
            if self.took("use"):
                while self.take() != ";":
                    pass
                continue
            statement = self.statement()
            if self.took(";"):
                statements.append(statement)
            else:
                last = statement

        def run(names: dict[str, Any]) -> Any:
            for one in statements:
                one(names)
            return last(names) if last is not None else NOTHING

        return run

    def statement(self) -> Run:
        if self.took("let"):
            pattern = self.pattern()
            text = self.peek() == ":" and self.peek(1) == "String"
            if self.took(":"):
                self.skip_type("=", ";")
            if not self.took("="):
                return lambda names: None
            value = self.expression()
            if self.took("else"):
                self.block()

            def bind(names: dict[str, Any]) -> None:
                try:
                    found = value(names)
                    pattern(joined(found) if text and isinstance(found, list) else found, names)
                except NotKnown as why:
                    pattern(Unknown(str(why)), names)

            return bind
        if self.took("for"):
            return self.loop()
        if self.peek() in ("while", "loop", "return", "fn", "const", "struct"):
            raise NotKnown(self.peek())
        left = self.at
        value = self.expression()
        if self.peek() in ("=", "+=", "-="):
            name, mark = self.tokens[left][1], self.take()
            if self.at - left != 2:
                raise NotKnown("assignment to a place")
            new = self.expression()
            return lambda names: assign(names, name, mark, new(names))
        return value

    def loop(self) -> Run:
        pattern = self.pattern()
        self.take("in")
        items = self.expression(struct=False)
        if self.took("..", "..="):
            more, start, stop = self.peek(-1) == "..=", items, self.expression(struct=False)
            items = lambda names: list(range(start(names), stop(names) + more))
        body = self.block()

        def run(names: dict[str, Any]) -> None:
            values = items(names)
            if isinstance(values, (Content, Unknown)):
                raise NotKnown("loop")
            values = list(values.items()) if isinstance(values, dict) else list(values)
            for number, item in enumerate(values):
                outer = names.get(" last")
                names[" last"] = number == len(values) - 1 and outer in (None, True)
                pattern(item, names)
                body(names)
                names[" last"] = outer

        return run

    def pattern(self) -> Callable[[Any, dict[str, Any]], bool]:
        while self.took("&", "mut", "ref"):
            pass
        if self.kind() in ("text", "raw", "number"):
            wanted = self.primary(True)
            return lambda value, names: bool(same(value, wanted(names)))
        if self.took("("):
            parts = []
            while not self.took(")"):
                parts.append(self.pattern())
                self.took(",")

            def unpack(value: Any, names: dict[str, Any]) -> bool:
                given = [value] * len(parts) if isinstance(value, (Content, Unknown)) else list(value)
                hits = [part(one, names) for part, one in zip(parts, given, strict=True)]
                return all(hits)

            return unpack
        name = self.take()
        if name in ("Some", "Ok") and self.took("("):
            inner = self.pattern()
            self.take(")")
            return lambda value, names: value is not NOTHING and inner(value, names)
        if name in ("None", "Err"):
            if self.peek() == "(":
                self.skip()
            return lambda value, names: value is NOTHING
        if not re.fullmatch(r"[a-z_]\w*", name) or self.peek() in ("::", "{", "("):
            raise NotKnown(f"pattern {name}")
        return lambda value, names: names.__setitem__(name, value) is None

    def expression(self, level: int = 0, struct: bool = True) -> Run:
        if level == len(LEVELS):
            return self.unary(struct)
        left = self.expression(level + 1, struct)
        while self.kind() == "mark" and self.peek() in LEVELS[level]:
            left = binary(self.take(), left, self.expression(level + 1, struct))
        return left

    def unary(self, struct: bool) -> Run:
        if self.took("&", "*"):
            self.took("mut")
            return self.unary(struct)
        if self.took("&&"):
            return self.unary(struct)
        if self.took("!", "-"):
            mark, inner = self.peek(-1), self.unary(struct)
            return lambda names: negated(mark, inner(names))
        value = self.postfix(self.primary(struct), self.at - 1)
        while self.took("as"):
            self.skip_type(";", ",", ")", "]", "}", "{", "=", "+", "-", "*", "<", ">", "==", "!=", "<=", ">=", "&&")
        return value

    def postfix(self, value: Run, start: int) -> Run:
        root = self.tokens[start][1] if self.tokens[start][0] == "name" else ""
        while True:
            if self.took("."):
                name = self.take()
                if name == "await":
                    continue
                if self.peek() == "::":
                    self.take()
                    self.skip_type("(")
                if self.took("("):
                    given = self.listed(")")
                    value = self.method(value, name, given, root)
                elif name.isdigit():
                    value = taken(value, int(name))
                else:
                    value = field(value, name)
                root = ""
            elif self.took("?"):
                pass
            elif self.took("["):
                place = not_known("slice") if self.peek() == ".." else self.expression()
                if self.took("..", "..="):
                    place = not_known("slice")
                    if self.peek() != "]":
                        self.expression()
                self.take("]")
                value = indexed(value, place)
            else:
                return value

    def listed(self, end: str) -> list[Run]:
        items = []
        while not self.took(end):
            items.append(self.expression())
            if self.peek() not in (",", end):
                raise NotKnown(self.peek())
            self.took(",")
        return items

    def method(self, value: Run, name: str, given: list[Run], root: str) -> Run:
        def run(names: dict[str, Any]) -> Any:
            one = value(names)
            if name in ("push_str", "push") and root and isinstance(one, str):
                more = given[0](names)
                names[root] = more if absorbing(more) is not None else one + str(more)
                return NOTHING
            if name == "expect" or (name == "unwrap" and not given):
                given_here: list[Any] = []
            else:
                given_here = [item(names) for item in given]
            found = self.called("." + name, [one, *given_here], names)
            return found if found is not None else method_of(one, name, given_here)

        return run

    def primary(self, struct: bool) -> Run:
        kind, token = self.kind(), self.take()
        if kind in ("raw", "text", "char"):
            text = text_of(kind, token)
            return lambda names: text
        if kind == "number":
            number = json.loads(re.sub(r"(?:[iuf](?:8|16|32|64|128|size))$", "", token).replace("_", ""))
            return lambda names: number
        if token == "(":
            items = []
            single = True
            while not self.took(")"):
                items.append(self.expression())
                single = not self.took(",") and single
            if single and len(items) == 1:
                return items[0]
            return lambda names: tuple(item(names) for item in items)
        if token == "[":
            items = self.listed("]")
            return lambda names: [item(names) for item in items]
        if token == "{":
            self.at -= 1
            return self.block()
        if token in ("|", "||", "move"):
            return self.closure(token)
        if token == "if":
            return self.condition()
        if token == "match":
            self.expression(struct=False)
            self.skip()
            return not_known("match")
        if kind != "name" or token in ("async", "unsafe"):
            raise NotKnown(token)
        return self.path(token, struct)

    def closure(self, token: str) -> Run:
        if token == "move":
            token = self.take()
        patterns = []
        while token == "|" and not self.took("|"):
            patterns.append(self.pattern())
            if self.took(":"):
                self.skip_type(",", "|")
            self.took(",")
        body = self.expression()

        def make(names: dict[str, Any]) -> Any:
            def call(*given: Any) -> Any:
                inner = dict(names)
                for pattern, one in zip(patterns, given, strict=True):
                    pattern(one, inner)
                return body(inner)

            return call

        return make

    def condition(self) -> Run:
        pattern = None
        if self.took("let"):
            pattern = self.pattern()
            self.take("=")
        test = self.expression(struct=False)
        then = self.block()
        other: Run = lambda names: NOTHING
        if self.took("else"):
            other = self.condition() if self.took("if") else self.block()

        def run(names: dict[str, Any]) -> Any:
            value = test(names)
            if isinstance(value, Unknown):
                raise NotKnown("condition")
            if isinstance(value, Content):
                return NOTHING if pattern is None else pattern(value, names) and then(names)
            hit = pattern(value, names) if pattern is not None else value
            return then(names) if hit else other(names)

        return run

    def path(self, name: str, struct: bool) -> Run:
        while self.took("::"):
            if self.peek() == "<":
                self.skip_type("::", "(")
            else:
                name += "::" + self.take()
        last = name.split("::")[-1]
        if self.peek() == "!" and self.peek(1) in ("(", "[", "{"):
            self.take()
            return self.macro(last)
        if self.took("("):
            given = self.listed(")")
            return lambda names: self.call(name, [one(names) for one in given], names)
        if struct and self.peek() == "{" and last[0].isupper():
            return self.literal(last)
        if name in ("true", "false"):
            return lambda names: name == "true"
        if last == "None":
            return lambda names: NOTHING
        if last == "Null":
            return lambda names: None

        def look(names: dict[str, Any]) -> Any:
            if name in names:
                return names[name]
            if name in self.constants:
                return self.constants[name]({})
            found = self.called(name, [], names)
            if found is None:
                raise NotKnown(name)
            return found

        return look

    def literal(self, kind: str) -> Run:
        self.take("{")
        fields: dict[str, Run] = {}
        while not self.took("}"):
            if self.took(".."):
                self.expression()
            else:
                key = self.take()
                fields[key] = self.expression() if self.took(":") else self.variable(key)
            self.took(",")

        def make(names: dict[str, Any]) -> dict[str, Any]:
            made: dict[str, Any] = {"": kind}
            for key, value in fields.items():
                try:
                    made[key] = value(names)
                except NotKnown as why:
                    made[key] = Unknown(str(why))
            return made

        return make

    def variable(self, name: str) -> Run:
        return lambda names: names[name] if name in names else Unknown(name)

    def macro(self, name: str) -> Run:
        if name == "json":
            self.take()
            value = self.json_value()
            self.at += 1
            return value
        end = {"(": ")", "[": "]", "{": "}"}[self.take()]
        if name in ("println", "eprintln", "print", "panic", "matches"):
            self.at -= 1
            self.skip()
            if name in ("panic", "matches"):
                return lambda names: self.called("assert", [Unknown(name)], names)
            return lambda names: NOTHING
        given = self.listed(end)
        if name == "vec":
            return lambda names: [one(names) for one in given]
        if name in ("format", "concat"):
            return lambda names: formatted(given, self.constants, names, name)
        if name not in ("assert", "assert_eq", "assert_ne"):
            raise NotKnown(name)
        return lambda names: self.asserted(name, given, names)

    def asserted(self, name: str, given: list[Run], names: dict[str, Any]) -> Any:
        try:
            if name == "assert":
                held = given[0](names)
            else:
                held = same(given[0](names), given[1](names))
                held = negated("!", held) if name == "assert_ne" else held
        except NotKnown as why:
            held = Unknown(str(why))
        except Panic:
            held = False
        self.called("assert", [held], names)
        return NOTHING

    def json_value(self) -> Run:
        if self.took("{"):
            pairs = []
            while not self.took("}"):
                key = self.expression()
                self.take(":")
                pairs.append((key, self.json_value()))
                self.took(",")
            return lambda names: {key(names): value(names) for key, value in pairs}
        if self.took("["):
            items = []
            while not self.took("]"):
                items.append(self.json_value())
                self.took(",")
            return lambda names: [item(names) for item in items]
        if self.took("null"):
            return lambda names: None
        return self.expression()

    def call(self, name: str, given: list[Any], names: dict[str, Any]) -> Any:
        if name in names and callable(names[name]):
            return names[name](*given)
        found = self.called(name, given, names)
        if found is not None:
            return found
        last = name.split("::")[-1]
        if last in self.functions and name == name.lower():
            patterns, body = self.functions[last]
            inner = {key: value for key, value in names.items() if key.startswith(" ")}
            for pattern, one in zip(patterns, given, strict=True):
                pattern(one, inner)
            return body(inner)
        if last in ("Some", "Ok", "from", "String", "Box", "from_value", "to_value", "Number", "Bool") and given:
            return given[0]
        if last in ("new", "with_capacity") and name.split("::")[0] in ("String", "Vec", "HashMap"):
            return {"String": "", "Vec": [], "HashMap": {}}[name.split("::")[0]]
        if last == "from_str":
            return parsed(given[0])
        if last == "to_string" and name.startswith("serde_json"):
            return JsonText(json.dumps(given[0], ensure_ascii=False, separators=(",", ":")))
        raise NotKnown(name)
