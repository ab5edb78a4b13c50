"""Outputs and expected calls of llama.cpp's tests/test-chat.cpp, by value from its source, for tool_formats.py."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

from turnwise.messages import ToolSpec
from turnwise.rollout.render.renderer import Renderer

LITERAL = re.compile(r'R"([^()\s]*)\((.*?)\)\1"|"((?:[^"\\\n]|\\.)*)"', re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "'": "'"}
COMMENT = re.compile(r"//[^\n]*")
TESTER = re.compile(r'peg_tester\s*\(\s*(?:"([^"]+)"|(\w+)\s*,)')
TEXT = re.compile(r"const std::string (\w+)\s*=\s*(?=\"|R\")")
DEFINED = re.compile(r"const common_chat_msg (\w+)\s*=\s*(.*?);", re.DOTALL)
TOOL = re.compile(r"static common_chat_tool (\w+)\s*\{(.*?)\n\};", re.DOTALL)
MAKERS = {
    "simple_assist_msg": (2, 3),
    "message_with_tool_calls_and_reasoning": (0, 1),
    "message_with_tool_calls": (0, 1),
    "message_with_content_and_tool_call": (1, 2),
    "message_with_reasoning_and_tool_call": (1, 2),
}
"""Places of the name and of the arguments of a call."""


def literals(text: str) -> list[str]:
    """The string literals of a piece of C++, neighbours joined."""
    found: list[str] = []
    end = -1
    for match in LITERAL.finditer(text):
        raw = match[2] is not None
        value = match[2] if raw else re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), match[3])
        if found and not text[end : match.start()].strip(" \n\t+"):
            found[-1] += value
        else:
            found.append(value)
        end = match.end()
    return found


def without_comments(source: str) -> str:
    """The source without comments, whose quotes are no literals."""
    kept, position = [], 0
    while position < len(source):
        if match := LITERAL.match(source, position):
            kept.append(match[0])
        elif not (match := COMMENT.match(source, position)):
            kept.append(source[position])
        position = match.end() if match else position + 1
    return "".join(kept)


def spelled(expression: str, texts: list[tuple[int, str, str]], place: int) -> str:
    """An expression with the literals of the named texts that are defined before it."""
    names = {name: value for start, name, value in texts if start < place}
    parts, position = [], 0
    for match in LITERAL.finditer(expression):
        parts += [named(expression[position : match.start()], names), match[0]]
        position = match.end()
    return "".join([*parts, named(expression[position:], names)])


def named(code: str, names: dict[str, str]) -> str:
    return re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), code)


def templates_of(source: str, place: re.Match[str]) -> list[str]:
    """The templates of a tester: its own, or those that a loop goes through."""
    if place[1]:
        return [place[1]]
    start = source.rfind("for (", 0, place.start())
    head = source[start : source.find(")", start)] if start >= 0 and place.start() - start < 600 else ""
    return [path for path in literals(head.replace(",", " ; ")) if path.endswith(".jinja")]


def argument(text: str, start: int) -> str:
    """The text within the bracket that opens at `start`."""
    depth, position = 0, start
    while position < len(text):
        if match := LITERAL.match(text, position):
            position = match.end()
            continue
        depth += (text[position] in "({") - (text[position] in ")}")
        position += 1
        if not depth:
            return text[start + 1 : position - 1]
    return ""


def calls_of(expected: str, known: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """The calls of an expected message; None if the source is not of a form that this knows."""
    name = expected.strip()
    if name in known:
        return list(known[name])
    for maker, (place, values) in MAKERS.items():
        if name.startswith(f"{maker}("):
            given = literals(name)
            if len(given) <= place or not given[place]:
                return []
            return [(given[place], parsed(given[values] if len(given) > values else "{}"))]
    return None


def parsed(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return text


def listed(expected: str) -> list[tuple[str, Any]]:
    """Calls of .expect_tool_calls({ { name, arguments, id }, ... })."""
    found = []
    inside = argument(expected, expected.index("{"))
    position = inside.find("{")
    while position >= 0:
        item = argument(inside, position)
        given = literals(item)
        if given:
            found.append((given[0], parsed(given[1] if len(given) > 1 else "{}")))
        position = inside.find("{", position + len(item) + 2)
    return found


def cases(source: str) -> list[dict[str, Any]]:
    source = without_comments(source)
    texts = [(m.start(), m[1], source[m.end() : source.index(";\n", m.end())]) for m in TEXT.finditer(source)]
    known: dict[str, Any] = {}
    for name, value in DEFINED.findall(source):
        if (calls := calls_of(value, known)) is not None:
            known[name] = calls
    tools = {name: literals(body) for name, body in TOOL.findall(source)}
    found = []
    marks = sorted([(m.start(), templates_of(source, m)) for m in TESTER.finditer(source)])
    for match in re.finditer(r"\btst\.test\s*\(", source):
        templates = next((names for place, names in reversed(marks) if place < match.start()), [])
        end = re.compile(r"\.\s*run\(\)").search(source, match.start())
        chain = source[match.start() : end.start() if end else len(source)]
        if "is_partial(true)" in chain:
            continue
        output = literals(spelled(argument(source, match.end() - 1), texts, match.start()))
        wanted: list[tuple[str, Any]] | None = None
        if place := re.search(r"\.\s*expect_tool_calls\s*\(", chain):
            wanted = listed(argument(chain, place.end() - 1))
        elif place := re.search(r"\.\s*expect\s*\(", chain):
            wanted = calls_of(argument(chain, place.end() - 1), known)
        elif re.search(r"\.\s*expect_(?:content|reasoning)", chain):
            wanted = []
        offered = re.search(r"\.\s*tools\s*\(\s*\{([^}]*)\}", chain)
        names = [name.strip() for name in offered[1].split(",")] if offered else []
        if output and wanted is not None:
            line = source.count("\n", 0, match.start()) + 1
            specs = [spec(tools[name]) for name in names if name in tools]
            case = {"text": output[0], "wanted": wanted, "tools": specs, "line": line}
            found += [{**case, "template": template} for template in templates]
    return found


def spec(given: list[str]) -> ToolSpec:
    schema = parsed(given[-1]) if len(given) > 2 else {}
    fit = isinstance(schema, dict) and schema.get("type") == "object"
    return ToolSpec(given[0], "", schema if fit else {"type": "object", "properties": {}})


def llama_cpp_outcomes(folder: Path) -> list[dict[str, str]]:
    """The outcome of every whole output for a template whose calls are in one of our formats."""
    make = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "make_templates.py"))
    renderers: dict[str, Renderer | None] = {}
    found = []
    for case in cases((folder / "tests" / "test-chat.cpp").read_text(encoding="utf-8")):
        name = case["template"]
        if name not in renderers:
            renderers[name] = None
            if (folder / name).exists():
                source = (folder / name).read_text(encoding="utf-8")
                try:
                    made = Renderer(make["tokenizer_for"](source, 0), tools="auto")
                    renderers[name] = made if made.template.form.calls != "content" else None
                except ValueError:
                    pass
        renderer = renderers[name]
        if renderer is None or renderer.template.format is None:
            continue
        read = renderer.template.format.parse(case["text"], case["tools"])
        calls = [(call.name, dict(call.arguments)) for call in read.calls]
        offered = [pair for pair, call in zip(calls, read.calls, strict=True) if not call.fault]
        broken = any(not isinstance(arguments, dict) for _, arguments in case["wanted"])
        right = bool(read.faults) if broken else case["wanted"] in (calls, offered)
        found.append(
            {
                "format": renderer.template.tools,
                "test": f"test-chat.cpp:{case['line']}",
                "outcome": "right" if right else "wrong",
                "refused": "yes" if offered != calls else "",
                "why": f"{calls} != {case['wanted']} | fault: {'; '.join(read.faults)} | {case['text']!r}",
            }
        )
    return found
