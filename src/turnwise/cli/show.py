"""The command that shows attempts of a run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

EPILOG = """examples:
  turnwise show runs/quickstart                                the newest attempts
  turnwise show runs/quickstart --worst --step 40              those of a step that were paid least
  turnwise show runs/quickstart --failed                       those that failed, with the reason
  turnwise show runs/quickstart --evaluation greedy --task 5f  held-out attempts at a task
  turnwise show runs/quickstart train/40/3/0                   one attempt, as a conversation
  turnwise show runs/quickstart train/40/3/0 --tokens          its tokens, coloured by their credit
  turnwise show runs/quickstart train/40/3/0 --tokens --json   every token with its numbers, a line each
  turnwise show runs/quickstart best                           the best attempt of the newest step; or: worst
"""


def add_show_command(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help="show attempts of a run: a table of them, or one as a conversation",
        description="Attempts of a run that is over or goes on. Without ATTEMPT, a table of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("run", metavar="RUN", help="a run folder")
    show.add_argument(
        "attempt", nargs="?", metavar="ATTEMPT", help="KIND/STEP/GROUP/ATTEMPT of the table, best or worst"
    )
    show.add_argument("--step", metavar="N", type=int, help="attempts of this step, or evaluations of this version")
    show.add_argument("--task", metavar="ID", default="", help="attempts at tasks whose id contains this")
    show.add_argument("--dataset", metavar="NAME", default="", help="attempts at tasks of this dataset")
    show.add_argument("--failed", action="store_true", help="attempts that failed, timed out or had too long a prompt")
    best = show.add_mutually_exclusive_group()
    best.add_argument("--best", action="store_true", help="those that were paid most first")
    best.add_argument("--worst", action="store_true", help="those that were paid least first")
    show.add_argument(
        "--evaluation", metavar="KIND", nargs="?", const="sampled", help="of evaluations: sampled, greedy"
    )
    show.add_argument("--limit", metavar="N", type=int, default=20, help="rows of the table (20)")
    show.add_argument("--tokens", action="store_true", help="of one attempt: the sampled tokens, coloured by credit")
    show.add_argument("--all", action="store_true", help="of one attempt: long texts whole")
    show.add_argument("--json", action="store_true", help="lines of JSON instead")


def show_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.attempts import NOT_COUNTED, TRAINING, AttemptKey, Query
    from turnwise.inspect.run_reader import RunReader
    from turnwise.inspect.show import failure_lines, page_json, table_lines

    if chosen.limit < 1:
        raise ValueError(f"--limit {chosen.limit}: show at least one row")
    extreme = chosen.attempt in ("best", "worst")
    refuse_ignored(chosen, extreme)
    run = RunReader.open(chosen.run)
    if chosen.attempt and not extreme:
        return show_attempt(run, AttemptKey.parse(chosen.attempt), chosen)
    run.attempts.refresh()
    for reason in run.attempts.unreadable.values():
        print(f"warning: {reason}", file=sys.stderr)
    kind = chosen.evaluation or TRAINING
    step = chosen.step
    if step is None and (extreme or chosen.best or chosen.worst):
        newest = run.attempts.select(Query(kind=kind, order="step"), limit=1).rows
        step = newest[0].key.step if newest else None
    best, worst = chosen.best or chosen.attempt == "best", chosen.worst or chosen.attempt == "worst"
    query = Query(
        kind=kind,
        first_step=step,
        last_step=step,
        task=chosen.task,
        dataset=chosen.dataset,
        statuses=NOT_COUNTED if chosen.failed else (),
        order="reward" if best or worst else "step",
        descending=not worst,
    )
    page = run.attempts.select(query, limit=1 if extreme else chosen.limit)
    if extreme:
        if not page.rows:
            raise ValueError(f"{chosen.run} has no such attempts yet; the first training step writes some")
        return show_attempt(run, page.rows[0].key, chosen)
    for line in page_json(page) if chosen.json else table_lines(page):
        print(line)
    if chosen.failed and not chosen.json:
        for line in failure_lines(page):
            print(line)
    return 0


def refuse_ignored(chosen: argparse.Namespace, extreme: bool) -> None:
    """Refuse options that what is shown has no use for."""
    chooses = [name for name in ("best", "worst") if getattr(chosen, name)]
    if not extreme:
        filters = ("step", "task", "dataset", "evaluation", "failed")
        chooses += [name for name in filters if getattr(chosen, name) not in (None, "", False)]
    for name in chooses if chosen.attempt else [name for name in ("tokens", "all") if getattr(chosen, name)]:
        which = f"ATTEMPT {chosen.attempt} is one already" if chosen.attempt else "it is about one ATTEMPT"
        raise ValueError(f"--{name} is ignored: {which}; remove it, or see turnwise show --help")


def show_attempt(run: Any, key: Any, chosen: argparse.Namespace) -> int:
    from turnwise.cli.terminal import print_line
    from turnwise.inspect.show import attempt_lines, token_rows

    if chosen.json:
        for row in token_rows(run, run.attempt(key)):
            print(json.dumps(row))
        return 0
    for line in attempt_lines(run, key, tokens=chosen.tokens, everything=chosen.all):
        print_line(line)
    return 0
