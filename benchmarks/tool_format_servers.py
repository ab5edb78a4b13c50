"""What vLLM's tool parsers and SGLang's detectors make of outputs, for tool_format_agreed.py.

    PYTHON tool_format_servers.py vllm < jobs.json > readings.json
    PYTHON tool_format_servers.py sglang CHECKOUT < jobs.json > readings.json
    PYTHON tool_format_servers.py vllm-mlx CHECKOUT < jobs.json > readings.json

PYTHON is the interpreter of an environment with vLLM. A job is {"parser", "text", "tools"}; a reading is a list of
[name, arguments as text], or {"error"} if the parser raised. The parsers run as they are, on the whole output.

A tokenizer is needed only for its vocabulary, so a stand-in has the marks of all formats as tokens. Of SGLang only the
detectors are imported: the rest of its package is replaced by stand-ins (types of a request, settings, grammars).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "<tool_response>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|tool_call_start|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<minimax:tool_call>", "</minimax:tool_call>",
    "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "<|tool_call>", "<tool_call|>",
    '<|"|>', "<|channel>", "<channel|>", "<start_function_call>", "<end_function_call>", "<escape>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜", "<function_calls>", "</function_calls>",
    "<|tools_prefix|>", "<|tools_suffix|>", "<|action_start|>", "<|action_end|>", "<|plugin|>", "<tool_calls>",
    "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>", "<function_call>", "<|function_call|>", "<|START_ACTION|>",
    "<|END_ACTION|>", "<|open|>", "<|close|>", "<|sep|>", "<|im_end|>", "</s>", "<s>",
)  # fmt: skip


Reads = Callable[[str, str, list[dict[str, Any]]], list[list[str]]]


class Tokenizer:
    """A tokenizer whose tokens are the marks of formats and single characters."""

    bos_token, eos_token, bos_token_id, eos_token_id = "<s>", "</s>", 1_999_998, 1_999_999
    is_fast = True

    def __init__(self, without: str = "") -> None:
        self.all_special_tokens = [mark for mark in MARKS if mark != without]
        self.all_special_ids = [2_000_000 + MARKS.index(mark) for mark in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        return dict(zip(self.all_special_tokens, self.all_special_ids, strict=True))

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def encode(self, text: str, **_: Any) -> list[int]:
        known = self.get_vocab()
        ids, position = [], 0
        while position < len(text):
            mark = next((one for one in MARKS if text.startswith(one, position)), "")
            ids.append(known[mark] if mark else ord(text[position]))
            position += len(mark) or 1
        return ids

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(MARKS[one - 2_000_000] if one >= 2_000_000 else chr(one) for one in ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        known = self.get_vocab()
        return known.get(tokens) if isinstance(tokens, str) else [known.get(one) for one in tokens]


def openai_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"description": "", **tool}} for tool in tools]


def vllm_reader() -> Reads:
    """(parser, output, tools) -> calls, by vLLM."""
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = importlib.import_module("vllm.tool_parsers").ToolParserManager

    def read(name: str, text: str, tools: list[dict[str, Any]]) -> list[list[str]]:
        request = protocol.ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "?"}], tools=openai_tools(tools) or None
        )
        # Models of Mistral that write a list have no [ARGS] in their vocabulary, by which vLLM tells them apart.
        without = "[ARGS]" if re.search(r"\[TOOL_CALLS\]\s*\[", text) else ""
        parser = manager.get_tool_parser(name)(Tokenizer(without), request.tools)
        found = parser.extract_tool_calls(text, request=request)
        return [[call.function.name, call.function.arguments] for call in found.tool_calls or ()]

    return read


# ---------------------------------------------------------------- SGLang


class Settings:
    """The settings of SGLang, off as they are by default, but for one."""

    forwards = False
    """Whether calls to tools that are not offered are handed on. Without any tools SGLang would make no call at all."""

    def __getattr__(self, name: str) -> Any:
        forwards = name == "SGLANG_FORWARD_UNKNOWN_TOOLS" and self.forwards
        return types.SimpleNamespace(get=lambda: forwards)


def stand_in(name: str, **fields: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(fields)
    module.__path__ = []
    sys.modules[name] = module


def sglang_reader(checkout: Path) -> Reads:
    """(parser, output, tools) -> calls, by SGLang."""
    from pydantic import BaseModel

    class Function(BaseModel):
        description: str | None = None
        name: str
        parameters: object | None = None
        strict: bool = False

    class Tool(BaseModel):
        type: str = "function"
        function: Function

    source = checkout / "python" / "sglang"
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        stand_in(name)
    for name in ("sglang.srt.function_call", "sglang.srt.parser"):
        stand_in(name)
        sys.modules[name].__path__ = [str(source.joinpath(*name.split(".")[1:]))]
    names = ("LegacyStructuralTagResponseFormat", "StructuralTagResponseFormat", "StructuresResponseFormat")
    others = {name: type(name, (), {}) for name in (*names, "ToolCallConstraint", "ToolChoice")}
    stand_in("sglang.srt.entrypoints.openai.protocol", Tool=Tool, Function=Function, **others)
    settings = Settings()
    stand_in("sglang.srt.environ", envs=settings, ToolStrictLevel=settings)
    try:
        importlib.import_module("orjson")
    except ImportError:
        stand_in("orjson", loads=json.loads, dumps=lambda value: json.dumps(value).encode(), JSONDecodeError=ValueError)
    made = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser

    def read(name: str, text: str, tools: list[dict[str, Any]]) -> list[list[str]]:
        settings.forwards = not tools
        if name == "gpt-oss" and text.startswith("<|channel|>"):
            text = f"<|start|>assistant{text}"  # which ends the prompt, and which the detector looks for
        detector = made([], name).detector
        if not detector.has_tool_call(text):
            return []
        calls = detector.detect_and_parse(text, [Tool(**tool) for tool in openai_tools(tools)]).calls
        return [[call.name, call.parameters] for call in calls]

    return read


# ---------------------------------------------------------------- vllm-mlx


def vllm_mlx_reader(checkout: Path) -> Reads:
    """(class of a parser, output, tools) -> calls, by vllm-mlx."""
    sys.path.insert(0, str(checkout))
    parsers = importlib.import_module("vllm_mlx.tool_parsers")

    def read(name: str, text: str, tools: list[dict[str, Any]]) -> list[list[str]]:
        found = getattr(parsers, name)(None).extract_tool_calls(text, {"tools": openai_tools(tools)})
        return [[call["name"], call["arguments"]] for call in found.tool_calls]

    return read


def main() -> None:
    which, *rest = sys.argv[1:]
    if which == "vllm":
        read = vllm_reader()
    else:
        read = (sglang_reader if which == "sglang" else vllm_mlx_reader)(Path(rest[0]))
    readings: list[Any] = []
    for job in json.load(sys.stdin):
        try:
            readings.append(read(job["parser"], job["text"], job["tools"]))
        except Exception as error:  # a parser that raises makes no reading
            readings.append({"error": f"{type(error).__name__}: {error}"[:300]})
    json.dump(readings, sys.__stdout__)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # what the parsers print is no reading
    main()
