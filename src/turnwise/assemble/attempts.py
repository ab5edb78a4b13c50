"""From a recipe to how attempts are made: training and held-out ones differ by these values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from turnwise.engines.base import Engine, Sampling
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.rollout.group import AttemptMaker
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer


def limits(recipe: Recipe) -> Limits:
    r = recipe.rollout
    return Limits(
        r.max_turns,
        r.max_prompt_tokens,
        r.max_action_tokens,
        r.max_trajectory_tokens,
        r.limits.call_seconds,
        r.limits.attempt_seconds,
        r.limits.max_observation_bytes,
    )


def training_attempts(
    recipe: Recipe,
    environments: Environments,
    engine: Engine,
    renderer: Renderer,
    seats: Mapping[str, Sequence[Engine]] = MappingProxyType({}),
) -> AttemptMaker:
    return AttemptMaker(
        seats=seats,
        plays=environments.plays,
        environments=environments.training(),
        engine=engine,
        renderer=renderer,
        sampling=Sampling(
            recipe.rollout.max_action_tokens,
            recipe.sampling.temperature,
            routes=0 if recipe.model.router_replay else None,
        ),
        limits=limits(recipe),
        seed=recipe.seed,
        split="train",
        attempts=recipe.rollout.group_size,
        retries=recipe.rollout.failures.retries,
    )


def evaluation_attempts(
    recipe: Recipe, environments: Environments, engine: Engine, renderer: Renderer, greedy: bool
) -> AttemptMaker:
    e, s = recipe.evaluation, recipe.evaluation.sampling
    greedily = Sampling(recipe.rollout.max_action_tokens, temperature=0.0)
    sampled = Sampling(recipe.rollout.max_action_tokens, s.temperature, s.top_p, s.top_k)
    return AttemptMaker(
        plays=environments.plays,
        environments=environments.validation(),
        engine=engine,
        renderer=renderer,
        sampling=greedily if greedy else sampled,
        limits=limits(recipe),
        seed=recipe.seed,
        split="heldout/greedy" if greedy else "heldout/sampled",
        attempts=1 if greedy else e.attempts,
        retries=recipe.rollout.failures.retries,
    )
