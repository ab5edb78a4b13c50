"""The models of the Hub that a recipe names, each at a commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from turnwise.data.hub import HubName, Say
from turnwise.recipe.schema import Recipe

Place = tuple[str, str]
"""(table, key) of a recipe that names a model; an empty table is the top level."""
PLACES: tuple[Place, ...] = (("model", "path"), ("kl", "reference"), ("", "teacher"))


def named_models(recipe: Recipe) -> Iterator[tuple[Place, HubName]]:
    """Where a recipe names models of the Hub."""
    for table, key in PLACES:
        text = getattr(getattr(recipe, table) if table else recipe, key)
        if text not in ("", "start", "tiny") and (name := HubName.parse(text)) is not None:
            yield (table, key), name


def with_commits(recipe: Recipe, say: Say) -> Recipe:
    """The recipe with every model of the Hub in the cache and named by its commit, so that a run folder that records it
    means the same files for ever."""
    for place, name in named_models(recipe):
        recipe = with_value(recipe, place, name.fetched(say)[0].key)
    return recipe


def with_model(recipe: Recipe, folder: Path | str) -> Recipe:
    """The recipe with another model as its policy."""
    return with_value(recipe, ("model", "path"), str(folder))


def with_value(recipe: Recipe, place: Place, value: str) -> Recipe:
    table, key = place
    if not table:
        return recipe.model_copy(update={key: value})
    section = getattr(recipe, table).model_copy(update={key: value})
    return recipe.model_copy(update={table: section})
