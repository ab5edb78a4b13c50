"""Outputs and expected calls of LocalAI's tests in Go (Ginkgo), by value from their source.

A test binds `input`, gives it to a parser, and states the number of calls, their names and their arguments. The format
is that of the preset which the test names, or else of the marks in the output. Partial parsing is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from tool_format_fixtures import parsed
from tool_format_go import NotKnown, Source
from tool_format_output import Output, Wanted, offered

FILES = ("parse_test.go", "parse_lfm2_test.go", "parse_glm_9722_test.go", "peg_integration_test.go")
PRESETS = {
    "qwen3-coder": "qwen_xml", "glm-4.5": "glm", "minimax-m2": "minimax", "kimi-k2": "kimi_k2", "seed-oss": "seed_oss",
    "deepseek-v3.1": "deepseek", "nemotron-v2": "nemotron", "apriel-1.5": "jamba", "xiaomi-mimo": "hermes",
}  # fmt: skip
MARKS = (
    ("<seed:tool_call>", "seed_oss"), ("<minimax:tool_call>", "minimax"), ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek"), ("<|tool_call_start|>", "lfm2"), ("<arg_key>", "glm"),
    ("<TOOLCALL>", "nemotron"), ("<tool_calls>", "jamba"), ("[TOOL_CALLS]", "mistral"), ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
)  # fmt: skip
TEST = re.compile(r'\bIt\("((?:[^"\\]|\\.)*)", func\(\) \{')
READ = re.compile(r"results, err :?= (\w+)\(input|results :?= (\w+)\(input")
PARTIAL = re.compile(r"\(input, [^)\n]*(?:\([^)]*\))?, true\)|Partial|NewChatMsgParser|ReplaceFunctionResults")
SIZE = re.compile(r"Expect\(results\)\.To\((?:HaveLen\((\d+)\)|(BeEmpty\(\)))")
STATED = re.compile(r"Expect\(results\[(\d)\]\.(Name|Arguments)\)\.To\((Equal|ContainSubstring)\(")


def localai_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of all tests that give `input` to a parser, and how many of these tests say too little."""
    found: list[Output] = []
    empty = 0
    for name in FILES:
        source = (folder / "pkg" / "functions" / name).read_text(encoding="utf-8")
        starts = [*TEST.finditer(source)]
        for place, start in enumerate(starts):
            body = source[start.end() : starts[place + 1].start() if place + 1 < len(starts) else len(source)]
            if not READ.search(body) or PARTIAL.search(body):
                continue
            output = output_of(f"{name} {start[1]}", body)
            empty += output is None
            found += [output] if output is not None else []
    return found, empty


def output_of(test: str, body: str) -> Output | None:
    """The output of a test; None if it does not state the number of calls, or the format is not ours."""
    bound = re.search(r"input := ", body)
    size = SIZE.search(body)
    if bound is None or size is None or len(READ.findall(body)) != 1:
        return None
    try:
        text = Source(body[bound.end() :]).value()
    except (NotKnown, ValueError, IndexError):
        return None
    wanted = [Wanted() for _ in range(int(size[1] or 0))]
    for stated in STATED.finditer(body):
        try:
            value = Source(body[stated.end() :]).value()
        except (NotKnown, ValueError, IndexError):
            return None
        if int(stated[1]) >= len(wanted):
            return None
        one = wanted[int(stated[1])]
        if stated[2] == "Name":
            one.name = value
        elif stated[3] == "Equal":
            one.arguments = parsed(value)
        else:
            one.parts += (value,)
    preset = re.search(r'(?:GetXMLFormatPreset\(|XMLFormatPreset:\s*)"([^"]+)"', body)
    kind = PRESETS.get(preset[1]) if preset else next((kind for mark, kind in MARKS if mark in text), None)
    if kind is None or any(not one.name for one in wanted):
        return None
    return Output("localai", test, preset[1] if preset else "auto", kind, text, offered([], wanted), wanted)
