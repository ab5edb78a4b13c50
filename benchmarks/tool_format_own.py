"""Outputs of the tests of Xinference, Unsloth Studio and mlx-omni-server, for tool_format_agreed.py.

The tests run as they are, with the projects' own parsers, in two ways:

own         what the parser makes of each output that a test itself gives it is recorded
wrong       all calls have another name, and an answer without calls has one

An output counts if its test passes in the first way and fails in the second; what the own parser makes of it is then
what the test expects. Of a test with more than eight outputs the first eight count. Modules that the parsers do not
need (runtimes, the projects' packages around them) are replaced by stand-ins.

It is a pytest plugin, too: `OWN_PROJECT`, `OWN_SOURCE` and `OWN_MODE` say what runs.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tool_format_fixtures import parsed
from tool_format_output import Output, Wanted, offered, tool_of

NO_CALL = "no test expects this"
MOST = 8
"""As many outputs of one test count."""
MARKS = (
    (r"<｜tool▁call", "deepseek"), (r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>", "kimi_k2"),
    (r"\[TOOL_CALLS\]|\[THINK\]", "mistral"), (r"<\|tool_call>", "gemma"), (r"<\|python_tag\|>", "llama"),
    (r"<tool_call>\s*<function=|<function=", "qwen_xml"),
    (r"<tool_call>\s*[\w.-]+\s*(?:<arg_key>|</tool_call>)", "glm"), (r"<tool_call>", "hermes"),
    (r"^\s*\{\s*\"", "llama"),
)  # fmt: skip
"""The marks of formats. The one that stands first in an output says its format."""


@dataclass(frozen=True)
class Project:
    """Where the tests of a project are, and what of it is a stand-in."""

    tests: str
    files: tuple[str, ...]
    path: str
    packages: tuple[str, ...]
    """Packages whose own code does not run; their modules are found."""
    stubs: tuple[str, ...] = ()
    """Modules that are replaced."""


PROJECTS = {
    "xinference": Project(
        "xinference/model/llm/tool_parsers/tests",
        tuple(
            f"test_{name}_tool_parser.py"
            for name in ("deepseek_r1", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v3", "deepseek_v4", "gemma",
                         "glm5", "llama3", "qwen")
        ),
        ".",
        ("xinference", "xinference.model", "xinference.model.llm"),
    ),
    "unsloth": Project(
        "studio/backend/tests",
        tuple(
            f"test_{name}.py"
            for name in ("tool_call_parser_strict", "safetensors_tool_loop", "gemma_tool_parse_edge_cases",
                         "pr5624_regressions")
        ),
        "studio/backend",
        (),
    ),
    "mlx-omni-server": Project(
        "tests/chat/mlx/tools",
        tuple(
            f"test_{name}.py"
            for name in ("base_tools_parse", "glm45_tool_type_conversion", "glm45_tools_parser", "hf_chat_parser",
                         "llama3_tools_parser", "mistral_tools_parser", "qwen3_moe_tools_parser",
                         "qwen3_tool_type_conversion")
        ),
        "src",
        ("mlx_omni_server", "mlx_omni_server.chat", "mlx_omni_server.chat.mlx", "mlx_omni_server.chat.mlx.tools"),
        ("mlx_lm", "mlx_lm.tokenizer_utils", "mlx", "mlx.core"),
    ),
}  # fmt: skip
BY_CLASS = {
    "DeepseekR1ToolParser": "deepseek", "DeepseekV3ToolParser": "deepseek", "DeepseekV3_1ToolParser": "deepseek",
    "DeepseekV3_2ToolParser": "dsml", "DeepseekV42ToolParser": "dsml", "GemmaToolParser": "gemma",
    "Glm5ToolParser": "glm", "Llama3ToolParser": "llama", "QwenToolParser": "", "GLM45ToolParser": "glm",
    "HuggingFaceToolParser": "", "MistralToolsParser": "mistral", "Qwen3MoeToolParser": "", "extract_tools": "",
    "parse_tool_calls_from_text": "",
}  # fmt: skip
"""The formats of parsers; an empty one is that of the marks in the output."""
MODE = os.environ.get("OWN_MODE", "")
READ: list[dict[str, Any]] = []
FOUND: list[dict[str, Any]] = []


def format_of(parser: str, text: str) -> str:
    """The format of an output; nothing if it has no mark of one."""
    if BY_CLASS[parser]:
        return BY_CLASS[parser]
    found = [
        (match.start(), place, name) for place, (mark, name) in enumerate(MARKS) if (match := re.search(mark, text))
    ]
    return min(found)[2] if found else ""


def kind_of(parser: str, name: str, text: str) -> str:
    """The parser's name; for a parser of all formats that of the model whose form the output has."""
    if name == "glm" and parser != "Glm5ToolParser" and re.search(r"<tool_call>[^<]*\n", text):
        return "glm45"
    if name == "deepseek" and not BY_CLASS[parser] and not re.search(r"function\s*<｜tool▁sep｜>", text):
        return "deepseekv31"
    return parser


def called(result: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of what a parser gives."""
    found: list[tuple[str, Any]] = []
    for one in result or []:
        if isinstance(one, dict):
            found.append((one["function"]["name"], parsed(one["function"]["arguments"])))
        elif isinstance(one, tuple):
            found += [(one[1], parsed(one[2]))] if one[1] is not None else []
        else:
            found.append((one.name, parsed(one.arguments)))
    return found


def wrong(result: Any, empty: Callable[[], Any]) -> Any:
    """The same with other names, or with a call where there is none."""
    made: list[Any] = []
    for one in copy.deepcopy(list(result or [])):
        if isinstance(one, dict):
            one["function"]["name"] = NO_CALL
        elif isinstance(one, tuple):
            one = (one[0], None if one[1] is None else NO_CALL, one[2])
        else:
            one.name = NO_CALL
        made.append(one)
    return made if called(result) else [*made, empty()]


def tools_of(schemas: Any) -> list[dict[str, Any]]:
    """The tools that a parser of mlx-omni-server was given."""
    if not isinstance(schemas, dict):
        return []
    return [tool_of(name, schema) for name, schema in schemas.items()]


def watched(parser: str, own: Callable[..., Any], empty: Callable[[], Any], method: bool) -> Callable[..., Any]:
    """A function or method of a parser that notes what a test itself gives it."""

    def read(*given: Any, **named: Any) -> Any:
        result = own(*given, **named)
        caller = Path(sys._getframe(1).f_code.co_filename).name
        rest = given[1:] if method else given
        text = rest[0] if rest else next(iter(named.values()), None)
        if not caller.startswith("test_") or not isinstance(text, str):
            return result
        tools = tools_of(getattr(given[0], "_tools_schema", None)) if method else []
        READ.append({"parser": parser, "text": text, "tools": tools, "calls": called(result)})
        return wrong(result, empty) if MODE == "wrong" else result

    return read


def pytest_configure() -> None:
    project, source = os.environ["OWN_PROJECT"], Path(os.environ["OWN_SOURCE"])
    how = PROJECTS[project]
    root = source / how.path
    sys.path.insert(0, str(root))
    for name in how.packages:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name in how.stubs:
        sys.modules[name] = MagicMock()
    if project == "xinference":
        parsers = importlib.import_module("xinference.model.llm.tool_parsers").TOOL_PARSERS
        for one in parsers.values():
            if one.__name__ in BY_CLASS:
                one.extract_tool_calls = watched(
                    one.__name__, one.extract_tool_calls, lambda: (None, NO_CALL, {}), method=True
                )
    elif project == "unsloth":
        module = importlib.import_module("core.inference.tool_call_parser")
        made = {"id": "call_0", "type": "function", "function": {"name": NO_CALL, "arguments": "{}"}}
        name = "parse_tool_calls_from_text"
        setattr(module, name, watched(name, getattr(module, name), lambda: copy.deepcopy(made), method=False))
    else:
        watch_omni()


def watch_omni() -> None:
    """The parsers of mlx-omni-server."""
    package = "mlx_omni_server.chat.mlx"
    call = importlib.import_module(f"{package}.core_types").ToolCall

    def empty() -> Any:
        return call(id="call_0", name=NO_CALL, arguments={})

    base = importlib.import_module(f"{package}.tools.base_tools")
    for module in ("glm45_tools_parser", "hugging_face", "llama3", "mistral", "qwen3_moe_tools_parser"):
        for one in vars(importlib.import_module(f"{package}.tools.{module}")).values():
            if isinstance(one, type) and one.__name__ in BY_CLASS:
                one.parse_tools = watched(one.__name__, one.parse_tools, empty, method=True)  # type: ignore[attr-defined]
    base.extract_tools = watched("extract_tools", base.extract_tools, empty, method=False)  # type: ignore[attr-defined]


def pytest_runtest_setup() -> None:
    READ.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call":
        FOUND.append({"test": report.nodeid, "passed": report.passed, "read": list(READ)})


def pytest_unconfigure() -> None:
    if "OWN_REPORT" in os.environ:
        Path(os.environ["OWN_REPORT"]).write_text(json.dumps(FOUND))


def run(project: str, source: Path, mode: str) -> dict[str, dict[str, Any]]:
    """What each test read and whether it passed, in one way."""
    how, here = PROJECTS[project], Path(__file__).parent
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        environment = {
            "PYTHONPATH": ":".join([str(here), str(here.parent / "src")]), "PATH": "/usr/bin:/bin", "HOME": made,
            "OWN_PROJECT": project, "OWN_SOURCE": str(source.resolve()), "OWN_MODE": mode, "OWN_REPORT": str(report),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "tool_format_own", "-c", "/dev/null", "--noconftest",
            "--rootdir", str(source.resolve()), "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly",
            "--continue-on-collection-errors", *(str(source.resolve() / how.tests / name) for name in how.files),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, cwd=made, capture_output=True, text=True, check=False)
        if os.environ.get("SHOW"):
            print(done.stdout[-6000:], done.stderr[-2000:])
        if not report.exists():
            raise ValueError(f"the tests did not run: {done.stdout[-800:]} {done.stderr[-800:]}")
        return {one["test"]: one for one in json.loads(report.read_text())}


def own_outputs(project: str, source: Path) -> tuple[list[Output], int]:
    """The outputs of tests that say something of calls, and how many outputs there are besides."""
    found, other = run(project, source, "own"), run(project, source, "wrong")
    outputs: list[Output] = []
    left_out = 0
    for test, one in found.items():
        telling = one["passed"] and not other.get(test, {"passed": True})["passed"]
        for place, read in enumerate(one["read"]):
            name = format_of(read["parser"], read["text"])
            if not telling or not name or place >= MOST:
                left_out += 1
                continue
            wanted = [Wanted(called, arguments) for called, arguments in read["calls"]]
            kind = kind_of(read["parser"], name, read["text"])
            tools = offered(read["tools"], wanted)
            outputs.append(Output(project, test, kind, name, read["text"], tools, wanted))
    return outputs, left_out
