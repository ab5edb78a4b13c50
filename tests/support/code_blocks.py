"""The code blocks of the documentation, and what they ask for."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import DOCS, RECIPES, ROOT

SHELL = {"", "bash", "console", "sh", "shell"}
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
SETTING = re.compile(r"\w+=")


@dataclass(frozen=True, slots=True)
class Block:
    """One code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run, of the comment directly above; empty where it is."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and every page of the docs."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        reason = REASON.search(before)
        yield Block(page, before.count("\n") + 1, found[2], found[3], reason[1] if reason else "")


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in pages() for block in blocks_of(page) if block.language in languages]


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without its environment variables. Where lines begin with a prompt,
    the others are output; where none does, lines that begin with a program of ours are commands."""
    text = re.sub(r"\\\n\s*", "", block.text)
    prompted = [line for line in text.splitlines() if re.match(r"\w*\$ ", line)]
    for line in prompted or text.splitlines():
        command = re.sub(r"^\w*\$ +", "", line)
        if not re.match(r"(\w+=\S* +)*(srun .*? )?(\S*/)?(turnwise|make|pip|python) [\w./-]", command):
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a sentence with an apostrophe
            continue
        while SETTING.match(words[0]):
            words.pop(0)
        if words[0] == "srun":
            words = words[words.index("turnwise") :]
        yield [Path(words[0]).name, *words[1:]]


def turnwise_commands(block: Block) -> list[list[str]]:
    """The arguments of each `turnwise` command of a block, without what is done with its output."""
    found = []
    for program, *arguments in commands_of(block):
        if program == "turnwise":
            ends = [arguments.index(mark) for mark in (">", "|", "&") if mark in arguments]
            found.append(arguments[: min(ends, default=None)])
    return found


def only_defines(code: str) -> bool:
    """Whether Python code defines things and does nothing with them; code that cannot be read does not."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return False
    for statement in body:
        constant = isinstance(statement, ast.Assign) and not any(
            isinstance(node, ast.Call) for node in ast.walk(statement.value)
        )
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (isinstance(statement, kinds) or constant or is_docstring):
            return False
    return True


# ---------------------------------------------------------------- files that commands are about


def lay_out(page: Path, folder: Path) -> None:
    """Put the files that a page shows into a folder: modules that it names as module:Class, what `cat` prints, and the
    recipe that a command names, or else the quickstart."""
    blocks = list(blocks_of(page))
    text = "\n".join(block.text for block in blocks)
    for block in blocks:
        if block.language == "python" and not block.reason:
            for module, thing in re.findall(r"\b([a-z_]\w*):(\w+)\b", text):
                if re.search(rf"^(class|def) {thing}\b", block.text, re.MULTILINE):
                    (folder / f"{module}.py").write_text(block.text)
        for file, content in re.findall(r"^\$ cat (\S+)\n(.*?)(?=^\$ |\Z)", block.text, re.DOTALL | re.MULTILINE):
            (folder / file).write_text(content)
    shown = [block.text for block in blocks if block.language == "toml" and "steps" in tomllib.loads(block.text)]
    for block in blocks:
        for words in turnwise_commands(block) if block.language in SHELL else []:
            for word in words:
                if word.endswith(".toml") and "/" not in word and "=" not in word:
                    (folder / word).write_text(shown[0] if shown else (RECIPES / "quickstart.toml").read_text())
