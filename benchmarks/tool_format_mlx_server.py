"""Outputs of mlx-openai-server's tests, whose parsers are plain Python.

The tests run as they are, with the project's own parsers, which note the pieces that they are given and the calls that
they make. A test that passes is an expectation: the pieces joined, and the calls of its parser.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from tool_format_fixtures import parsed
from tool_format_output import Output, Wanted, offered

CLASSES = {
    "HermesToolParser": "hermes", "GLM4MoEToolParser": "glm", "MiniMaxM2ToolParser": "minimax",
    "FunctionGemmaToolParser": "functiongemma", "Gemma4ToolParser": "gemma", "KimiK2ToolParser": "kimi_k2",
    "FunctionParameterToolParser": "qwen_xml", "Qwen3MoEToolParser": "hermes", "HarmonyParser": "harmony",
}  # fmt: skip


class Quiet:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def noting(kind: type, given: dict[int, dict[str, Any]]) -> None:
    """Make the parsers of a class note what they are given and the calls that they make."""
    for method in ("extract_tool_calls", "extract_tool_calls_streaming"):
        own = getattr(kind, method, None)
        if own is None or method not in vars(kind):
            continue

        def noted(self: Any, text: str, *more: Any, _own: Any = own, **named: Any) -> Any:
            outer = not getattr(self, "_inside", False)
            self._inside = True
            try:
                result = _own(self, text, *more, **named)
            finally:
                self._inside = not outer
            if outer:
                one = given.setdefault(id(self), {"self": self, "text": "", "calls": []})
                one["text"] += text
                found = result[0] if isinstance(result, tuple) else result
                one["calls"] += (found.get("tool_calls") or []) if isinstance(found, dict) else []
            return result

        setattr(kind, method, noted)


def mlx_server_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of tests that pass, and how many tests do not."""
    sys.path.insert(0, str(folder.resolve()))
    logger = types.ModuleType("loguru")
    logger.logger = Quiet()  # type: ignore[attr-defined]
    sys.modules.setdefault("loguru", logger)
    harmony = types.ModuleType(
        "openai_harmony"
    )  # its vocabulary cannot be had, so tests of harmony fail and say nothing
    names = ("HarmonyEncodingName", "Role", "StreamableParser", "load_harmony_encoding")
    harmony.__dict__.update({name: Quiet() for name in names})
    sys.modules.setdefault("openai_harmony", harmony)
    given: dict[int, dict[str, Any]] = {}
    found: list[Output] = []
    failed = 0
    seen: set[type] = set()
    for path in sorted((folder / "tests" / "parsers").glob("test_*.py")):
        try:
            module = importlib.import_module(f"tests.parsers.{path.stem}")
        except ImportError:
            failed += 1
            continue
        for kind in [one for one in vars(module).values() if inspect.isclass(one) and one.__name__.endswith("Parser")]:
            for base in kind.__mro__:
                if base not in seen and base.__module__.startswith("app."):
                    seen.add(base)
                    noting(base, given)
        for name, test in [(name, one) for name, one in vars(module).items() if name.startswith("test_")]:
            given.clear()
            try:
                test()
            except Exception:  # a test that needs more than its parser, or that fails
                failed += 1
                continue
            for one in given.values():
                parser = type(one["self"]).__name__
                if parser not in CLASSES:
                    continue
                wanted = [Wanted(call["name"], parsed(call["arguments"])) for call in one["calls"]]
                place = f"{path.name} {name}"
                found.append(
                    Output(
                        "mlx-openai-server", place, parser, CLASSES[parser], one["text"], offered([], wanted), wanted
                    )
                )
    return found, failed
