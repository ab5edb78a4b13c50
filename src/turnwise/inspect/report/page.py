"""The report of a run: one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from turnwise import __version__
from turnwise.inspect.held_out import KINDS, Contrast, HeldOut
from turnwise.inspect.overview import RunOverview
from turnwise.inspect.report.conversation import attempts_shown
from turnwise.inspect.report.curves import curves
from turnwise.inspect.report.layouts import layout_table
from turnwise.inspect.report.markup import Child, Html, document, element, joined, note, section
from turnwise.inspect.report.tables import (
    cost_tables,
    duration,
    events_list,
    machine_table,
    recipe_table,
    status_table,
)
from turnwise.inspect.run_reader import RunReader

MOST_FILES = 5
"""Unreadable files that are named."""


def report(run: RunReader) -> bytes:
    """The whole report of a run as far as it is, in UTF-8."""
    run.refresh()
    overview = RunOverview.of(run)
    title = f"{', '.join(overview.environments) or 'a run'}: {overview.name}"
    return document(
        f"{title} · turnwise report",
        element("h1", title),
        headline(run, overview),
        missing_list(run),
        section("Curves", curves(run, overview.held_out)),
        section("How attempts ended", status_table(run)),
        section("Attempts", attempts_shown(run)),
        section("Cost", cost_tables(run, overview), layout_table(run)),
        section("Recipe", recipe_table(run)),
        section("Machine and versions", machine_table(run)),
        section("Events", events_list(run)),
        note(f"Written by turnwise {__version__} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."),
    )


def headline(run: RunReader, overview: RunOverview) -> Html:
    """Success before and after with intervals, and what it took."""
    cards = [success_card(run, overview, kind) for kind in KINDS if overview.held_out.get(kind)]
    of_all = f" of {overview.steps:,}" if overview.steps else ""
    updates = f"{overview.updates:,} updates" if overview.updates is not None else f"{overview.step:,} steps so far"
    work = card("work", updates, f"{overview.step:,}{of_all} steps, {overview.attempts:,} attempts")
    spent = card("time", duration(overview.seconds), f"{overview.sampled_tokens:,} tokens sampled in training")
    state = "The run is over." if overview.is_over else f"Not over yet: step {overview.step:,}{of_all} is logged."
    return joined([element("p", state, class_="muted"), element("div", *cards, work, spent, class_="cards")])


def card(label: str, large: Child, *small: Child) -> Html:
    lines = (element("small", line) for line in small)
    return element("div", element("small", label), element("b", large), *lines, class_="card")


def success_card(run: RunReader, overview: RunOverview, kind: str) -> Html:
    before, after = overview.before(kind), overview.after(kind)
    newest = overview.held_out[kind][-1]
    small = [interval_words(one) for one in (before, after) if one is not None] or [interval_words(newest)]
    gain = overview.gain(run, kind)
    if gain is not None:
        small.append(contrast_words(gain))
    if before is not None and after is not None:
        large = f"{before.success:.1%} → {after.success:.1%}"
    else:
        large = f"{newest.success:.1%}"
    return card(f"held-out success, {kind}", large, *small)


def interval_words(one: HeldOut) -> str:
    when = "before training" if one.version == 0 else f"after step {one.version:,}"
    return f"{when}: {one.low:.1%} to {one.high:.1%}, {one.attempts:,} attempts at {one.tasks:,} tasks"


def contrast_words(found: Contrast) -> str:
    """A difference with its interval and its test, in one line."""
    return (
        f"change {100 * found.change:+.1f} points ({100 * found.low:+.1f} to {100 * found.high:+.1f}), "
        f"p {p_words(found.p_value)}; {found.test}"
    )


def p_words(p_value: float) -> str:
    return "< 0.0001" if p_value < 1e-4 else f"= {p_value:.2g}"


# ---------------------------------------------------------------- what is missing


def missing_list(run: RunReader) -> Html:
    """What the report would say if files were there and whole; nothing where all are."""
    found = list(missing(run))
    if not found:
        return Html()
    lines = element("ul", *(element("li", line) for line in found))
    return element("div", element("p", "Missing or unreadable:"), lines, class_="warning")


def missing(run: RunReader) -> Iterator[str]:
    """A sentence for each file that is not there or not whole."""
    folder = run.folder
    if not run.config:
        yield "config.json cannot be read: the recipe is unknown."
    if not folder.metrics.is_file():
        yield "metrics.jsonl is not there: there are no curves and no costs."
    elif run.metrics.num_unreadable:
        yield f"metrics.jsonl: {run.metrics.num_unreadable:,} lines are no JSON objects and are left out."
    if folder.summary.is_file() and not run.summary:
        yield "summary.json cannot be read."
    if not folder.machine.is_file():
        yield "machine.json is not there: machine and versions are unknown."
    if not len(run.attempts):
        yield "there are no attempts: the report has no conversations and no intervals over groups."
    unreadable = list(run.attempts.unreadable.values())
    yield from unreadable[:MOST_FILES]
    if len(unreadable) > MOST_FILES:
        yield f"{len(unreadable) - MOST_FILES:,} more files of attempts cannot be read."
    if run.text_of.tokenizer is None:
        yield "no checkpoint has a tokenizer: prompts are shown as the numbers of their tokens."
