"""Runs beside each other: what differs between their recipes, what each achieved, what each cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.inspect.flat_recipe import differing, toml_text
from turnwise.inspect.held_out import KINDS, Contrast, HeldOut, Tallies, contrast, tallies_of
from turnwise.inspect.overview import RunOverview
from turnwise.inspect.report.page import p_words
from turnwise.inspect.report.tables import duration
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.screen import table
from turnwise.runs.transcript import visible

VALUE_WIDTH = 48
"""Characters of a value of a recipe in the terminal."""


@dataclass(frozen=True, slots=True)
class AgainstFirst:
    """The held-out success of a run after training against that of the first run."""

    kind: str
    name: str
    found: Contrast | None
    """None where one of them has no evaluation after training."""
    overlap: bool | None
    """Whether the two intervals overlap; None where there are not two."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs in the order in which they were named; the first is what the others are compared with."""

    runs: tuple[RunReader, ...]
    overviews: tuple[RunOverview, ...]
    names: tuple[str, ...]
    """Different ones."""
    recipes: dict[str, tuple[Any, ...]]
    """Keys whose values differ, with the value of each run."""
    against_first: tuple[AgainstFirst, ...]

    @classmethod
    def of(cls, runs: Sequence[RunReader]) -> RunComparison:
        for run in runs:
            run.refresh()
        overviews = tuple(RunOverview.of(run) for run in runs)
        names = names_of(runs)
        found = tuple(
            against_first(kind, name, runs[0], overviews[0], run, overview)
            for kind in KINDS
            for name, run, overview in zip(names[1:], runs[1:], overviews[1:], strict=True)
            if overviews[0].after(kind) is not None or overview.after(kind) is not None
        )
        return cls(tuple(runs), overviews, names, differing([run.config for run in runs]), found)

    def numbers(self) -> Iterator[tuple[str, ...]]:
        """Rows of what each run achieved and cost: a label and a cell for each run."""
        for kind in KINDS:
            if any(overview.held_out.get(kind) for overview in self.overviews):
                for when in ("before", "after"):
                    evaluations = [getattr(overview, when)(kind) for overview in self.overviews]
                    yield f"{kind}, {when}", *map(success_words, evaluations)
        yield "steps", *(f"{one.step:,}" + ("" if one.is_over else " so far") for one in self.overviews)
        yield "updates", *("-" if one.updates is None else f"{one.updates:,}" for one in self.overviews)
        yield "attempts", *(f"{one.attempts:,}" for one in self.overviews)
        yield "sampled tokens", *(f"{one.sampled_tokens:,}" for one in self.overviews)
        yield "time", *(duration(one.seconds) for one in self.overviews)

    def describe(self) -> list[str]:
        """Lines for a terminal."""
        lines = ["recipes: no difference"]
        if self.recipes:
            cells = [[shown(name), *(shown(toml_text(one)) for one in values)] for name, values in self.recipes.items()]
            lines = table(("recipe", *self.names), cells)
        lines += ["", *table(("held-out success, cost", *self.names), list(self.numbers())), ""]
        return [*lines, *(contrast_line(one, self.names[0]) for one in self.against_first)]


def names_of(runs: Sequence[RunReader]) -> tuple[str, ...]:
    """The names of the folders; the whole paths where names are the same, with a number where paths are."""
    names = [visible(run.folder.path.resolve().name) for run in runs]
    if len(set(names)) < len(names):
        names = [visible(str(run.folder.path)) for run in runs]
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return tuple(names)


def against_first(
    kind: str, name: str, first: RunReader, first_overview: RunOverview, run: RunReader, overview: RunOverview
) -> AgainstFirst:
    one, two = first_overview.after(kind), overview.after(kind)
    if one is None or two is None:
        return AgainstFirst(kind, name, None, None)
    found = contrast(one, two, newest_tallies(first, one), newest_tallies(run, two))
    known = not any(math.isnan(end) for end in (one.low, one.high, two.low, two.high))
    return AgainstFirst(kind, name, found, one.low <= two.high and two.low <= one.high if known else None)


def newest_tallies(run: RunReader, one: HeldOut) -> Tallies:
    return tallies_of(run, one.kind, one.version)


def success_words(one: HeldOut | None) -> str:
    return "-" if one is None else f"{one.success:.1%} ({one.low:.1%} to {one.high:.1%})"


OVERLAP = {True: "intervals overlap; ", False: "intervals do not overlap; ", None: ""}
"""What is said of two intervals; nothing where one is not known."""


def contrast_line(one: AgainstFirst, first: str) -> str:
    """How a run differs from the first, in a sentence."""
    if one.found is None:
        reason = "an evaluation after training, or its attempts, are not there"
        return f"{one.kind}: {one.name} cannot be compared with {first}: {reason}"
    found = one.found
    verdict = "differs" if found.is_clear else "no clear difference"
    return (
        f"{one.kind}: {one.name} against {first}: {100 * found.change:+.1f} points "
        f"({100 * found.low:+.1f} to {100 * found.high:+.1f}), p {p_words(found.p_value)}, {verdict}; "
        f"{OVERLAP[one.overlap]}{found.test}"
    )


def shown(text: str) -> str:
    text = visible(text).replace("\n", "␊")
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 1]}…"
