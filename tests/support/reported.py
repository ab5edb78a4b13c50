"""Small run folders for reports and comparisons, and what their pages must never hold."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from support.recorded import attempt, record
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.archive import write_step
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import clustered
from turnwise.runs.tracker import JsonLines

CONFIG: dict[str, Any] = {"out": "runs/a", "steps": 2, "env": [{"name": "hops"}], "rollout": {"success_threshold": 1.0}}

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "main", "section", "div", "span", "h1", "h2", "h3", "p", "b"),
    *("small", "i", "ul", "li", "pre", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("figure", "figcaption", "svg", "g", "line", "polyline", "polygon", "circle", "text"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "id", "scope", "open", "role", "aria-label"),
    *("viewbox", "points", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "text-anchor"),
}


class SeenPage(HTMLParser):
    """Every element and attribute of a page, and its text outside the style."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.inside = ""
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        (self.styles if self.inside == "style" else self.texts).append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def check_page(page: bytes) -> SeenPage:
    """The page, once it is known to hold no script, no handler, no style of a text, and nothing from elsewhere."""
    seen = SeenPage(page)
    assert set(seen.elements) <= ELEMENTS, set(seen.elements) - ELEMENTS
    assert {name for name, _ in seen.attributes} <= ATTRIBUTES, {name for name, _ in seen.attributes} - ATTRIBUTES
    assert seen.elements.count("style") == 1
    [style] = seen.styles
    assert not any(word in style for word in ("url(", "@import", "expression", "</"))
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in seen.attributes
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in seen.text)
    return seen


def evaluate(folder: RunFolder, version: int, kind: str, tasks: dict[str, Sequence[float]]) -> dict[str, float]:
    """Record an evaluation in which each task's attempts were paid so; its metrics."""
    groups = [record(task, *map(attempt, totals), kept=False).group for task, totals in tasks.items()]
    write_evaluation(folder.evaluations, version, kind, groups, 1.0, str)
    tallies = [(sum(total >= 1.0 for total in totals), len(totals)) for totals in tasks.values()]
    attempts = sum(tried for _, tried in tallies)
    low, high = clustered(tallies)
    found = {"success": sum(done for done, _ in tallies) / attempts, "success_low": low, "success_high": high}
    found |= {"attempts": attempts, "tasks": len(tallies), "version": version}
    return {f"eval/{kind}/{name}": float(value) for name, value in found.items()}


def step_metrics(success: float) -> dict[str, float]:
    return {
        "success": success,
        "reward/mean": success,
        "entropy": 1.0 - success / 2,
        "ratio": 1.0,
        "trajectory/count": 4.0,
        "trajectory/failed": 0.0,
        "trajectory/action_tokens": 4.0,
        "turn/count": 8.0,
        "turn/prompt_tokens": 6.0,
        "turn/action_tokens": 2.0,
        "tokens/planned": 40.0,
        "tokens/action": 16.0,
        "groups/dropped": 0.0,
        "status/finished": 3.0,
        "status/too_long": 1.0,
        "status/failed": 0.0,
        "seconds/step": 2.0,
        "seconds/wait_for_groups": 1.5,
    }


def recorded_run(
    path: Path, after: dict[str, Sequence[float]] | None = None, config: dict[str, Any] | None = None
) -> RunReader:
    """A run of two steps with an evaluation before and, where `after` has its tasks, one after them."""
    folder = RunFolder.create(path, CONFIG if config is None else config)
    log = JsonLines(folder.metrics)
    log.log(0, evaluate(folder, 0, "sampled", {"e": [0.0], "f": [0.0], "g": [1.0], "h": [0.0]}))
    for step, success in ((1, 0.5), (2, 0.75)):
        groups = [record("a", attempt(1.0), attempt(0.0)), record("b", attempt(1.0), attempt(2 * success - 1.0))]
        write_step(folder.archive, step, groups)
        found = evaluate(folder, 2, "sampled", after) if after and step == 2 else {}
        log.log(step, {**step_metrics(success), **found})
    return RunReader.open(path)
