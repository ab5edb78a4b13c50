"""Writes the table of templates in docs/reference/tools.md: how real chat templates fare with rollout.tools = "auto".

python docs/make_tools.py [--templates NAME=FOLDER ...]

Templates of trl come from the installed package. Others are not part of this repository: unpack them, for instance from
the sdist llama_cpp_python-0.3.36 (vendor/llama.cpp/models/templates), and name their folders. The rows of folders that
are not given stay as they are.
"""

from __future__ import annotations

import argparse
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import StopReason, Turn

HERE = Path(__file__).parent
PAGE = HERE / "reference" / "tools.md"
TEMPLATES = SimpleNamespace(**runpy.run_path(str(HERE / "make_templates.py")))
MARK = "<!-- the rest is made by docs/make_tools.py -->"
TOOLS = (
    ToolSpec(
        "get",
        "Where a name leads.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "a name"},
                "count": {"type": "integer", "description": "how many"},
                "where": {"type": "object", "description": "a place"},
            },
        },
    ),
    ToolSpec("put", "Keeps a name.", {"type": "object", "properties": {"name": {"type": "string"}}}),
)
GET, PUT = ToolCall("get", {"name": "amber"}), ToolCall("put", {"name": "cedar"})
OUTPUTS = {
    "one": Message("assistant", "", calls=(GET,)),
    "parallel": Message("assistant", "", calls=(GET, PUT)),
    "nested": Message("assistant", "", calls=(ToolCall("get", {"count": 3, "where": {"in": ["a", {"b": 1.5}]}}),)),
    "unicode": Message("assistant", "", calls=(ToolCall("get", {"name": "é 本 & <b> 'x'"}),)),
    "thinking": Message("assistant", "", "amber first", (GET,)),
}
SPOKEN = {"granite_20b": '<function_call> {"name": "get", "arguments": {"name": "amber"}}'}
"""By format: one call, as a template wrote it."""
QUESTION = (Message("user", "start amber, links 2"),)
RESULT = "amber leads to cedar"


@dataclass(frozen=True, slots=True)
class Fare:
    """How one template fares."""

    tools: str = ""
    place: str = ""
    shown: str = ""
    parsed: str = ""
    cut: str = ""
    result: str = ""
    following: str = ""
    refused: str = ""

    def row(self, name: str, source: str) -> str:
        cells = (
            [self.refused, *[""] * 6]
            if self.refused
            else [self.tools, self.place, self.shown, self.parsed, self.cut, self.result, self.following]
        )
        return f"| `{name}` | {source} | {' | '.join(cells)} |"


def fare_of(source: str) -> Fare:
    """How a template fares with the format that it gets."""
    tokenizer = TEMPLATES.tokenizer_for(source, seed=0)
    try:
        renderer = Renderer(tokenizer, tools="auto")
        first = renderer.first(QUESTION, TOOLS)
    except ValueError as error:
        return Fare(refused="refused at the start: " + " ".join(str(error).split())[:160].replace("|", "\\|"))
    template = renderer.template
    text = renderer.decode(first.tokens)
    assert all(tool.description in text for tool in TOOLS)
    parsed, one = outputs(renderer, first.tokens)
    result, following = after_call(renderer, first, one)
    return Fare(
        template.tools,
        "content" if template.form.calls == "content" else "tool_calls",
        "template" if template.offers else "ours",
        parsed,
        "fault" if renderer.said(first.tokens, renderer.encode(cut(renderer, one)), TOOLS).fault else "content",
        result,
        following,
    )


def outputs(renderer: Renderer, prompt: np.ndarray) -> tuple[str, np.ndarray]:
    """(which outputs are read as they were meant, the action of the first)."""
    right, notes = 0, []
    one = None
    for name, message in OUTPUTS.items():
        try:
            action = renderer.action(message)
        except ValueError:
            notes.append(f"{name}: the template does not write it")
            continue
        one = action if one is None else one
        read = renderer.said(prompt, action, TOOLS)
        if meant(read) == meant(message):
            right += 1
        else:
            notes.append(f"{name}: {'fault' if read.fault else 'otherwise'}")
    if one is None:  # the template writes white space that no prompt of its own has
        name = renderer.template.tools
        one = np.append(renderer.encode(SPOKEN[name]), np.int32(renderer.end_of_call))
        right = int(meant(renderer.said(prompt, one, TOOLS)) == meant(OUTPUTS["one"]))
        return f"{right} of 1 (the template's own text differs from its prompt)", one
    SPOKEN.setdefault(renderer.template.tools, renderer.decode(renderer.without_end(one).tolist()))
    return f"{right} of {len(OUTPUTS)}" + (f" ({'; '.join(notes)})" if notes else ""), one


def meant(message: Message) -> list[Any]:
    return [(call.name, dict(call.arguments)) for call in message.calls]


def cut(renderer: Renderer, action: np.ndarray) -> str:
    """An output that ends within its arguments."""
    text = renderer.decode(action.tolist())
    return text[: text.rindex("amber") + 2]


def after_call(renderer: Renderer, first: Any, action: np.ndarray) -> tuple[str, str]:
    """(how the result is shown, how the next prompt begins)."""
    size = len(action)
    said = renderer.said(first.tokens, action, TOOLS)
    turn = Turn(first.tokens, action, [-1.0] * size, [0] * size, StopReason.end_token, 0.0, said)
    messages = (*QUESTION, said, *(Message("tool", RESULT) for _ in said.calls))
    prompt = renderer.next(turn, QUESTION, messages, TOOLS, TOOLS)
    shown = RESULT in renderer.decode(prompt.tokens)
    role = "tool message" if renderer.template.form.results == "tool" else "question"
    broke = str(prompt.broke)
    return (role if shown else "missing"), ("extends" if broke == "none" else f"break: {broke}")


def rows_of(source: str, templates: dict[str, str]) -> list[str]:
    rows, later = [], []
    for name, text in templates.items():
        try:
            rows.append(fare_of(text).row(name, source))
        except KeyError:  # no template has written this format yet
            later.append(name)
    return rows + [fare_of(templates[name]).row(name, source) for name in later]


def templates_in(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def head() -> str:
    columns = [
        "template",
        "from",
        "format",
        "calls in",
        "definitions",
        "outputs read",
        "cut off",
        "result",
        "next prompt",
    ]
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", nargs="*", default=[], metavar="NAME=FOLDER")
    given = dict(one.split("=", 1) for one in parser.parse_args().templates)
    text, _, made = PAGE.read_text().partition(MARK)
    kept = [line for line in made.splitlines() if line.startswith("| `") and line.split("|")[2].strip() not in given]
    rows = [line for line in kept if line.split("|")[2].strip() != "trl"]
    rows += rows_of("trl", {n: t for n, t in TEMPLATES.templates().items() if not n.endswith("_training")})
    for name, folder in given.items():
        rows += rows_of(name, templates_in(Path(folder)))
    formats = {row.split("|")[3].strip() for row in rows if "refused" not in row}
    works = sum("refused" not in row for row in rows)
    count = (
        f"{len(rows)} templates, {works} of which work, in {len(formats)} formats; the others are refused at the start."
    )
    table = head() + "\n".join(sorted(rows, key=lambda row: (row.split("|")[3], re.sub(r"[|` ]", "", row).lower())))
    PAGE.write_text(f"{text}{MARK}\n\n{count}\n\n{table}\n")


if __name__ == "__main__":
    main()
