"""Every code block of the docs: Python runs, recipes are read, commands are parsed, and those that can be run are.

A block that cannot run here says why in a comment directly above it: <!-- not run: needs a GPU -->.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.code_blocks import (
    SHELL,
    Block,
    all_blocks,
    blocks_of,
    commands_of,
    lay_out,
    only_defines,
    pages,
    turnwise_commands,
)
from support.paths import ROOT
from turnwise.cli.commands import main
from turnwise.cli.parser import parsed
from turnwise.recipe.parse import apply_override, load_recipe, parse_recipe

OTHERS = {"diff", "dockerfile", "html", "jinja", "js", "json", "jsonl", "text", "xml", "yaml"}
"""Languages of blocks that are looked at, not run."""
MOST_NOT_RUN = 20
PYTHON = [block for block in all_blocks("python") if not block.reason]
PYTHON_PAGES = sorted({block.page for block in PYTHON})
DEFINING = [page for page in PYTHON_PAGES if all(only_defines(block.text) for block in PYTHON if block.page == page)]


def name(value: Any) -> str:
    return value.where if isinstance(value, Block) else str(Path(value).relative_to(ROOT))


# ---------------------------------------------------------------- what there is


def test_every_block_is_of_a_known_language() -> None:
    strange = [
        block.where
        for page in pages()
        for block in blocks_of(page)
        if block.language not in SHELL | OTHERS | {"python", "toml"}
    ]
    assert not strange


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    found = {block.where: block.reason for page in pages() for block in blocks_of(page) if block.reason}
    assert len(found) <= MOST_NOT_RUN, found
    assert all(len(reason) > 10 for reason in found.values())
    comments = sum(page.read_text().count("<!-- not run") for page in pages())
    assert comments == len(found), "a comment stands directly above its block"


# ---------------------------------------------------------------- Python


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_what_python_imports_of_turnwise_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text, block.where)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "turnwise":
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "turnwise":
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), block.where


def run_python(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page one after the other, as a person who copies them would, in an empty folder."""
    monkeypatch.chdir(folder)
    module = type(sys)("page")  # a module: dataclasses and type hints look names up there
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks_of(page):
        if block.language == "python" and not block.reason:
            exec(compile(block.text, block.where, "exec", dont_inherit=True), module.__dict__)


@pytest.mark.parametrize("page", DEFINING, ids=name)
def test_python_that_only_defines_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(page, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(page, tmp_path, monkeypatch)


# ---------------------------------------------------------------- recipes


def whole(tree: dict[str, Any]) -> dict[str, Any]:
    """A recipe of what a page shows of one."""
    entries = tree.setdefault("env", [{"name": "hops"}])
    for entry in [entries] if isinstance(entries, dict) else entries:
        entry.setdefault("name", "hops")
    return tree


@pytest.mark.parametrize("block", [block for block in all_blocks("toml") if not block.reason], ids=name)
def test_a_recipe_of_the_docs_is_read(block: Block) -> None:
    parse_recipe(whole(tomllib.loads(block.text)), block.where)


# ---------------------------------------------------------------- commands


def recipe_named(block: Block, what: str, overrides: list[str]) -> None:
    """Check a recipe that a command names, with its overrides: one that is shipped, or one of the page's own."""
    path = Path(what)
    if path.suffix != ".toml" or path.parent == Path("recipes"):
        load_recipe(ROOT / path if path.suffix else path, overrides)
        return
    shown = [tomllib.loads(other.text) for other in blocks_of(block.page) if other.language == "toml"]
    tree = whole(next((tree for tree in shown if "steps" in tree), {}))
    for override in overrides:
        apply_override(tree, override)
    parse_recipe(tree, block.where)


@pytest.mark.parametrize("block", [block for block in all_blocks(*SHELL) if turnwise_commands(block)], ids=name)
def test_commands_are_parsed_and_their_keys_exist(block: Block) -> None:
    for arguments in turnwise_commands(block):
        chosen = parsed(arguments)
        words = [word for word in (getattr(chosen, "recipe", None), *getattr(chosen, "overrides", ())) if word]
        overrides = [word for word in words if "=" in word]
        assert all("=" in word for word in words[1:]), arguments
        if chosen.command in ("train", "sft") and words and "=" not in words[0]:
            recipe_named(block, words[0], overrides)
        else:
            tree = whole({})
            for override in overrides:
                apply_override(tree, override)
            parse_recipe(tree, block.where)


def test_other_programs_of_commands_are_there() -> None:
    """make has the target, an extra is one of pyproject.toml, a script has the options."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.base"}
    seen = set()
    for block in all_blocks(*SHELL):
        for program, *arguments in commands_of(block):
            seen.add(program)
            if program == "make":
                assert {word for word in arguments if "=" not in word} <= targets, block.where
            elif program == "pip":
                for found in re.findall(r"turnwise\[([\w,-]+)\]", " ".join(arguments)):
                    assert set(found.split(",")) <= extras.keys(), block.where
            elif program == "python" and arguments[0].endswith(".py"):
                script = (ROOT / arguments[0]).read_text()
                assert all(word in script for word in arguments if word.startswith("--")), block.where
    assert seen == {"make", "pip", "python", "turnwise"}


SMALL = [
    "groups_per_step=4",
    "rollout.group_size=2",
    "model.layers=1",
    "sft.updates=4",
    "sft.batch=4",
    "evaluation.every=0",
    "evaluation.final_tasks=4",
    "checkpoints.every=10",
]
FEWER = ["steps=1", *SMALL]
LEARNING = [
    "groups_per_step=4",
    "evaluation.every=0",
    "evaluation.final_tasks=4",
    "checkpoints.every=10",
    "env.0.tasks.links=[1,2]",
]
"""The quickstart with its own model and warm start, and short chains: without success there is no credit, and nothing
to verify."""
STAYS = {"serve", "retrieve"}
"""Commands that go on until somebody stops them."""


def runnable(block: Block) -> list[list[str]]:
    """The commands of a block that end by themselves."""
    if block.reason:
        return []
    return [
        words
        for words in turnwise_commands(block)
        if words[0] not in STAYS and (words[0] != "view" or "--html" in words)
    ]


def test_cheap_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that read what comes with turnwise."""
    monkeypatch.chdir(tmp_path)
    found = [words for block in all_blocks(*SHELL) for words in runnable(block) if words[0] in ("recipes", "data")]
    assert found
    for words in found:
        assert main(words) == 0


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the docs are about: runs of the quickstart, and a model."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        patch.setenv("TURNWISE_STATE", str(folder / "state"))
        assert main(["train", "quickstart", *LEARNING]) == 0
        assert main(["train", "quickstart", *FEWER, "out=runs/other", "seed=1"]) == 0
        assert main(["sft", "quickstart", *LEARNING, "out=models/warm"]) == 0
    for copy in ("a", "b", "c", "lower-rate"):
        shutil.copytree(folder / "runs" / "other", folder / "runs" / copy)
    return folder


def smaller(words: list[str]) -> list[str]:
    """A command of the docs, at the size of a test."""
    if words[0] == "eval":
        return [word if not word.isdigit() else "2" for word in words]
    if words[0] not in ("train", "sft") or "--resume" in words:
        return words
    if "--from" in words:
        return [*words, *(["--min-reward", "0", "sft.updates=4"] if words[0] == "sft" else ["steps=1"])]
    if "schedule.overlap_evaluations=true" in words:  # refused where nothing is evaluated during training
        return [*words, *SMALL, "steps=2", "evaluation.every=1"]
    return [*words, *FEWER]


def written_by(words: list[str]) -> list[str]:
    """The folders that a command needs to be free."""
    named = [word[4:] for word in words if word.startswith("out=")]
    is_new = words[0] == "train" and not {"--resume", "--from"} & set(words)
    return named or ([f"runs/{words[1].removesuffix('.toml')}"] if is_new and len(words) > 1 else [])


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if any(map(runnable, blocks_of(page)))], ids=name)
def test_the_commands_of_a_page_run(
    page: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(workshop, folder)
    lay_out(page, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("TURNWISE_CACHE", str(folder / "cache"))  # has the warm start of the runs
    before = set(sys.modules)
    for block in blocks_of(page):
        for words in runnable(block) if block.language in SHELL else []:
            for out in written_by(words):
                shutil.rmtree(out, ignore_errors=True)
            monkeypatch.setattr("sys.stdin", io.StringIO("answer nobody\n" * 50))
            code = main(smaller(words))
            assert code in ((0, 1) if words[0] == "why" else (0,)), (block.where, words, capsys.readouterr().err)
    for added in set(sys.modules) - before:
        if str(getattr(sys.modules[added], "__file__", "")).startswith(str(folder)):
            sys.modules.pop(added)
