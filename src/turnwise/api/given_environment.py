"""Environments that are given as classes or functions, and how a recipe names them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.api.recipe_tree import UNNAMED, RecipeTree
from turnwise.envs.live import is_live, live_name
from turnwise.recipe.arguments import check_arguments
from turnwise.recipe.schema import Recipe

GivenEnvironment = str | type | Callable[..., Any] | Mapping[str, Any]
"""A name as in recipes, a class, a function that makes one environment, or these by dataset."""


@dataclass(frozen=True, slots=True)
class Named:
    """A recipe that names all its environments, and the classes that it names and no module has."""

    recipe: Recipe
    live: Mapping[str, Any]


def named(recipe: RecipeTree, environment: GivenEnvironment | None) -> Named:
    """A recipe with the environment that was given, if any."""
    tree, live = with_environment(recipe.tree, environment)
    settings = RecipeTree(**tree).settings
    if any(entry.name == UNNAMED for entry in settings.env):
        raise ValueError(
            'the recipe names no environment; give a class with environment=..., or a name with env={"name": "hops"}'
        )
    title = settings.env[0].label
    out = settings.out.replace("{recipe}", title).replace("{seed}", str(settings.seed))
    return Named(settings.model_copy(update={"out": out}), live)


def with_environment(
    tree: Mapping[str, Any], environment: GivenEnvironment | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the tree of a recipe whose entries have the names of what was given, the classes that only this session has)."""
    given = {} if environment is None else environment if isinstance(environment, Mapping) else {"": environment}
    entries = [dict(entry) for entry in tree.get("env", [])]
    live: dict[str, Any] = {}
    for dataset, what in given.items():
        entry = entry_for(entries, dataset)
        name, kind = name_of(what, dataset, entry.get("settings", {}))
        recorded = entry.get("name", UNNAMED)
        if is_live(recorded) and recorded != UNNAMED:  # that of a session before this one
            name, kind = recorded, class_of(what, entry.get("settings", {}))
        elif recorded not in (UNNAMED, name):
            raise ValueError(
                f'the recipe names env.name = "{recorded}", and environment gives "{name}"; remove one of them, for '
                "instance with Recipe.load(..., env=None)"
            )
        entry["name"] = name
        if is_live(name):
            live[name] = kind
    return {**tree, **({"env": entries} if entries else {})}, live


def entry_for(entries: list[dict[str, Any]], dataset: str) -> dict[str, Any]:
    """The entry of a recipe that an environment is for, a new one where there is none."""
    if not dataset and len(entries) > 1:
        raise ValueError(f"the recipe has {len(entries)} environments; give environment={{dataset: class}} for each")
    for entry in entries:
        if not dataset or entry.get("dataset") == dataset:
            return entry
    entries.append({"dataset": dataset} if dataset else {})
    return entries[-1]


def name_of(what: Any, dataset: str, settings: Mapping[str, Any]) -> tuple[str, Any]:
    """(the name in a recipe, the class or None) of an environment. A class that its module has under its own name is
    called "module:Class", and the run is then one that the command line could have made."""
    if isinstance(what, str):
        return what, None
    kind = class_of(what, settings)
    if kind is what and is_importable(kind):
        return f"{kind.__module__}:{kind.__qualname__}", kind
    return live_name(dataset or kind.__name__), kind


def is_importable(kind: type) -> bool:
    """Whether another process finds the class under its name."""
    module = sys.modules.get(kind.__module__)
    has_source = kind.__module__ != "__main__" and getattr(module, "__spec__", None) is not None
    return has_source and getattr(module, kind.__qualname__, None) is kind


def class_of(what: Any, settings: Mapping[str, Any]) -> Any:
    """The class of what was given. For a function it is derived from that of the environments which it makes, and
    making one calls the function."""
    if inspect.isclass(what):
        return what
    if not callable(what):
        raise ValueError(f"environment is a class, a function that makes one or a name, got {type(what).__name__}")
    label = getattr(what, "__name__", "environment")
    made = type(what(**check_arguments(label, "env.settings", what, settings)))

    def make(cls: type, **given: Any) -> Any:
        return what(**given)

    return type(made.__name__, (made,), {"__new__": make, "__signature__": inspect.signature(what)})
