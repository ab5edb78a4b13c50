"""How many outputs of the tests of public parsers our readers read as those tests expect.

    python benchmarks/tool_formats.py --vllm PATH --vllm-parser PATH --sglang PATH --llama-cpp PATH --mlx-lm PATH
        --lmdeploy PATH --transformers PATH --ollama PATH [--failures]
    python benchmarks/tool_formats.py --dynamo PATH --dynamo-crate PATH --smg PATH --mistral-rs PATH [--failures]
    python benchmarks/tool_formats.py --vllm-mlx PATH --rapid-mlx PATH [--failures]

Nothing is copied by hand. The test files of vLLM and SGLang run as they are, in a process of their own, with our
readers in place of the parsers: modules of those projects are replaced by stand-ins, and statements about content
(whose white space is each project's own) are left out. A test counts if it gave a whole output to a parser, and not if
it streams. Of the tests of llama.cpp (C++) and the tables of ollama (Go) outputs and expected calls are read from the
source. The tests of Rust projects run in a small interpreter, and dynamo's fixtures are YAML; there one output that
several tests have counts once. An output is contested if dynamo, vLLM and SGLang do not all make the same calls of it
(the fixtures record what each makes), if two of the tests expect different calls, or if its test is met as soon as
values that no schema declares are read the other way, as JSON or as text, on which the projects differ. How the tests
of vllm-mlx and Rapid-MLX are taken is said in tool_format_peers.py. Where a test expects no call of an output and our
reader makes none, the output is read rightly, though the model hears a fault; those are counted as "heard".

A call whose expected arguments are no JSON object cannot be made; it is read rightly if the reader names a fault.

A call to a tool that is not offered is read here and has a fault. Some parsers hand such calls on and others drop them,
within one project too, so either expectation is met; the last column counts the outputs that have such a call.
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
    "mlx-lm": ("tests/test_tool_parsing.py",),
    "lmdeploy": ("tests/test_lmdeploy/serve/parsers",),
    "transformers": ("tests/utils/test_chat_parsing.py",),
}
PEERS = ("vllm-mlx", "rapid-mlx")
LATER = ("dynamo", "dynamo-crate", "smg", "mistral-rs", *PEERS)


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
    one = (source / folder).is_file()
    inside = folder.parent if one else folder
    if inside.parts[0] == "test" or inside.parts[:2] == ("tests", "utils"):
        inside = Path("other_tests")  # test is a package of Python, and tests.utils one of vLLM
    for path in [source / folder] if one else sorted((source / folder).glob("*.py")):
        place = target / inside
        place /= path.name
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
    """The outcome of every test that gave a parser a whole output. Tests that failed and saw a call to a tool that is
    not offered run once more, with such calls handed on."""
    with tempfile.TemporaryDirectory() as made:
        target = Path(made)
        for folder in FOLDERS[project]:
            if (source / folder).exists():
                prepared(source, Path(folder), target)
        found = numbered(run_tests(project, source, target, [made]))
        again = {key: one for key, one in found.items() if one["outcome"] == "wrong" and one["refused"]}
        if not again:
            return list(found.values())
        tests = sorted({one["test"] for one in again.values()})
        later = numbered(run_tests(project, source, target, tests, TOOL_FORMATS_HANDED_ON="1"))
        return list((found | {key: later[key] for key in again if key in later}).values())


def numbered(found: list[dict[str, str]]) -> dict[tuple[str, int], dict[str, str]]:
    """Outcomes by their test and their number in it."""
    seen: Counter[str] = Counter()
    by_place = {}
    for one in found:
        by_place[one["test"], seen[one["test"]]] = one
        seen[one["test"]] += 1
    return by_place


def run_tests(project: str, source: Path, target: Path, tests: list[str], **more: str) -> list[dict[str, str]]:
    """The outcomes of tests in a process of their own."""
    report = target / "report.json"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tool_format_stubs", "-c", "/dev/null", "--rootdir", str(target),
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--continue-on-collection-errors", *tests,
    ]  # fmt: skip
    here = Path(__file__).parent
    environment = {
        "PYTHONPATH": ":".join([str(target), str(here), str(here.parent / "src")]), "PATH": "/usr/bin:/bin",
        "TOOL_FORMATS_REPORT": str(report), "TOOL_FORMATS_SOURCE": str(source.resolve()), **more,
    }  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=target, capture_output=True, text=True, check=False)
    if os.environ.get("SHOW"):
        print(done.stdout)
    if not report.exists():
        raise ValueError(f"the tests of {project} did not run: {done.stdout[-800:]} {done.stderr[-800:]}")
    return list(json.loads(report.read_text()))


def table(found: list[dict[str, str]]) -> str:
    """Shares by format."""
    right = Counter(one["format"] for one in found if one["outcome"] == "right")
    total = Counter(one["format"] for one in found)
    refused = Counter(one["format"] for one in found if one["refused"])
    lines = ["| format | outputs | read rightly | share | not offered |", "|---|---|---|---|---|"]
    for name in [*sorted(total), "all"]:
        count = sum(total.values()) if name == "all" else total[name]
        good = sum(right.values()) if name == "all" else right[name]
        names = sum(refused.values()) if name == "all" else refused[name]
        lines.append(f"| {name} | {count} | {good} | {100 * good / max(1, count):.0f} % | {names or ''} |")
    return "\n".join(lines)


def once(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """Every output once. It is read rightly if all its tests are met, and contested if some are and others are not, or
    if one of them is contested."""
    by_key: dict[str, list[dict[str, str]]] = {}
    for one in found:
        by_key.setdefault(one["key"], []).append(one)
    kept = []
    for tests in by_key.values():
        worst = next((one for one in tests if one["outcome"] == "wrong"), tests[0])
        mixed = len({one["outcome"] for one in tests}) > 1 or any(one["contested"] for one in tests)
        kept.append({**worst, "contested": "yes" if mixed else ""})
    return kept


def contested_table(found: list[dict[str, str]]) -> str:
    """Shares by format, of all outputs and of those that are not contested."""
    lines = ["| format | outputs | read rightly | share | not contested | read rightly | share |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in [*sorted({one["format"] for one in found}), "all"]:
        here = [one for one in found if name in (one["format"], "all")]
        cells = []
        for part in (here, [one for one in here if not one["contested"]]):
            good = sum(one["outcome"] == "right" for one in part)
            cells += [str(len(part)), str(good), f"{100 * good / max(1, len(part)):.1f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def unseen(given: argparse.Namespace) -> list[dict[str, str]]:
    """The outcomes of dynamo's fixtures, and of the tests of Rust projects and of those with parsers in Python."""
    from tool_format_crates import PLACES, crate_outcomes
    from tool_format_fixtures import fixture_outcomes

    found = fixture_outcomes(given.dynamo) if given.dynamo is not None else []
    for project in PLACES:
        if (folder := getattr(given, project.replace("-", "_"))) is not None:
            more, left_out = crate_outcomes(project, folder)
            print(f"{project}: {len(more)} outputs, {left_out} not extracted")
            found += more
    for project in PEERS:
        if (folder := getattr(given, project.replace("-", "_"))) is not None:
            from tool_format_peers import peer_outcomes

            more, left_out = peer_outcomes(project, folder)
            print(f"{project}: {len(more)} outputs, {left_out} whose tests say nothing of calls")
            found += more
    kept = once(found)
    print(f"{sum(bool(one.get('heard')) for one in kept)} outputs of which no call is expected are heard faults")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for project in (*FOLDERS, "llama-cpp", "ollama", *LATER):
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
    if given.ollama is not None:
        from tool_format_go import ollama_outcomes

        found += ollama_outcomes(given.ollama)
    if found:
        print(table(found))
    later = unseen(given) if any(getattr(given, name.replace("-", "_")) is not None for name in LATER) else []
    if later:
        print(contested_table(later))
        found += later
    if given.failures:
        for one in found:
            if one["outcome"] != "right":
                print(f"\n{one['format']}: {one['test']}\n    {one['why'][:600]}")


if __name__ == "__main__":
    main()
