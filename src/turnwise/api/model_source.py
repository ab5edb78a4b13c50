"""Models for a learner or an engine by itself: of a folder, given as they are, or the tiny one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turnwise.api.recipe_tree import RecipeTree
from turnwise.api.run_record import RunRecord
from turnwise.assemble.model import load
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe

GivenModel = str | Path | RunRecord | CausalLM
"""A folder that transformers can load, a run (its last checkpoint), a model of transformers, or "tiny"."""


def tiny_model(
    texts: Iterable[str] = (), *, hidden: int = 128, layers: int = 4, context: int = 4608, seed: int = 0
) -> tuple[Any, Any]:
    """(model, tokenizer): a Qwen3 with random weights and a tokenizer whose words are those of the texts, built by
    code. Without texts every byte is a token."""
    tokenizer = build_tokenizer(texts)
    return build_model(tokenizer, hidden, layers, context, seed), tokenizer


def opened_model(
    model: GivenModel, tokenizer: ChatTokenizer | None, recipe: Recipe
) -> tuple[CausalLM, ChatTokenizer | None]:
    """The model that was given, and its tokenizer where there is one."""
    if isinstance(model, RunRecord):
        model = model.checkpoint
    if isinstance(model, (str, Path)):
        if str(model) == "tiny":
            size, context = recipe.model, recipe.rollout.max_trajectory_tokens
            made, own = tiny_model(hidden=size.hidden, layers=size.layers, context=context, seed=recipe.seed)
        else:
            made, own = load(model)
        return made, tokenizer or own
    if not hasattr(model, "state_dict") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"a model is a folder, a run, a causal model of transformers, got {type(model).__name__}")
    return model, tokenizer


def settings_for(recipe: RecipeTree | None, keys: dict[str, Any], model: Any) -> Recipe:
    """The settings of a learner or an engine by itself: a recipe, or keys of one. The context is the model's where
    nobody has chosen one."""
    if recipe is not None and keys:
        raise ValueError(f"{next(iter(keys))} and a recipe: give keys or a recipe, not both; see Recipe.change")
    tree = recipe if recipe is not None else RecipeTree(**keys)
    settings = tree.settings
    if settings.cluster.is_spread or settings.engine.processes:
        raise ValueError("a learner or an engine by itself is in this process; remove cluster and engine.processes")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    asked = tree.tree.get("rollout", {})
    if longest and longest < settings.rollout.max_trajectory_tokens:
        if "max_trajectory_tokens" in asked:
            raise ValueError(
                f"rollout.max_trajectory_tokens = {settings.rollout.max_trajectory_tokens} is more than the {longest} "
                "positions of this model; lower it"
            )
        rollout = {"max_trajectory_tokens": longest}
        if settings.rollout.max_prompt_tokens >= longest:
            rollout["max_prompt_tokens"] = longest - 1
        settings = tree.change(rollout=rollout).settings
    return settings
