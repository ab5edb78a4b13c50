"""The page as one file: its modules in one script, and the answers to all that it may ask inside.

The same page as the server's, so a file shows what the viewer shows. The script may run by its checksum only, and may
ask nobody.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.inspect.attempts import TRAINING, AttemptKey, Query
from turnwise.view.api import answer_runs
from turnwise.view.attempt_page import attempt_page
from turnwise.view.group_page import tree_page
from turnwise.view.page_files import page_files
from turnwise.view.table import attempts_table
from turnwise.view.token_page import token_page
from turnwise.view.watched_run import WatchedRun, WatchedRuns

IMPORT = re.compile(r'^import (\{[^}]*\}|\w+) from "(\./[^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (async function|function|const) (\w+)", re.MULTILINE)
EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?\s*$")
MOST_BYTES = 30_000_000
"""Bytes of answers after which no more attempts of a step are put into a file."""


def attempt_file(runs: WatchedRuns, run: WatchedRun, key: AttemptKey) -> str:
    """One attempt, with its tokens and the tree of its group."""
    answers = dict(attempt_answers(run, key))
    answers[f"/api/{run.name}/tree/{key.kind}/{key.step}/{key.group}"] = tree_page(run, key.kind, key.step, key.group)
    return page_with(runs, answers, f"#/attempt/{run.name}/{key}")


def step_file(runs: WatchedRuns, run: WatchedRun, kind: str, step: int) -> tuple[str, int, int]:
    """(the attempts of a step, with the tokens of as many as fit; how many those are; how many attempts it has)."""
    page = run.reader.attempts.select(Query(kind, step, step, descending=False), limit=500)
    if not page.total:
        raise ValueError(f"{run.reader.folder.path} has no attempts of step {step} ({kind})")
    asked = {"kind": kind, "first_step": str(step), "last_step": str(step), "limit": "500"}
    answers: dict[str, Any] = {f"/api/{run.name}/attempts": attempts_table(run, asked)}
    size = whole = 0
    for row in page.rows:
        more = dict(attempt_answers(run, row.key))
        size += len(json.dumps(more))
        if size > MOST_BYTES:
            break
        answers |= more
        whole += 1
    return page_with(runs, answers, f"#/attempts/{run.name}"), whole, page.total


def attempt_answers(run: WatchedRun, key: AttemptKey) -> Iterator[tuple[str, Any]]:
    """What the page asks to show an attempt."""
    yield f"/api/{run.name}/attempt/{key}", attempt_page(run, key)
    place: Mapping[str, int] | None = {"turn": 0, "from": 0}
    while place is not None:
        page = token_page(run, key, {name: str(value) for name, value in place.items()})
        yield f"/api/{run.name}/tokens/{key}?turn={place['turn']}&from={place['from']}", page
        place = page["next"]


def step_of(text: str) -> tuple[str, int]:
    """(kind, step) of "12" or "greedy/50"."""
    kind, _, number = text.rpartition("/")
    if not number.isascii() or not number.isdigit():
        raise ValueError(f'--step {text}: write a training step, for instance 12, or an evaluation, "greedy/50"')
    return kind or TRAINING, int(number)


# ---------------------------------------------------------------- the file


def page_with(runs: WatchedRuns, answers: Mapping[str, Any], start: str) -> str:
    """The page with answers in it, which opens at `start`."""
    files = page_files()
    script = bundle()
    style = "\n".join(files[path].content.decode() for path in ("/vendor/uPlot.min.css", "/style.css"))
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{checksum}'; style-src 'unsafe-inline'; img-src data:"
    state = answer_runs(runs, {}, {})
    # Where the folders are on this machine is nothing for those who get the file.
    state["runs"] = [run | {"where": "", "trouble": []} for run in state["runs"]]
    known = {"/api/runs": state, **answers}
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>turnwise view</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n"
        '<div id="page"><noscript>This page needs JavaScript.</noscript></div>\n'
        f'<script type="application/json" id="answers" data-start="{start}">{inert(known)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def inert(value: Any) -> str:
    """JSON that cannot end the element it stands in, in ASCII: "<" and "&" are escapes too."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def bundle() -> str:
    """All modules as one script: each is a function that returns its exports, after those that it imports."""
    modules = {path: file.content.decode() for path, file in page_files().items() if path.endswith(".js")}
    done: dict[str, str] = {}

    def add(path: str, above: tuple[str, ...]) -> None:
        if path in above:
            raise ValueError(f"modules of the page import in a circle: {' '.join((*above, path))}")
        if path in done:
            return
        for _, target in IMPORT.findall(modules[path]):
            add(resolved(path, target), (*above, path))
        done[path] = as_function(path, modules[path])

    add("/main.js", ())
    script = "(() => {\n" + "\n".join(done.values()) + "\n})();\n"
    assert "</script" not in script.lower()
    assert "<!--" not in script
    return script


def as_function(path: str, text: str) -> str:
    """A module as a constant with its exports."""

    def imported(found: re.Match[str]) -> str:
        names, target = found.groups()
        source = constant(resolved(path, target))
        return f"const {names} = {source};" if names.startswith("{") else f"const {names} = {source}.default;"

    if listed := EXPORT_LIST.search(text):  # a library, which lists its exports at its end
        pairs = (part.split(" as ") for part in listed[1].split(",") if part.strip())
        exports = {pair[-1].strip(): pair[0].strip() for pair in pairs}
        text = text[: listed.start()]
    else:
        exports = {name: name for _, name in EXPORT.findall(text)}
        text = EXPORT.sub(r"\1 \2", IMPORT.sub(imported, text))
    inside = ", ".join(f"{name}: {value}" for name, value in exports.items())
    return f"const {constant(path)} = (() => {{\n{text}\nreturn {{ {inside} }};\n}})();"


def constant(path: str) -> str:
    return "module" + re.sub(r"\W", "_", path)


def resolved(path: str, target: str) -> str:
    """The address of an import; modules stand in one folder or below it."""
    return path.rpartition("/")[0] + target.removeprefix(".")
