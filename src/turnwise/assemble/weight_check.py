"""The check that engines sample with the learner's weights, as a recipe asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnwise.engines.base import Engine
from turnwise.learn.base import AnyLearner
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.schedule.workers import Worker
from turnwise.training.weight_check import WeightCheck
from turnwise.types import Turn


def weight_check_of(
    recipe: Recipe,
    engine: Engine,
    learner: AnyLearner,
    plan: Callable[[Sequence[Turn]], list[Plan]],
    run: Worker,
    model: CausalLM,
    tokenizer: ChatTokenizer,
) -> WeightCheck:
    return WeightCheck(
        engine,
        learner,
        plan,
        run,
        temperature=recipe.sampling.temperature,
        vocabulary=min(len(tokenizer), model.get_input_embeddings().num_embeddings),
        exact=recipe.model.dtype == "float32",
        longest=recipe.rollout.max_trajectory_tokens,
        limit=recipe.weight_check.limit,
        every=recipe.weight_check.every,
    )
