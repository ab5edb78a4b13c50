"""From a recipe to the engines that play the seats of its games: the policy's, and those of frozen opponents."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from turnwise.assemble.engines import slot_engine, without_replay
from turnwise.assemble.environments import seats_of
from turnwise.assemble.learner import policy_of
from turnwise.assemble.model import load
from turnwise.engines.base import Engine
from turnwise.learn.policy import load_model
from turnwise.pretrained import CausalLM
from turnwise.recipe.schema import Recipe
from turnwise.rollout.render.renderer import Renderer
from turnwise.runs.checkpoint import check_model_folder


def opponents_of(recipe: Recipe) -> list[str]:
    """The models besides the policy that play seats: "frozen", or "frozen:FOLDER"."""
    return sorted({model for models in seats_of(recipe).values() for model in models} - {"policy"})


def check_opponents(recipe: Recipe) -> None:
    """Refuse frozen opponents where no engine of this process can play them."""
    opponents = opponents_of(recipe)
    for opponent in opponents:
        folder = opponent.partition(":")[2]
        if folder and not Path(folder).is_dir():
            raise ValueError(f'env.settings.opponent = "{opponent}": there is no model folder at {folder}')
        if folder:
            check_model_folder(Path(folder))
    if opponents and (recipe.engine.name != "slots" or recipe.engine.processes or recipe.cluster.is_spread):
        raise ValueError(
            f'env.settings.opponent = "{opponents[0]}" is played by an engine of the run\'s own process; use '
            'engine.name = "slots" without engine.processes and cluster, or opponent = "self"'
        )


@asynccontextmanager
async def seated_engines(
    recipe: Recipe, engine: Engine, model: CausalLM, renderer: Renderer, beginning: Path | None
) -> AsyncIterator[dict[str, Sequence[Engine]]]:
    """By dataset: the engine of each seat of a game. A frozen opponent has an engine with a copy of its weights, which
    never change; `beginning` is the folder of the model that training started from, if that is not `model`."""
    engines: dict[str, Engine] = {"policy": engine}
    recipe = without_replay(recipe)
    async with AsyncExitStack() as stack:
        for opponent in opponents_of(recipe):
            frozen = slot_engine(recipe, frozen_model(recipe, opponent, model, renderer, beginning), renderer, 0)
            await frozen.open()
            stack.push_async_callback(frozen.close)
            engines[opponent] = frozen
        yield {label: [engines[name] for name in models] for label, models in seats_of(recipe).items()}


def frozen_model(
    recipe: Recipe, opponent: str, model: CausalLM, renderer: Renderer, beginning: Path | None
) -> CausalLM:
    """The weights of a frozen opponent, which nobody else has."""
    folder = opponent.partition(":")[2]
    if not folder:
        frozen = copy.deepcopy(model) if beginning is None else load_model(beginning)
    else:
        frozen, tokenizer = load(folder)
        if tokenizer.get_vocab() != renderer.tokenizer.get_vocab():
            raise ValueError(f'env.settings.opponent = "{opponent}" has another vocabulary than the policy')
    frozen = frozen.to(str(model.device))
    policy_of(recipe, frozen)  # which makes it ready for an engine
    return frozen
