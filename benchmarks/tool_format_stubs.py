"""A pytest plugin for tool_formats.py: stand-ins for the modules of vLLM and SGLang, whose parsers are our readers."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from turnwise.messages import TOOL_NAME, ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

NAMES = {
    "qwen3coder": "qwen_xml", "qwen3xml": "qwen_xml", "qwen3engine": "qwen_xml", "qwen3": "qwen_xml",
    "nemotronv3": "qwen_xml",
    "qwen25": "hermes", "seedoss": "seed_oss", "step3p5": "qwen_xml", "glm": "glm", "poolside": "glm", "ling3": "glm",
    "minimaxm2": "minimax",
    "deepseekv32": "dsml", "deepseekv4": "dsml", "deepseek": "deepseek", "kimik2": "kimi_k2", "kimik3": "kimi_k3",
    "mistral": "mistral", "functiongemma": "functiongemma", "gemma4": "gemma", "granite20b": "granite_20b",
    "granite4": "hermes", "granite": "granite", "hermes": "hermes", "internlm": "internlm", "jamba": "jamba",
    "lfm2": "lfm2", "llama4pythonic": "pythonic", "pythonic": "pythonic", "llama": "llama", "olmo3": "olmo",
    "phi4": "phi4", "xlam": "xlam", "apertus": "apertus", "gigachat": "gigachat", "cohere": "cohere",
    "jsontools": "hermes", "llama3": "llama",
}  # fmt: skip
OTHERS = (
    "minimaxm3",
    "musegl",
    "hunyuan",
    "dots",
    "ernie",
    "hyv3",
    "longcat",
    "step3tool",
    "step3det",
    "inkling",
    "minicpm",
)
ROOTS = (
    "vllm",
    "sglang",
    "xgrammar",
    "partial_json_parser",
    "openai_harmony",
    "mistral_common",
    "rapidfuzz",
    "transformers",
    "cohere_melody",
    "mlx_lm",
    "lmdeploy",
    "pytest_asyncio",
)
MARKS = {"glm": ("<tool_call>", "</tool_call>"), "qwen_xml": ("<tool_call>", "</tool_call>"),
         "hermes": ("<tool_call>", "</tool_call>")}  # fmt: skip
TEMPLATES = {"cohere": "cohere", "gpt_oss": "harmony", "smollm": "hermes", "qwen3": "qwen_xml", "gemma4": "gemma"}
"""Response templates of models in transformers' tests, by the names that they have there."""
HANDED_ON = bool(os.environ.get("TOOL_FORMATS_HANDED_ON"))
"""Whether calls to tools that are not offered are handed on; otherwise they are dropped."""
SEEN: dict[str, Any] = {}
FOUND: list[dict[str, str]] = []


def format_of(name: str) -> str | None:
    plain = name.lower().replace("_", "").replace("-", "")
    if any(other in plain for other in OTHERS):
        return None
    return next((known for part, known in NAMES.items() if part in plain), None)


class JsonText(str):
    """Arguments as text, equal to any text of the same values."""

    def __eq__(self, other: object) -> bool:
        try:
            return bool(json.loads(self) == json.loads(str(other)))
        except ValueError:
            return str(self) == other

    __hash__ = str.__hash__


class Unknown(MagicMock):
    """What a project has besides its parsers. It equals everything: a statement about it says nothing of a reader."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        type(self).__eq__ = lambda one, other: True


class AnyRecord(type):
    """Every record is an instance of every class of records."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(Record, instance) or type.__instancecheck__(Unknown, instance)


class Record(metaclass=AnyRecord):
    """An object with the fields that it is given, equal to one with the same name and arguments."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update({key: made(value) for key, value in fields.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __eq__(self, other: object) -> bool:
        mine, others = self.function or self, getattr(other, "function", None) or other
        return (mine.name, mine.arguments) == (getattr(others, "name", None), getattr(others, "arguments", None))

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Record:
        return cls(**fields)


def made(value: Any) -> Any:
    return Record(**value) if isinstance(value, dict) and {"name", "function"} & value.keys() else value


def spec_of(tool: Any) -> ToolSpec | None:
    function = getattr(tool, "function", None) or (tool.get("function", tool) if isinstance(tool, dict) else tool)
    get = function.get if isinstance(function, dict) else lambda key: getattr(function, key, None)
    name, parameters = get("name"), get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        return None
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        parameters = {"type": "object", "properties": (parameters or {}).get("properties", parameters or {})}
    try:
        return ToolSpec(name, "", parameters)
    except ValueError:
        return None


def read_with(name: str, text: str, tools: Any) -> list[Any]:
    how = FORMATS[name]
    assert how is not None
    if not isinstance(text, str) or "<Unknown id=" in text:
        pytest.skip("no whole output, or one with marks that the stand-ins do not know")
    specs = [spec for tool in tools or () if (spec := spec_of(tool)) is not None]
    message = how.parse(text, specs)
    SEEN["format"], SEEN["fault"], SEEN["text"] = name, "; ".join(message.faults), text
    SEEN["refused"] = any(call.fault for call in message.calls)
    return [call for call in message.calls if HANDED_ON or not call.fault]


def parser_class(class_name: str, format_name: str | None) -> type:
    class Parser:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.tools = named.get("tools") or (given[1] if len(given) > 1 else None)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if "stream" in name or "delta" in name or name in ("model_tokenizer", "vocab"):
                pytest.skip("streams")
            return Unknown()

        def extract_reasoning(self, text: str, *_: Any, **__: Any) -> Any:
            return Unknown(), text  # our readers split the thinking off

        def extract_tool_calls(self, model_output: str, request: Any = None, *_: Any, **__: Any) -> Any:
            text = model_output
            calls = self.read(text, getattr(request, "tools", None) or self.tools)
            functions = [Record(name=c.name, arguments=JsonText(c.text)) for c in calls]
            calls = [Record(type="function", id=f"x{i}", function=made) for i, made in enumerate(functions)]
            return Record(tools_called=bool(calls), tool_calls=calls, content=text)

        extract_tool_calls_from_content = extract_tool_calls

        def parse_tool_call_complete(self, payload: str) -> Any:
            """The call within the marks that lmdeploy's parsers take off first."""
            before, after = MARKS.get(format_name or "", ("", ""))
            found = self.extract_tool_calls(f"{before}{payload}{after}").tool_calls
            return found[0] if found else None

        def adjust_request(self, request: Any) -> Any:
            self.tools = getattr(request, "tools", None)
            return request

        def detect_and_parse(self, text: str, tools: Any = None) -> Any:
            calls = [
                Record(name=c.name, parameters=JsonText(c.text), tool_index=i)
                for i, c in enumerate(self.read(text, tools))
            ]
            return Record(calls=calls, normal_text=text)

        def read(self, text: str, tools: Any) -> list[Any]:
            if format_name is None:
                pytest.skip("a format that is not ours")
            return read_with(format_name, text, tools)

    Parser.__name__ = class_name
    return Parser


class WholeResponse:
    """A parser of whole answers of lmdeploy, which has a parser of calls."""

    tool_parser_cls: Any = None

    def __init__(self, request: Any = None, **_: Any) -> None:
        self.parser = (
            type(self).tool_parser_cls(tools=getattr(request, "tools", None)) if self.tool_parser_cls else None
        )

    def parse_complete(self, text: str, *_: Any, **__: Any) -> Any:
        if self.parser is None:
            pytest.skip("no calls")
        return Unknown(), self.parser.extract_tool_calls(text).tool_calls or None, Unknown()

    def validate_complete(self, text: str) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip("streams")


# ---------------------------------------------------------------- functions that give plain values


class Read(dict[str, Any]):
    """What a function of mlx-lm or transformers gives for one output. Whether it equals what a test expects is noted,
    and the test goes on with its next output."""

    def __init__(self, fields: dict[str, Any], entry: dict[str, str]) -> None:
        super().__init__(fields)
        self.entry = entry

    def __eq__(self, other: object) -> bool:
        if isinstance(other, dict | list) and plain(self) != plain(other):
            self.entry["outcome"] = "wrong"
        return True

    __hash__ = None


class ReadList(list[Any]):
    """The same for a function that gives several calls."""

    def __init__(self, items: list[Any], entry: dict[str, str]) -> None:
        super().__init__(items)
        self.entry = entry

    def __eq__(self, other: object) -> bool:
        if isinstance(other, dict | list) and plain(self) != plain(other):
            self.entry["outcome"] = "wrong"
        return True

    __hash__ = None


def plain(value: Any) -> Any:
    """The calls of a value, whatever else it has."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict) and "role" in value:
        return plain(value.get("tool_calls", []))
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    return (value["name"], value["arguments"]) if isinstance(value, dict) and "name" in value else value


def noted(name: str, text: str, tools: Any) -> tuple[list[Any], dict[str, str]]:
    """(the calls of one output, its entry in the report)."""
    calls = read_with(name, text, tools)
    outcome = {
        "format": name,
        "test": SEEN.get("test", ""),
        "outcome": "right",
        "why": f"{calls} | {SEEN['fault']} | {text!r}",
    }
    entry = {**outcome, "refused": "yes" if SEEN.get("refused") else ""}
    FOUND.append(entry)
    SEEN.pop("format")  # the test itself is no output
    SEEN["entry"] = entry
    return calls, entry


def parse_tool_call(module: str) -> Any:
    """mlx-lm's function of this name: the calls within the marks that it says."""
    name = format_of(module.rpartition(".")[2])
    before, after = (constant_of(module, f"tool_call_{end}") or "" for end in ("start", "end"))

    def parse(text: str, tools: Any = None) -> Any:
        if name is None:
            return Unknown()
        calls, entry = noted(name, f"{before}{text}{after}", tools)
        values = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        if name != "kimi_k2" and len(values) == 1:
            return Read(values[0], entry)
        if not values:
            entry["outcome"] = "wrong"
            return Unknown()
        return ReadList([Read(value, entry) for value in values], entry)

    return parse


def parse_response(text: Any, template: Any = None, prefix: str = "", tools: Any = None, **_: Any) -> Any:
    """transformers' function of this name, for templates of our formats."""
    names = [
        key for key, value in sys._getframe(1).f_globals.items() if value is template and key.endswith("_template")
    ]
    name = TEMPLATES.get(names[0].removesuffix("_template")) if names else None
    if name is None or prefix or not isinstance(text, str):
        pytest.skip("a template that no model of ours has, or an answer that has begun")
    start = str(template.get("start_anchor") or "")
    calls, entry = noted(name, text.removeprefix(start), tools)
    made = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
    return Read({"role": "assistant", **({"tool_calls": made} if made else {})}, entry)


class Stub(ModuleType):
    """A module that has everything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "mlx_lm.tool_parsers":
            value: Any = importlib.import_module(f"{self.__name__}.{name}")
        elif name.endswith(("ToolParser", "Detector", "Parser")) and name not in ("ToolParser", "FunctionCallParser"):
            value = parser_class(name, format_of(name))
        elif name == "ToolParserManager":
            value = MagicMock()
            value.get_tool_parser = value.get = lambda given: parser_class(given, format_of(given))
        elif name.startswith("require_"):
            value = lambda decorated: decorated
        elif name == "ReasoningParserManager":
            value = MagicMock()
        elif name == "ResponseParserManager":
            value = MagicMock()
            value.get = lambda given: type("Made", (WholeResponse,), {})
        elif name == "parse_tool_call":
            value = parse_tool_call(self.__name__)
        elif name == "parse_response":
            value = parse_response
        elif name == "AutoTokenizer":
            value = NoTokenizer()
        elif name == "CustomTestCase":
            import unittest

            value = unittest.TestCase
        elif name[0].isupper() and not name.isupper():
            value = type(name, (Record,), {})
        else:
            constant = constant_of(self.__name__, name)
            value = Unknown() if constant is None else constant
        setattr(self, name, value)
        return value


def constant_of(module: str, name: str) -> str | None:
    """The text that a module of the project gives a name, from its source: tests build outputs of such marks."""
    for root in ("", "python"):
        path = Path(os.environ["TOOL_FORMATS_SOURCE"], root, *module.split(".")).with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and target is not None and ast.unparse(target) == name:
                return node.value.value if isinstance(node.value, ast.Constant) else None
    return None


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        stub = name.split(".")[0] in ROOTS or name == "tests.utils"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stub else None

    def create_module(self, spec: Any) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class NoTokenizer:
    """A tokenizer that knows every token."""

    def from_pretrained(self, *_: Any, **__: Any) -> Any:
        return MagicMock()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Without tests of streaming and of regular expressions; a test that vLLM expects to fail there may pass here."""
    for item in items:
        name = item.name.lower().replace("nonstreaming", "").replace("non_streaming", "")
        if any(word in name for word in ("stream", "regex_timeout", "structural", "adjust_request")):
            item.add_marker(pytest.mark.skip)
        item.own_markers = [mark for mark in item.own_markers if mark.name != "xfail"]


sys.meta_path.insert(0, Stubs())  # before the first conftest is read


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    result = yield
    report = result.get_result()
    if call.when == "setup":
        SEEN.clear()
        SEEN["test"] = item.nodeid
    if call.when == "call" and "entry" in SEEN and call.excinfo and report.outcome != "skipped":
        SEEN["entry"].update(outcome="wrong", why=f"{str(call.excinfo.value)[:200]} | {SEEN['entry']['why']}")
    if call.when != "call" or report.outcome == "skipped" or "format" not in SEEN:
        return
    why = str(call.excinfo.value).split("\n")[0] if call.excinfo else ""
    broken = SEEN["fault"] and call.excinfo and call.excinfo.errisinstance((AssertionError, IndexError))
    FOUND.append(
        {
            "format": SEEN["format"],
            "test": item.nodeid,
            "outcome": "wrong" if call.excinfo else "right",
            "refused": "yes" if SEEN.get("refused") else "",
            "why": f"{why} | fault: {SEEN['fault']} | {SEEN['text']!r}"
            if not broken
            else f"fault: {SEEN['fault']} | {why} | {SEEN['text']!r}",
        }
    )


def pytest_sessionfinish() -> None:
    Path(os.environ["TOOL_FORMATS_REPORT"]).write_text(json.dumps(FOUND))
