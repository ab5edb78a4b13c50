"""Training on what a run recorded: options of `turnwise train` and `turnwise sft`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.runs.screen import Screen

if TYPE_CHECKING:
    from turnwise.recipe.schema import Recipe

SOURCE = "--from"


def add_replay_option(train: Any) -> None:
    train.add_argument(
        SOURCE,
        dest="source",
        metavar="RUN",
        help="train on the groups that this run recorded, without sampling; its recipe, unless one is given",
    )


def add_best_options(sft: Any) -> None:
    sft.add_argument(SOURCE, dest="source", metavar="RUN", help="imitate the best attempts that this run recorded")
    sft.add_argument("--best", metavar="K", nargs="?", const="1", help="the K best attempts at each task (1)")
    sft.add_argument(
        "--min-reward", metavar="R", type=float, help="only attempts that were paid so much (success_threshold)"
    )
    sft.add_argument("--step", metavar="N", type=int, help="only attempts of this step of the run")


# ---------------------------------------------------------------- recipes


def recipe_for(chosen: argparse.Namespace, out: str) -> Recipe:
    """The recipe that is given, or that of the run that is read, with its result in another folder."""
    from turnwise.recipe.parse import load_recipe
    from turnwise.runs.folder import RunFolder
    from turnwise.runs.trust import recipe_of_run

    is_named = chosen.recipe is not None and "=" not in chosen.recipe
    given = list(chosen.overrides) if is_named or chosen.recipe is None else [chosen.recipe, *chosen.overrides]
    if is_named:
        if chosen.trust != "ask":
            raise ValueError("--trust goes with the recipe of a run: the one that you give is yours; remove it")
        return load_recipe(Path(chosen.recipe), given)
    folder = RunFolder.open(chosen.source)
    return recipe_of_run(folder, [f"out={folder.path}-{out}", *given], chosen.trust)


def overrides_of(chosen: argparse.Namespace) -> list[str]:
    return [text for text in (chosen.recipe, *chosen.overrides) if text is not None and "=" in text]


# ---------------------------------------------------------------- train --from


def replay_of(chosen: argparse.Namespace, screen: Screen) -> tuple[Callable[..., Any], Path, float]:
    """(what opens the replay, its folder, seconds for which it may be blocked)."""
    from turnwise.assemble.replay import refuse_ignored, replaying
    from turnwise.runs.recorded_archive import RecordedArchive

    if chosen.resume:
        raise ValueError("--resume goes on with a replay from the run that it began with; remove --from")
    refuse_ignored(overrides_of(chosen))
    recipe = recipe_for(chosen, "replay")
    source = RecordedArchive.open(chosen.source)
    return partial(replaying, recipe, source, screen), Path(recipe.out), recipe.rollout.limits.blocked_seconds


def resuming_of(folder: Path) -> Callable[..., Any] | None:
    """What goes on with a run that is made of another; None for one that samples."""
    from turnwise.runs.folder import RunFolder

    if not RunFolder(folder).origin.exists():
        return None
    from turnwise.assemble.replay import resuming_replay

    return resuming_replay


def say_differences(source: str, folder: Path, screen: Screen) -> None:
    """Say whether a replay has the numbers of the run that it trained on."""
    from turnwise.inspect.same_steps import compare_steps
    from turnwise.runs.archive import archived_steps
    from turnwise.runs.folder import RunFolder

    recorded = RunFolder(Path(source))
    first = next(iter(archived_steps(recorded.archive)), 1)
    for line in compare_steps(recorded.metrics, RunFolder(folder).metrics, first):
        screen.say(line)


# ---------------------------------------------------------------- sft --from


def refuse_best_options(chosen: argparse.Namespace) -> None:
    for name in ("best", "min_reward", "step"):
        if getattr(chosen, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --from RUN, whose attempts it chooses")
    if chosen.trust != "ask":
        raise ValueError("--trust goes with --from: a recipe that you give is yours; remove it")


def number_of_best(chosen: argparse.Namespace) -> int:
    """K of `--best K`. argparse takes whatever follows a bare `--best` for K: a recipe or an override is put back."""
    text = chosen.best or "1"
    if text.lstrip("-").isdigit():
        return int(text)
    if "=" in text:
        chosen.overrides.append(text)
    elif chosen.recipe is None or "=" in chosen.recipe:
        chosen.overrides += [chosen.recipe] if chosen.recipe else []
        chosen.recipe = text
    else:
        raise ValueError(f"--best {text}: write a number")
    return 1


@contextmanager
def best_attempts(chosen: argparse.Namespace, screen: Screen) -> Iterator[tuple[Recipe, Callable[..., None]]]:
    """(a recipe whose demonstrations are the best attempts of a run, what saves a model that imitates them)."""
    from tempfile import TemporaryDirectory

    from turnwise.inspect.best import ATTEMPTS, choose_best, save_imitation, with_demonstrations

    num_best = number_of_best(chosen)
    recipe = recipe_for(chosen, "best")
    least = recipe.rollout.success_threshold if chosen.min_reward is None else chosen.min_reward
    best = choose_best(chosen.source, num_best, least, chosen.step)
    screen.say(best.describe())
    with TemporaryDirectory(prefix="turnwise-") as folder:
        file = Path(folder) / ATTEMPTS
        best.write(file)
        imitating = with_demonstrations(recipe, file)
        yield imitating, partial(save_imitation, imitating, best)
