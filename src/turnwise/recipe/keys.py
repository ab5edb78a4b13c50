"""The keys of a recipe, as its tables define them, and which of them a person sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice, Section


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One key of a recipe.

    Example:
        RecipeKey("rollout", "max_turns", RolloutConfig.model_fields["max_turns"], in_short_list=True)
    """

    table: str
    """Name of its table, for instance "rollout.limits"; empty at the top level."""
    name: str
    """Name within its table."""
    field: FieldInfo
    """Default and description."""
    in_short_list: bool
    """Whether a person sets it; the others can be forgotten."""


def tables_of(section: type[Section] = Recipe, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """(name, model) of a table and of all tables below it, in order."""
    yield name, section
    for key, field in section.model_fields.items():
        if (inner := table_in(field)) is not None:
            yield from tables_of(inner, f"{name}.{key}" if name else key)


def keys_of(section: type[Section] = Recipe) -> Iterator[RecipeKey]:
    """All keys of a table and of the tables below it, in order."""
    for table, model in tables_of(section):
        for name, field in model.model_fields.items():
            if table_in(field) is None:
                yield RecipeKey(table, name, field, model.in_short_list is None or name in model.in_short_list)


def table_in(field: FieldInfo) -> type[Section] | None:
    """The table that a field holds; None for a value and for a function chosen by name."""
    candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
    found = [one for one in candidates if isinstance(one, type) and issubclass(one, Section)]
    return None if not found or found[0] is Choice else found[0]
