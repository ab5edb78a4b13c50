"""Outputs and expected calls of OpenVINO model server's tests in C++, by value from their source.

A test gives `parse` the tokens of a text, or builds harmony's tokens one by one, and then states the number of calls,
their names and their arguments. Loops over listed texts are run through. Tests that stream, and those in which the
request has no tools, are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tool_format_cpp import LITERAL, literals, without_comments
from tool_format_fixtures import parsed
from tool_format_output import Output, Wanted, offered, tool_of

FILES = {
    "devstral": "mistral", "gemma4": "gemma", "gptoss": "harmony", "hermes3": "hermes", "lfm25": "lfm2", "lfm2": "lfm2",
    "llama3": "llama", "mistral": "mistral", "phi4": "phi4", "qwen3": "hermes", "qwen3coder": "qwen_xml",
}  # fmt: skip
FOLDER = "src/test/llm/output_parsers"
TEST = re.compile(r"^TEST_F\((\w+), (\w+)\) \{", re.MULTILINE)
TEXT = re.compile(r"std::string (\w+) = ((?:R\"|\").*?|\w+);", re.DOTALL)
LISTED = re.compile(r"std::vector<std::string> (\w+) = \{([^;]*?)\};", re.DOTALL)
LOOP = re.compile(r"for \(\s*(?:const )?auto&? (\w+) : (\w+)\)")
LOOP_HERE = re.compile(r"for \(auto (\w+) : std::vector<(?:std::string|Harmony::TokenID)>\{(.*?)\}\) \{", re.DOTALL)
EVENT = re.compile(
    r"encode\((?P<encoded>\w+)[,)]|parse\(generatedTokens, (?P<offered>true|false)\)"
    r"|generateParsedOutput\((?P<given>\w+)\)"
    r"|(?P<built>Harmony harmony\()|(?P<chunk>parser\.parseChunk\(content\))|(?P<none>ASSERT_FALSE\(callsOpt)"
    r"|(?P<ignored>assertParseIgnoredNoResults)"
    r"|_EQ\([\w.]*?(?:toolCalls|[cC]alls(?:\(\))?)(?:\.size\(\), (?P<size>\d+)"
    r"|\[(?P<place>\d)\]\.(?P<part>name|arguments), (?P<value>(?:R\"|\")))"
)
ADDED = re.compile(r"\.add\((?:Harmony::TokenID::(\w+)|(\w+)|((?:R\"|\").*?))\)\s*(?=\.|;)", re.DOTALL)


def body_of(source: str, start: int) -> str:
    """The text from an opening brace to the one that closes it; braces within literals do not count."""
    depth, position = 0, start
    while position < len(source):
        if literal := LITERAL.match(source, position):
            position = literal.end()
            continue
        depth += (source[position] == "{") - (source[position] == "}")
        position += 1
        if not depth:
            break
    return source[start:position]


def text_at(text: str, position: int, values: dict[str, Any]) -> str:
    """The text of literals and names that begin at a position and are joined."""
    parts: list[str] = []
    gap = re.compile(r"[\s+]*")
    while True:
        found = gap.match(text, position)
        start = found.end() if found else position
        name = re.compile(r"\w+(?=\s*[+;])").match(text, start)
        if literal := LITERAL.match(text, start):
            parts += literals(literal[0])
            position = literal.end()
        elif name and "+" in text[position:start] and isinstance(values.get(name[0]), str):
            parts.append(values[name[0]])
            position = name.end()
        else:
            return "".join(parts)


def environments(body: str) -> Iterator[dict[str, Any]]:
    """The values of a test's names, for each run of its loops."""
    values: dict[str, Any] = {}
    for match in TEXT.finditer(body):
        start = match.start(2)
        values[match[1]] = text_at(body, start, values) if match[2][0] in '"R' else match[2]
    for match in LISTED.finditer(body):
        values[match[1]] = literals(match[2]) if '"' in match[2] else re.findall(r"\w+", match[2])
    loops = [(match[1], values.get(match[2], [])) for match in LOOP.finditer(body) if match[2] in values]
    for match in LOOP_HERE.finditer(body):
        tokens = [f"<|{name.lower()}|>" for name in re.findall(r"TokenID::(\w+)", match[2])]
        loops.append((match[1], tokens or literals(match[2])))
    for chosen in itertools.product(*(items for _, items in loops)):
        yield values | dict(zip((name for name, _ in loops), chosen, strict=True))


def value_of(name: str, values: dict[str, Any]) -> str | None:
    """The text of a name, which may be another name."""
    for _ in range(4):
        if name not in values:
            return None
        found = values[name]
        if not isinstance(found, str):
            return None
        if found not in values:
            return found
        name = found
    return None


def built(body: str, values: dict[str, Any]) -> str | None:
    """The text of tokens that are added one by one."""
    parts = []
    for match in ADDED.finditer(body):
        token, name, literal = match.groups()
        part = f"<|{token.lower()}|>" if token else value_of(name, values) if name else "".join(literals(literal))
        if part is None:
            return None
        parts.append(part)
    return "".join(parts)


def readings(body: str, values: dict[str, Any]) -> Iterator[tuple[str, list[Wanted]]]:
    """(output, expectation) of every output that a test gives a parser and states the calls of."""
    encoded: str | None = None
    text: str | None = None
    wanted: list[Wanted] | None = None
    for match in EVENT.finditer(body):
        fresh: str | None = None
        if match["encoded"]:
            encoded = value_of(match["encoded"], values)
            continue
        if match["offered"] or match["given"] or match["built"] or match["chunk"]:
            if text is not None and wanted is not None:
                yield text, wanted
            wanted = None
            if match["given"]:
                fresh = value_of(match["given"], values)
            elif match["built"]:
                fresh = built(body[body.rfind(".clear()", 0, match.start()) : match.start()], values)
            elif match["chunk"]:
                fresh = value_of("input", values)
            elif match["offered"] == "true":
                fresh = encoded
            text = fresh
        elif match["none"] or match["ignored"]:
            wanted = []
        elif match["size"]:
            wanted = [Wanted() for _ in range(int(match["size"]))]
        elif wanted is not None and int(match["place"]) < len(wanted):
            stated = text_at(body, match.start("value"), values)
            one = wanted[int(match["place"])]
            if match["part"] == "name":
                one.name = stated
            else:
                one.arguments = parsed(stated)
    if text is not None and wanted is not None:
        yield text, wanted


def tools_of(source: str) -> dict[str, list[dict[str, Any]]]:
    """The tools of a file: by JSON schema, and by the type of each parameter (the parser by itself is given these)."""
    by_schema = [
        tool_of(name, schema)
        for name, text in re.findall(r'\{"(\w+)", R"\((\{.*?\})\)"\}', source, re.DOTALL)
        if isinstance(schema := parsed(text), dict)
    ]
    by_type = []
    mapped = re.search(r"toolsParametersTypeMap = \{(.*?)\};", source, re.DOTALL)
    for name, inside in re.findall(
        r'\{"(\w+)", \{((?:\s*\{"\w+", ParameterType::\w+\},?)+)\}\}', mapped[1] if mapped else ""
    ):
        kinds = re.findall(r'"(\w+)", ParameterType::(\w+)', inside)
        by_type.append(tool_of(name, {"properties": {key: {"type": kind.lower()} for key, kind in kinds}}))
    return {"schema": by_schema, "type": by_type}


def ovms_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of all tests, and how many tests that do not stream gave none."""
    found: list[Output] = []
    empty = 0
    for path in sorted((folder / FOLDER).glob("*_output_parser_test.cpp")):
        parser = path.name.removesuffix("_output_parser_test.cpp")
        if parser not in FILES:
            continue
        source = without_comments(path.read_text(encoding="utf-8"))
        tools = tools_of(source)
        for test in TEST.finditer(source):
            if "stream" in (test[1] + test[2]).lower():
                continue
            body = body_of(source, test.end() - 1)
            own = tools["type"] if "toolsParametersTypeMap" in body else tools["schema"]
            before = len(found)
            for values in environments(body):
                for text, wanted in readings(body, values):
                    place = f"{path.name} {test[2]}"
                    found.append(Output("ovms", place, parser, FILES[parser], text, offered(own, wanted), wanted))
            empty += len(found) == before
    return found, empty
