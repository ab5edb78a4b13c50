"""The command that writes recorded attempts in the formats of other systems."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

NAMES = ("openai", "trl", "sharegpt", "verl", "verifiers", "art", "atif", "turnwise")
EPILOG = """examples:
  turnwise export runs/quickstart --format openai talks.jsonl          all attempts that count, as chat messages
  turnwise export runs/quickstart --format verl --best 2 best.parquet  the two best attempts at each task
  turnwise export runs/quickstart --format atif --tokens --steps 40:50 steps.jsonl   with the exact tokens of each turn
  turnwise export runs/quickstart --format turnwise --kept trained.parquet           turnwise's own archive

docs/reference/transcripts.md has a row of each format, and what it cannot hold.
"""


def add_export_command(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write recorded attempts in the format of another system",
        description="Attempts of a run that count, as JSON lines, JSON or Parquet, by the name of OUT.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("run", metavar="RUN", help="a run folder; its archive is read")
    export.add_argument("out", metavar="OUT", help="a new file: .jsonl, .json or .parquet")
    export.add_argument("--format", required=True, choices=NAMES, help=f"one of {', '.join(NAMES)}", metavar="NAME")
    export.add_argument("--best", metavar="K", type=int, help="only the K best attempts at each task")
    export.add_argument("--min-reward", metavar="R", type=float, help="only attempts that were paid so much")
    export.add_argument("--steps", metavar="FIRST[:LAST]", default="", help="only attempts of these steps")
    export.add_argument("--kept", action="store_true", help="only attempts of groups that trained")
    export.add_argument("--tokens", action="store_true", help="with the exact tokens of each turn (atif)")


def export_command(chosen: argparse.Namespace) -> int:
    from turnwise.cli.terminal import open_screen
    from turnwise.inspect.export import ChosenAttempts, check_output, chosen_steps, export
    from turnwise.runs.recorded_archive import RecordedArchive

    out, screen = Path(chosen.out), open_screen()
    check_output(out, chosen.format)
    first, last = steps_of(chosen.steps)
    choice = ChosenAttempts(first, last, chosen.best, chosen.min_reward, chosen.kept)
    source = RecordedArchive.open(chosen.run)
    screen.begin("export", len(chosen_steps(source, choice).steps))
    try:
        exported = export(
            source, out, chosen.format, choice, tokens=chosen.tokens, show=lambda done: screen.show(done, {})
        )
    finally:
        screen.end()
    for line in exported.describe():
        screen.say(line)
    screen.say(f"wrote {exported.written} attempts to {out}")
    return 0


def steps_of(text: str) -> tuple[int | None, int | None]:
    """(first, last) of `--steps`, where given."""
    if not text:
        return None, None
    found = re.fullmatch(r"(\d{0,9})(:?)(\d{0,9})", text)
    if found is None or text == ":":
        raise ValueError(f"--steps {text}: write 40 or 40:50")
    first, colon, last = found.groups()
    return (int(first) if first else None), (int(last) if last else int(first) if not colon else None)
