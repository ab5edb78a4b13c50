"""A preflight of a recipe: where it would compute, its config, and its rehearsal."""

from __future__ import annotations

import torch

from turnwise.preflight.model_config import config_of
from turnwise.preflight.rehearsal import rehearse
from turnwise.preflight.report import Preflight, preflight_of
from turnwise.recipe.schema import Recipe


def device_for(recipe: Recipe) -> str:
    """Where the learner of a recipe would compute, on a machine that has it; auto is what this machine has."""
    if recipe.model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return recipe.model.device


def preflight(recipe: Recipe, layers: int | None = None) -> Preflight:
    """What a run of a recipe needs."""
    named = config_of(recipe)
    return preflight_of(recipe, named, rehearse(recipe, named.config, device_for(recipe), layers))
