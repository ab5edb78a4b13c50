"""What the newest recorded step costs in each layout: tokens and passes, counted without a model."""

from __future__ import annotations

from turnwise.inspect.layout_load import Load, loads
from turnwise.inspect.report.markup import Html, joined, note, table
from turnwise.inspect.run_reader import RunReader
from turnwise.plan.tree import tree
from turnwise.runs.archive import archived_steps, read_step, step_path
from turnwise.types import turns_of

MOST_BYTES = 8_000_000
"""Size of a file of attempts above which layouts are not counted, because that would take too long."""
MOST_TURNS = 20_000
TOKENS_PER_PASS = 16_384
"""Where the recipe does not say."""


def layout_table(run: RunReader) -> Html:
    """Tokens and passes of the newest archived step in each layout; a note where they are not counted."""
    steps = archived_steps(run.folder.archive)
    if not steps:
        return Html()
    path = step_path(run.folder.archive, steps[-1])
    try:
        if path.stat().st_size > MOST_BYTES:
            return note("Layouts are not compared, because a step is large; turnwise cost compares them.")
        groups = [record.group for record in read_step(path) if record.kept]
    except (ValueError, OSError):
        return Html()
    turns = [turn for turn in turns_of(groups) if len(turn.action)]
    if not turns or len(turns) > MOST_TURNS:
        return Html()
    limit = run.config.get("max_tokens_per_microbatch")
    room = limit if isinstance(limit, int) and 0 < limit < 1 << 31 else TOKENS_PER_PASS
    unique = tree(turns).num_tokens
    rows = [layout_row(name, load, unique) for name, load in loads(turns, room).items()]
    about = (
        f"Step {steps[-1]:,} in each layout: {len(turns):,} turns with {unique:,} unique tokens, at most {room:,} "
        "tokens a pass. turnwise cost predicts seconds."
    )
    head = ("layout", "passes", "tokens", "per unique token", "pairs of query and key")
    return joined([note(about), table(head, rows)])


def layout_row(name: str, load: Load, unique: int) -> tuple[str, ...]:
    return name, f"{load.passes:.0f}", f"{load.tokens:,.0f}", f"{load.tokens / unique:.2f}", f"{load.pairs:.2e}"
