"""The parts of a run for tests that call them one by one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from support.running import SilentScreen
from turnwise.assemble.environments import endpoint_of, environments_of
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import open_environments, run_parts
from turnwise.assemble.warm_start import starting_model
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs.screen import Screen
from turnwise.training.run import RunParts

OPEN: list[tuple[asyncio.AbstractEventLoop, AsyncExitStack]] = []
"""What nobody closes before the process ends: engines in this process hold nothing."""


def parts_of(recipe: Recipe, model: Any, tokenizer: Any) -> RunParts:
    """The parts of a run whose engine and learner are in this process."""

    stack, loop = AsyncExitStack(), asyncio.new_event_loop()
    OPEN.append((loop, stack))

    async def work() -> RunParts:
        environments = stack.enter_context(open_environments(recipe))
        source = ModelSource(model, tokenizer)
        return await stack.enter_async_context(run_parts(recipe, environments, source, Path("evaluations")))

    return loop.run_until_complete(work())


async def warm_model(recipe: Recipe, screen: Screen | None = None) -> tuple[Any, Any]:
    """The model that a recipe trains from, and its tokenizer."""
    with open_environments(recipe) as environments:
        return await starting_model(recipe, environments, screen or SilentScreen(), {}, asyncio.Event())


def environments_for(recipe: Recipe) -> Environments:
    """The environments of a recipe; nothing of them is open."""
    return environments_of(recipe, endpoint_of(recipe))
