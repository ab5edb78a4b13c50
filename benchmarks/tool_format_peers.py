"""Outputs of the tests of vllm-mlx and Rapid-MLX, whose parsers are plain Python, for tool_formats.py.

The tests run as they are, without statements about content, once in each of these ways:

own         with the project's own parsers: a test that fails so says nothing here
wrong       with a call that no test can expect: a test that passes so says nothing of calls
ours        with our readers in place of the parsers; calls to tools that are not offered are handed on
dropped     the same, and such calls are left out
inferred    the same, and values that no schema declares are read as JSON, or as text where we read JSON

An output is read rightly if its test passes with our readers, or if its calls are those of the project's own parser. It
is a pytest plugin, too: `PEERS_MODE` names the way.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tool_format_crates import UNTYPED, as_json
from tool_format_fixtures import parsed, same
from tool_format_output import Output, Wanted, offered

from turnwise.messages import TOOL_NAME, ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

CLASSES = {
    "MistralToolParser": "mistral", "QwenToolParser": "hermes", "LlamaToolParser": "llama",
    "HermesToolParser": "hermes", "DeepSeekToolParser": "deepseek", "DeepSeekV3ToolParser": "deepseek",
    "DeepSeekV31ToolParser": "deepseek", "DeepSeekV40731ToolParser": "dsml", "KimiToolParser": "kimi_k2",
    "GraniteToolParser": "granite", "NemotronToolParser": "qwen_xml", "xLAMToolParser": "xlam",
    "Gemma4ToolParser": "gemma", "Glm47ToolParser": "glm", "PoolsideV1ToolParser": "glm",
    "MiniMaxToolParser": "minimax", "HarmonyToolParser": "harmony", "Qwen3XMLToolParser": "qwen_xml",
    "Step3p5ToolParser": "qwen_xml", "Qwen3CoderToolParser": "qwen_xml", "SeedOssToolParser": "seed_oss",
    "LfmToolParser": "lfm2",
}  # fmt: skip
MODES = ("own", "wrong", "ours", "dropped", "inferred")
MODE = os.environ.get("PEERS_MODE", "")
ABOUT_CONTENT = re.compile(r"\b(?:content|reasoning\w*|tools_called)\b|\bid\b")
ABOUT_CALLS = re.compile(r"tool_calls|\bargs|arguments|\bname\b|\bcalls\b")
NO_CALL = {"id": "call_0", "name": "no test expects this", "arguments": '{"no test": "expects this"}'}
READ: list[dict[str, Any]] = []
FOUND: list[dict[str, Any]] = []
INSIDE: list[str] = []


class WithoutContent(ast.NodeTransformer):
    """Drops statements that are about content, and not about calls."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        text = ast.unparse(node.test)
        return ast.Pass() if ABOUT_CONTENT.search(text) and not ABOUT_CALLS.search(text) else node


def format_of(name: str, text: str) -> str:
    """The format of a class. The parsers for Qwen, Hermes and Llama also read the tags of Qwen3-Coder."""
    return "qwen_xml" if name in ("hermes", "llama") and "<function=" in text else name


def spec_of(tool: Any) -> ToolSpec | None:
    """A tool as a test gives it; None if it has no name or no schema of an object."""
    function = tool.get("function", tool) if isinstance(tool, dict) else getattr(tool, "function", tool)
    get = function.get if isinstance(function, dict) else lambda key: getattr(function, key, None)
    name, parameters = get("name"), get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        return None
    return ToolSpec(name, "", {"type": "object"} | (parameters if isinstance(parameters, dict) else {}))


def tools_of(parser: Any, request: Any) -> list[ToolSpec]:
    given = request.get("tools") if isinstance(request, dict) else getattr(request, "tools", None)
    return [spec for tool in given or getattr(parser, "tools", None) or () if (spec := spec_of(tool)) is not None]


def ours(name: str, text: str, specs: list[ToolSpec]) -> tuple[list[dict[str, Any]], str]:
    """(calls as these parsers give them, faults)."""
    how = FORMATS[name]
    assert how is not None
    message = how.parse(text, specs)
    declared = {spec.name: set(spec.parameters.get("properties") or {}) for spec in specs}
    calls = []
    for place, call in enumerate(message.calls):
        if call.fault and MODE == "dropped":
            continue
        given = dict(call.arguments)
        if MODE == "inferred" and name in UNTYPED:
            known = declared.get(call.name, set())
            given = {key: value if key in known else otherwise(value) for key, value in given.items()}
        calls.append({"id": f"call_{place}", "name": call.name, "arguments": json.dumps(given, ensure_ascii=False)})
    return calls, "; ".join(message.faults)


def otherwise(value: Any) -> Any:
    """A value that no schema declares as JSON if it is text, and else as text."""
    return as_json(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def replaced(parser: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a parser that records its output, and reads it with our reader."""
    name = CLASSES[parser]

    def extract_tool_calls(self: Any, model_output: Any, request: Any = None, *given: Any, **named: Any) -> Any:
        if INSIDE or not isinstance(model_output, str):
            return own(self, model_output, request, *given, **named)
        INSIDE.append(name)
        try:
            result = own(self, model_output, request, *given, **named)
        finally:
            INSIDE.pop()
        kind, specs = format_of(name, model_output), tools_of(self, request)
        calls, faults = ours(kind, model_output, specs)
        own_calls = [(call["name"], parsed(call["arguments"])) for call in result.tool_calls]
        READ.append({
            "format": kind, "text": model_output, "tools": [spec.text for spec in specs], "faults": faults,
            "parser": parser, "specs": [{"name": spec.name, "parameters": dict(spec.parameters)} for spec in specs],
            "own": own_calls, "calls": [(call["name"], parsed(call["arguments"])) for call in calls],
        })  # fmt: skip
        if MODE == "own":
            return result
        calls = [NO_CALL] if MODE == "wrong" else calls
        fields = {**vars(result), "tools_called": bool(calls), "tool_calls": calls}
        return SimpleNamespace(**fields)

    return extract_tool_calls


def within(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that uses the projects' own parsers inside."""

    def method(*given: Any, **named: Any) -> Any:
        INSIDE.append("")
        try:
            return own(*given, **named)
        finally:
            INSIDE.pop()

    return method


def pytest_configure() -> None:
    parsers = importlib.import_module("vllm_mlx.tool_parsers")
    for name in dir(parsers):
        one = getattr(parsers, name)
        if name in CLASSES:
            one.extract_tool_calls = replaced(name, one.extract_tool_calls)
        if isinstance(one, type) and hasattr(one, "extract_tool_calls_streaming"):
            one.extract_tool_calls_streaming = within(one.extract_tool_calls_streaming)
    parsers.AutoToolParser.extract_tool_calls = within(parsers.AutoToolParser.extract_tool_calls)


def pytest_runtest_setup() -> None:
    READ.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call":
        FOUND.append({"test": report.nodeid, "passed": report.passed, "read": list(READ)})


def pytest_unconfigure() -> None:
    if "PEERS_REPORT" in os.environ:
        Path(os.environ["PEERS_REPORT"]).write_text(json.dumps(FOUND))


def copied(source: Path, target: Path) -> list[str]:
    """Copy the tests of parsers without statements about content; the names of the files."""
    names = []
    for path in sorted((source / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "vllm_mlx.tool_parsers" not in text or "pars" not in path.name:
            continue
        place = target / path.relative_to(source)
        for folder in [place.parent, *place.parent.parents]:
            if folder == target:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        tree = WithoutContent().visit(ast.parse(text))
        place.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
        names.append(str(place))
    return names


def run(source: Path, target: Path, files: list[str], mode: str) -> dict[str, dict[str, Any]]:
    report = target / f"{mode}.json"
    here = Path(__file__).parent
    environment = {
        "PYTHONPATH": ":".join([str(target), str(source.resolve()), str(here), str(here.parent / "src")]),
        "PATH": "/usr/bin:/bin", "PEERS_MODE": mode, "PEERS_REPORT": str(report), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tool_format_peers", "-c", "/dev/null", "--rootdir", str(target),
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--continue-on-collection-errors", *files,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=target, capture_output=True, text=True, check=False)
    if os.environ.get("SHOW"):
        print(done.stdout[-6000:])
    if not report.exists():
        raise ValueError(f"the tests did not run: {done.stdout[-800:]} {done.stderr[-800:]}")
    return {one["test"]: one for one in json.loads(report.read_text())}


def runs(source: Path, modes: Sequence[str] = MODES) -> dict[str, dict[str, dict[str, Any]]]:
    """What each test read and whether it passed, in each way."""
    with tempfile.TemporaryDirectory() as made:
        files = copied(source, Path(made))
        return {mode: run(source, Path(made), files, mode) for mode in modes}


def telling(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The tests that pass with the project's own parsers, and do not with a wrong call."""
    return [
        test
        for test, one in found["own"].items()
        if one["read"] and one["passed"] and not found["wrong"].get(test, {"passed": True})["passed"]
    ]


def peer_outcomes(project: str, source: Path) -> tuple[list[dict[str, str]], int]:
    """The outcome of every output whose test says something of calls, and how many outputs there are besides."""
    found = runs(source)
    counted = telling(found)
    left_out = sum(len(one["read"]) for test, one in found["own"].items() if test not in counted)
    outcomes = []
    for test in counted:
        passed = {mode: found[mode].get(test, {"passed": False})["passed"] for mode in MODES}
        dropped = {one["text"]: one["calls"] for one in found["dropped"].get(test, {"read": []})["read"]}
        for one in found["own"][test]["read"]:
            equal = any(
                same(one["own"], calls) for calls in (one["calls"], dropped.get(one["text"])) if calls is not None
            )
            broken = any(not isinstance(arguments, dict) for _, arguments in one["own"])  # cannot be made here
            right = passed["ours"] or passed["dropped"] or equal or (broken and bool(one["faults"]))
            outcomes.append({
                "format": one["format"],
                "test": f"{project} {test}",
                "outcome": "right" if right else "wrong",
                "refused": "yes" if one["calls"] != dropped.get(one["text"], one["calls"]) else "",
                "contested": "yes" if not right and passed["inferred"] else "",
                "heard": "yes" if right and not one["own"] and one["faults"] else "",
                "key": "\0".join([one["format"], one["text"], *one["tools"]]),
                "why": f"{one['calls']} != {one['own']} | fault: {one['faults']} | {one['text']!r}",
            })  # fmt: skip
    return outcomes, left_out


def peer_outputs(project: str, source: Path) -> tuple[list[Output], int]:
    """The outputs of tests that say something of calls, with what the project's own parser makes of them, and how many
    outputs there are besides."""
    found = runs(source, ("own", "wrong"))
    counted = telling(found)
    left_out = sum(len(one["read"]) for test, one in found["own"].items() if test not in counted)
    outputs = []
    for test in counted:
        for one in found["own"][test]["read"]:
            wanted = [Wanted(name, arguments) for name, arguments in one["own"]]
            tools = offered(one["specs"], wanted)
            outputs.append(Output(project, test, one["parser"], one["format"], one["text"], tools, wanted))
    return outputs, left_out
