"""The command that trains on demonstrations."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.cli.attended import attended
from turnwise.cli.replay import best_attempts, refuse_best_options
from turnwise.cli.terminal import open_screen
from turnwise.runs.screen import Screen

if TYPE_CHECKING:
    from turnwise.recipe.schema import Recipe


def sft_command(chosen: argparse.Namespace) -> int:
    from turnwise.learn.learner import save_policy

    screen = open_screen()
    if not chosen.source:
        refuse_best_options(chosen)
        return warm_start_command(named_recipe(chosen), save_policy, screen)
    with best_attempts(chosen, screen) as (recipe, save):
        return warm_start_command(recipe, save, screen)


def named_recipe(chosen: argparse.Namespace) -> Recipe:
    from turnwise.recipe.parse import load_recipe

    if chosen.recipe is None:
        raise ValueError("name a recipe, for instance quickstart, or a run with --from RUN")
    return load_recipe(Path(chosen.recipe), chosen.overrides)


def warm_start_command(recipe: Recipe, save: Callable[[Any, Any, Path], None], screen: Screen) -> int:
    """Train a recipe's model on demonstrations, and save it in a new folder."""
    from turnwise.assemble.checks import check, check_tasks, with_models
    from turnwise.assemble.model import set_threads
    from turnwise.assemble.models import reachable
    from turnwise.assemble.run import open_environments
    from turnwise.assemble.warm_start import checked_source, warm_up
    from turnwise.atomic import atomic_folder
    from turnwise.schedule.stopping import RunStopped

    if not recipe.sft.updates:
        raise ValueError("sft.updates is 0: there is nothing to train; set it in the recipe or with sft.updates=200")
    out = Path(recipe.out)
    if out.exists():
        raise ValueError(f"{out} exists already; choose another folder with out=...")
    recipe = with_models(recipe, screen.say)
    check(recipe)
    set_threads(recipe)

    async def work(stop: asyncio.Event) -> None:
        with open_environments(recipe) as environments:
            check_tasks(recipe, environments)
            source = await checked_source(recipe, environments)
            with reachable(recipe, source, out.parent) as source:
                model = await warm_up(recipe, environments, source, screen, asyncio.Event())
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out) as aside:
            save(model, source.tokenizer, aside)

    try:
        attended(work, screen, recipe)
    except asyncio.CancelledError:
        screen.say("stopped")
        return 130
    except RunStopped as error:
        screen.say(f"turnwise: the warm start stopped: {error}")
        return 1
    screen.say(f"wrote {out}; train from it with model.path={out} sft.updates=0")
    return 0
