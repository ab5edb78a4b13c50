"""Recipes written in Python: `turnwise.Recipe`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.envs.live import live_name
from turnwise.recipe.parse import apply_override, load_recipe, parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice

UNNAMED = live_name("environment")
"""Stands for the environment of a recipe that names none, until a class is given."""
CHOICES = {name for name, field in Recipe.model_fields.items() if field.annotation is Choice} | {"on_failure"}
"""Tables that name a function: another name brings other settings, and those before go."""


class RecipeTree:
    """A recipe: keys as keywords, tables as dicts, or `key=value` strings as on the command line.

    It is checked when it is made, and a mistake is a ValueError of one line that names the nearest key. It may leave
    out the environment, or only its name, where `train` gets a class. `None` removes a key. Values are read as
    attributes: `recipe.rollout.group_size`.

    Example:
        Recipe(steps=20, env={"tasks": {"count": 256}}, optimizer={"learning_rate": 7e-4})
        Recipe("rollout.group_size=4", steps=20)
        Recipe.load("recipes/quickstart.toml", steps=5)
    """

    tree: dict[str, Any]
    settings: Recipe
    """Every key with its value, typed."""

    def __init__(self, *overrides: str, **keys: Any) -> None:
        self.tree = merged({}, keys, overrides)
        self.settings = parse_recipe(with_names(self.tree), "Recipe")

    @classmethod
    def load(cls, recipe: str | Path, *overrides: str, **keys: Any) -> RecipeTree:
        """The recipe of a TOML file, or one that comes with turnwise, by its name; with changes."""
        return cls.of(load_recipe(Path(recipe))).change(*overrides, **keys)

    @classmethod
    def of(cls, settings: Recipe) -> RecipeTree:
        """The same recipe as a tree."""
        return cls(**settings.model_dump(mode="json"))

    def change(self, *overrides: str, **keys: Any) -> RecipeTree:
        """A recipe that differs in these keys."""
        return RecipeTree(**merged(self.tree, keys, overrides))

    def __getattr__(self, name: str) -> Any:
        if name in ("tree", "settings") or name.startswith("__"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.settings, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecipeTree) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(repr(self.settings))

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{key}={value!r}' for key, value in self.tree.items())})"


def merged(tree: Mapping[str, Any], keys: Mapping[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """A copy of a tree with other values: of keywords, which may have dots or be tables, and of `key=value`."""
    made: dict[str, Any] = copy.deepcopy(dict(tree))
    for key, value in keys.items():
        put(made, key.split("."), value)
    if isinstance(made.get("env"), Mapping):
        made["env"] = [made["env"]]
    for override in overrides:
        if not isinstance(override, str):
            raise ValueError(f'Recipe takes keywords and "key=value" strings, got {type(override).__name__}')
        apply_override(made, override)
    return made


def put(node: dict[str, Any], path: list[str], value: Any) -> None:
    """Set, merge or remove what a path of keys leads to."""
    key, *below = path
    if below:
        child = node.setdefault(key, {})
        if isinstance(child, list) and len(child) == 1:  # the only entry of [[env]]
            child = child[0]
        if not isinstance(child, dict):
            raise ValueError(f"Recipe: {'.'.join(path)}: {key} is no table; write all of {key} instead")
        put(child, below, value)
    elif value is None:
        node.pop(key, None)
    elif isinstance(value, Mapping) and isinstance(node.get(key), dict) and not (key in CHOICES and "name" in value):
        for inner, one in value.items():
            put(node[key], [str(inner)], one)
    else:
        node[key] = plain(value)


def plain(value: Any) -> Any:
    """A value as TOML would have given it; None removes keys of tables too."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def with_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with a stand-in for the name of an environment that is to be given as a class."""
    entries = tree.get("env", [{}])
    if not isinstance(entries, list):
        return dict(tree)
    named = [{"name": UNNAMED, **entry} if isinstance(entry, Mapping) else entry for entry in entries]
    return {**tree, "env": named or [{"name": UNNAMED}]}
