"""How many outputs of the parsers' tests of vLLM, SGLang and llama.cpp our readers read as those tests expect.

    python benchmarks/tool_formats.py --vllm PATH --vllm-parser PATH --sglang PATH --llama-cpp PATH [--failures]

Nothing is copied by hand. The test files of vLLM and SGLang run as they are, in a process of their own, with our
readers in place of the parsers: modules of those projects are replaced by stand-ins, and statements about content
(whose white space is each project's own) are left out. A test counts if it gave a whole output to a parser, and not if
it streams. Of llama.cpp's C++ tests the calls of the parser and the expected messages are read from the source.

A call whose expected arguments are no JSON object cannot be made; it is read rightly if the reader names a fault.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

CONTENT = ("content", "normal_text", "reasoning", ".id", "tool_index", "output_tool_call")
FOLDERS = {
    "vllm": ("tests/tool_parsers", "tests/tool_use", "tests/entrypoints/tool_parsers"),
    "vllm-parser": ("tests/parser", "tests/parser/engine", "tests/parser/mistral"),
    "sglang": ("test/registered/function_call", "test/registered/unit/function_call"),
}


class WithoutContent(ast.NodeTransformer):
    """Drops statements about the content of a message."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass() if about_content(ast.unparse(node.test)) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        text = ast.unparse(node)
        return ast.Pass() if text.startswith("self.assert") and about_content(text) else node


def about_content(text: str) -> bool:
    return any(word in text for word in CONTENT) and ".arguments" not in text and ".parameters" not in text


def prepared(source: Path, folder: Path, target: Path) -> None:
    """A copy of a test folder without statements about content."""
    for path in sorted((source / folder).glob("*.py")):
        # SGLang's folder is called test, as is a package of Python.
        place = target / (folder if folder.parts[0] == "tests" else Path("other_tests")) / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        for parent in [place.parent, *place.parent.parents]:
            if parent == target:
                break
            (parent / "__init__.py").touch()
        try:
            tree = WithoutContent().visit(ast.parse(path.read_text(encoding="utf-8")))
            place.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
        except SyntaxError:
            continue


def outcomes(project: str, source: Path) -> list[dict[str, str]]:
    """The outcome of every test that gave a parser a whole output."""
    with tempfile.TemporaryDirectory() as made:
        target = Path(made)
        for folder in FOLDERS[project]:
            if (source / folder).is_dir():
                prepared(source, Path(folder), target)
        report = target / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "tool_format_stubs", "-c", "/dev/null", "--rootdir", made,
            "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--continue-on-collection-errors", made,
        ]  # fmt: skip
        here = Path(__file__).parent
        paths = [made, str(here), str(here.parent / "src")]
        environment = {
            "PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin",
            "TOOL_FORMATS_REPORT": str(report), "TOOL_FORMATS_SOURCE": str(source.resolve()),
        }  # fmt: skip
        done = subprocess.run(command, env=environment, cwd=made, capture_output=True, text=True, check=False)
        if os.environ.get("SHOW"):
            print(done.stdout)
        if not report.exists():
            raise ValueError(f"the tests of {project} did not run: {done.stdout[-800:]} {done.stderr[-800:]}")
        return list(json.loads(report.read_text()))


def table(found: list[dict[str, str]]) -> str:
    """Shares by format."""
    right = Counter(one["format"] for one in found if one["outcome"] == "right")
    total = Counter(one["format"] for one in found)
    lines = ["| format | outputs | read rightly | share |", "|---|---|---|---|"]
    for name in [*sorted(total), "all"]:
        count = sum(total.values()) if name == "all" else total[name]
        good = sum(right.values()) if name == "all" else right[name]
        lines.append(f"| {name} | {count} | {good} | {100 * good / max(1, count):.0f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for project in ("vllm", "vllm-parser", "sglang", "llama-cpp"):
        parser.add_argument(f"--{project}", type=Path)
    parser.add_argument("--failures", action="store_true", help="name the tests that were read otherwise")
    given = parser.parse_args()
    found: list[dict[str, str]] = []
    for project in FOLDERS:
        if (source := getattr(given, project.replace("-", "_"))) is not None:
            found += outcomes(project, source)
    if given.llama_cpp is not None:
        from tool_format_cpp import llama_cpp_outcomes

        found += llama_cpp_outcomes(given.llama_cpp)
    print(table(found))
    if given.failures:
        for one in found:
            if one["outcome"] != "right":
                print(f"\n{one['format']}: {one['test']}\n    {one['why'][:600]}")


if __name__ == "__main__":
    main()
