"""The command that scores recorded attempts again."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.cli.attended import attended

if TYPE_CHECKING:
    from turnwise.recipe.schema import Recipe
    from turnwise.runs.recorded_archive import RecordedArchive

EPILOG = """examples:
  turnwise rescore runs/quickstart                             what the environment of today pays
  turnwise rescore runs/quickstart --env mine:Hops             what another environment pays for the same messages
  turnwise rescore runs/quickstart env.0.settings.link_reward=0.1   the same one with another setting
  turnwise rescore runs/quickstart --step 40 --limit 200       some of the attempts
  turnwise rescore runs/quickstart --out runs/rescored         and keep them, for train --from, sft --from and show
"""
MATTERS = (
    *("env", "filter", "credit", "weighting"),
    *("rollout.failures", "rollout.limits", "rollout.success_threshold"),
)
"""Tables and keys that say what attempts are paid, and which credit comes of it."""


def add_rescore_command(commands: Any) -> Any:
    rescore = commands.add_parser(
        "rescore",
        help="score recorded attempts again with a changed reward",
        description="Every recorded attempt is opened again and its messages are replayed in order.\n"
        "Nothing is sampled, and nothing in RUN changes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rescore.add_argument("run", metavar="RUN", help="a run folder; its archive is read")
    rescore.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for instance env.0.settings.link_reward=0.1"
    )
    rescore.add_argument(
        "--env",
        metavar="[DATASET=]MODULE:CLASS",
        action="append",
        default=[],
        help="this environment instead of the run's; with several environments, in the place of the one of DATASET",
    )
    rescore.add_argument("--step", metavar="N", type=int, help="only attempts of this step")
    rescore.add_argument("--limit", metavar="N", type=int, help="about so many attempts: whole groups, the first ones")
    rescore.add_argument("--out", metavar="FOLDER", help="write the groups with their new rewards into a new folder")
    return rescore


def rescore_command(chosen: argparse.Namespace) -> int:
    from turnwise.assemble.run import open_environments
    from turnwise.cli.events import events
    from turnwise.cli.terminal import open_screen
    from turnwise.inspect.rescore import rescore
    from turnwise.inspect.rescore_report import RescoreReport
    from turnwise.runs.recorded_archive import RecordedArchive

    if chosen.limit is not None and chosen.limit < 1:
        raise ValueError(f"--limit {chosen.limit}: score at least one attempt")
    recipe, screen = recipe_of_rescore(chosen), open_screen()
    source = RecordedArchive.open(chosen.run, chosen.step)
    with events(Path(chosen.out or os.devnull)), new_archive(chosen.out, recipe, source) as archive:

        async def work(stop: asyncio.Event) -> RescoreReport:
            with open_environments(recipe) as environments:
                return await rescore(recipe, source, environments, screen, chosen.limit, archive)

        try:
            report = attended(work, screen, recipe)
        except asyncio.CancelledError:
            if archive is not None:
                raise KeyboardInterrupt from None  # which has the folder removed
            screen.say("stopped")
            return 130
    for line in report.describe():
        print(line)
    if chosen.out:
        print(f"wrote {chosen.out}; train on it with: turnwise train --from {chosen.out} out=...")
    return 0 if report.counted else 1


def recipe_of_rescore(chosen: argparse.Namespace) -> Recipe:
    """The recipe of the run with the environments that are to pay."""
    from turnwise.runs.folder import RunFolder
    from turnwise.runs.trust import recipe_of_run

    for override in chosen.overrides:
        key = override.partition("=")[0].strip()
        if not any(f"{key}.".startswith(f"{table}.") for table in MATTERS):
            raise ValueError(f"{override} would be ignored: rewards depend on {', '.join(MATTERS)}; remove it")
    folder = RunFolder.open(chosen.run)
    theirs = recipe_of_run(folder, (), "needless")
    named = environment_overrides([entry.label for entry in theirs.env], chosen.env)
    return recipe_of_run(folder, [*named, *chosen.overrides], chosen.trust)


def environment_overrides(labels: Sequence[str], given: Sequence[str]) -> list[str]:
    """Overrides that put environments into the place of those with these labels."""
    overrides = []
    for text in given:
        label, equals, name = text.rpartition("=")
        if not equals and len(labels) > 1:
            raise ValueError(f"--env {text}: the run has {', '.join(labels)}; write DATASET={text}")
        label = label if equals else labels[0]
        if label not in labels:
            raise ValueError(f"--env {text}: the run has no environment {label}; it has {', '.join(labels)}")
        place = f"env.{labels.index(label)}"
        overrides += [f"{place}.name={json.dumps(name)}", f"{place}.dataset={json.dumps(label)}"]
    return overrides


@contextmanager
def new_archive(out: str | None, recipe: Recipe, source: RecordedArchive) -> Iterator[Path | None]:
    """The archive of a new folder, which is removed where the work does not end; None where none is wanted."""
    from turnwise.runs.folder import RunFolder
    from turnwise.runs.origin import RESCORED, Origin
    from turnwise.runs.trust import stamp_where_asked

    if out is None:
        yield None
        return
    config = recipe.model_copy(update={"out": out}).model_dump(mode="json")
    folder = RunFolder.create(out, config, partial(stamp_where_asked, recipe), Origin.of(RESCORED, source).text)
    try:
        yield folder.archive
    except BaseException:
        folder.clear()
        raise
