"""The tables of a report: recipe, machine, statuses, cost, events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.inspect.flat_recipe import changed_from_defaults, toml_text
from turnwise.inspect.metric_log import is_finite
from turnwise.inspect.overview import RunOverview, total
from turnwise.inspect.report.curves import STAGES
from turnwise.inspect.report.line_chart import number
from turnwise.inspect.report.markup import Child, Html, element, folded, joined, note, table, text
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.machine import read_machines

RECIPE_VALUE = 400
"""Characters of one value of the recipe that are shown."""
WHOLE_RECIPE = 40_000
"""Characters of the whole recipe that are shown."""
STATUS_ROWS = 10
EVENT_BYTES, EVENT_LINES, EVENT_LENGTH = 200_000, 100, 400
"""Of events.log: what is read from its end, how many lines are shown, and how much of each."""


# ---------------------------------------------------------------- recipe and machine


def recipe_table(run: RunReader) -> Html:
    """What the recipe says beside the defaults, and all of it folded."""
    if not (config := run.config):
        return note("config.json cannot be read.")
    try:
        changed = changed_from_defaults(config)
    except ValueError:
        return note("The defaults of this version do not fit the recipe.")
    rows = [
        (name, text(toml_text(value), RECIPE_VALUE), text(toml_text(default), RECIPE_VALUE))
        for name, (value, default) in changed.items()
    ]
    whole = element("pre", text(run.folder.config.read_text(errors="replace"), WHOLE_RECIPE))
    return joined(
        [
            table(("key", "value", "default"), rows, "words recipe"),
            folded("The whole recipe, as config.json has it", whole),
        ]
    )


def machine_table(run: RunReader) -> Html:
    """What the run was computed on and with; a column for each machine where a resume changed it."""
    machines = read_machines(run.folder.machine)
    if not machines:
        return note("machine.json is not there or cannot be read.")
    described = [dict(described_machine(one)) for one in machines]
    names = dict.fromkeys(name for one in described for name in one)
    head = ("", *(f"from step {one['step']}" for one in machines)) if len(machines) > 1 else ("", "")
    return table(
        head, [(name, *(text(one.get(name, "-"), RECIPE_VALUE) for one in described)) for name in names], "words"
    )


def described_machine(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of one entry of machine.json."""
    yield (
        "turnwise",
        f"{machine.get('turnwise', '-')}" + (f", commit {machine['commit']}" if "commit" in machine else ""),
    )
    yield "python", str(machine.get("python", "-"))
    packages = machine.get("packages")
    for name, version in packages.items() if isinstance(packages, dict) else ():
        yield str(name), str(version)
    yield "processor", f"{machine.get('cpu', '-')}, {machine.get('cores', '-')} cores"
    if is_finite(size := machine.get("memory")):
        yield "memory", f"{size / 2**30:.1f} GiB"
    gpus = machine.get("gpus")
    yield "GPUs", ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "none"
    yield "platform", str(machine.get("platform", "-"))


# ---------------------------------------------------------------- statuses


def status_table(run: RunReader) -> Html:
    """How training attempts ended, over time: a row for some steps together."""
    lines = [line for line in run.metrics.lines if any(name.startswith("status/") for name in line)]
    names = sorted({name for line in lines for name in line if name.startswith("status/") and amount(line, name)})
    if not lines:
        return note("No step is logged yet.")
    size = math.ceil(len(lines) / STATUS_ROWS)
    rows = [
        status_row(lines[start : start + size], names, steps_of(lines[start : start + size]))
        for start in range(0, len(lines), size)
    ]
    head = ("steps", *(name.removeprefix("status/").replace("_", " ") for name in names), "attempts")
    return table(head, [*rows, status_row(lines, names, "all")] if len(rows) > 1 else rows)


def status_row(lines: Sequence[Mapping[str, Any]], names: Sequence[str], label: str) -> tuple[str, ...]:
    counts = [math.fsum(amount(line, name) for line in lines) for name in names]
    every = math.fsum(counts)
    cells = (f"{count:,.0f} ({share_words(count / every)})" if count else "-" for count in counts)
    return label, *cells, f"{every:,.0f}"


def share_words(share: float) -> str:
    """A share in percent that is neither all nor nothing unless it is."""
    if 0.0 < share < 0.001:
        return "< 0.1%"
    return "> 99.9%" if 0.999 < share < 1.0 else f"{share:.1%}"


def steps_of(lines: Sequence[Mapping[str, Any]]) -> str:
    first, last = lines[0]["step"], lines[-1]["step"]
    return str(first) if first == last else f"{first} to {last}"


def amount(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float(value) if is_finite(value) else 0.0


# ---------------------------------------------------------------- cost


def cost_tables(run: RunReader, overview: RunOverview) -> Html:
    """Tokens and seconds of the whole run."""
    sampled, planned, trained = overview.sampled_tokens, total(run, "tokens/planned"), total(run, "tokens/action")
    laid, shared_of = unshared(run)
    rows: list[tuple[Child, ...]] = [
        ("sampled", f"{sampled:,.0f}", "tokens that training attempts sampled, of kept and dropped groups"),
        ("trained", f"{trained:,.0f}", "of them, those of kept groups"),
        ("computed", f"{planned:,.0f}", "prompts and actions in one epoch over the kept groups, what turns share once"),
    ]
    if laid > 0 and shared_of > 0:
        saved = f"{laid - shared_of:,.0f}"
        about = f"{1 - shared_of / laid:.1%} of the {laid:,.0f} that turns have one by one, computed with another turn"
        rows.append(("shared", saved, about))
    parts = [table(("tokens", "", ""), rows, "counts")] if sampled or planned else [note("No step is logged yet.")]
    return joined([*parts, stage_table(run, overview)])


def unshared(run: RunReader) -> tuple[float, float]:
    """(tokens of all turns, each by itself; tokens that were computed for them), over the steps of which no group was
    dropped, because a dropped group's turns are counted and not computed."""
    laid = planned = 0.0
    for line in run.metrics.lines:
        turns = amount(line, "turn/count")
        if turns and amount(line, "tokens/planned") and not amount(line, "groups/dropped"):
            laid += turns * (amount(line, "turn/prompt_tokens") + amount(line, "turn/action_tokens"))
            planned += amount(line, "tokens/planned")
    return round(laid), planned


def stage_table(run: RunReader, overview: RunOverview) -> Html:
    """Where the time went."""
    rows: list[tuple[str, float]] = [(name, seconds) for name, seconds in overview.stages.items() if seconds]
    steps = overview.stages["steps"]
    inside = [(f"– {label}", total(run, f"seconds/{name}")) for name, label in STAGES.items()]
    if steps:
        place = [name for name, _ in rows].index("steps") + 1
        rows[place:place] = [(label, seconds) for label, seconds in inside if seconds]
    if not rows:
        return Html()
    cells = [(label, duration(seconds), f"{seconds / (overview.seconds or 1):.1%}") for label, seconds in rows]
    speed = (
        f" Training sampled {number(overview.sampled_tokens / steps)} tokens per second of its steps." if steps else ""
    )
    whole = f"{duration(overview.seconds)} in all; the lines with a dash are parts of the steps.{speed}"
    return joined([table(("time", "", "of all"), cells), note(whole)])


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    Example:
        duration(5025) == "1 h 24 min"
    """
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3570:
        return f"{seconds / 60:.3g} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


# ---------------------------------------------------------------- events


def events_list(run: RunReader) -> Html:
    """The newest warnings of events.log."""
    try:
        with run.folder.events.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - EVENT_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return note("No warnings: there is no events.log.")
    lines = lines[1:] if size > EVENT_BYTES else lines
    if not lines:
        return note("No warnings: events.log is empty.")
    shown = lines[-EVENT_LINES:]
    whole = len(shown) == len(lines) and size <= EVENT_BYTES
    about = f"{len(shown):,} lines." if whole else f"The last {len(shown):,} lines; events.log has all."
    body = element("pre", *(joined([text(line, EVENT_LENGTH), Html("\n")]) for line in shown))
    return joined([note(about), body if len(shown) <= 12 else folded("Show them", body)])
