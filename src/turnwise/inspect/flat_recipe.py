"""A recipe as dotted keys: what differs from the defaults, and what differs between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ABSENT = object()
"""The value of a key that a recipe does not have."""
DEEPEST = 16
"""Levels of a recipe that are looked into; no real one has as many."""
PLACES = ("out",)
"""Keys that say where a run is, which no two share."""


def flat_recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Each value by its dotted key, as an override names it.

    Example:
        flat_recipe({"env": [{"name": "hops"}]}) == {"env.0.name": "hops"}
    """
    return dict(leaves(tree, ""))


def leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{above}{key}"
        if name.count(".") >= DEEPEST:
            yield name, value
        elif isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for place, entry in enumerate(value):
                yield from leaves(entry, f"{name}.{place}.")
        else:
            yield name, value


def changed_from_defaults(tree: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(value, default) of each key whose value is not the default, which is ABSENT where there is none."""
    from turnwise.recipe.schema import Recipe

    environments = tree.get("env")
    count = len(environments) if isinstance(environments, list) and environments else 1
    defaults = flat_recipe(Recipe.model_validate({"env": [{"name": "-"}] * count}).model_dump(mode="json"))
    defaults |= {name: ABSENT for name in defaults if name.startswith("env.") and name.endswith(".name")}
    found = {name: (value, defaults.get(name, ABSENT)) for name, value in flat_recipe(tree).items()}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1] and name not in PLACES}


def differing(trees: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The values of each key that recipes do not agree on, one per recipe."""
    flats = [flat_recipe(tree) for tree in trees]
    names = dict.fromkeys(name for one in flats for name in one)
    values = {name: tuple(one.get(name, ABSENT) for one in flats) for name in names if name not in PLACES}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def toml_text(value: Any, depth: int = 0) -> str:
    """A value as a recipe writes it, and "-" for one that is absent."""
    if depth > DEEPEST:
        return "…"
    if value is ABSENT:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(toml_text(inner, depth + 1) for inner in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {toml_text(inner, depth + 1)}' for key, inner in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else str(value)
