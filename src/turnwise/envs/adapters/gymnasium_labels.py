"""What the numbers of gymnasium's own environments mean: the library says it in its documentation only.

A table has names of actions in order and names of the parts of an observation, by the name of the environment without
its version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ACTIONS: dict[str, tuple[str, ...]] = {
    "Acrobot": ("left", "none", "right"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "LunarLander": ("none", "left", "main", "right"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
PARTS: dict[str, tuple[str, ...]] = {
    "Acrobot": ("cos 1", "sin 1", "cos 2", "sin 2", "angular velocity 1", "angular velocity 2"),
    "Blackjack": ("your sum", "dealer's card", "usable ace"),
    "CartPole": ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    "LunarLander": (
        "x",
        "y",
        "x velocity",
        "y velocity",
        "angle",
        "angular velocity",
        "left leg down",
        "right leg down",
    ),
    "MountainCar": ("position", "velocity"),
}


def short_name(name: str) -> str:
    """The name of an environment without its namespace and its version."""
    return name.rpartition("/")[2].rpartition("-v")[0]


def action_names(name: str, game: Any) -> tuple[str, ...]:
    """The names of the actions that the environment itself has, or that the table has for it; otherwise empty."""
    if callable(meanings := getattr(game, "get_action_meanings", None)):
        return tuple(str(meaning).lower() for meaning in meanings())
    members = getattr(getattr(game, "actions", None), "__members__", None)
    if members is not None:
        return tuple(members)
    return ACTIONS.get(short_name(name), ())


def in_words(observation: Any, parts: Sequence[str] = ()) -> str:
    """Arrays and nested values as short text, one line for each part that has a name. A mapping has names, the members
    of a tuple have numbers unless they are named."""
    import numpy

    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {in_words(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        names = parts if len(parts) == len(observation) else [f"part {number}" for number in range(len(observation))]
        return "\n".join(f"{name}: {in_words(value)}" for name, value in zip(names, observation, strict=True))
    array = numpy.asarray(observation)
    if array.ndim == 1 and len(parts) == len(array):
        return "\n".join(f"{name}: {in_words(value)}" for name, value in zip(parts, array, strict=True))
    return str(numpy.round(array.astype(float), 4).tolist() if array.dtype.kind == "f" else array.tolist())
