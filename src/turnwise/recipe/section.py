"""The tables of a recipe: frozen, and strict about their keys."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    in_short_list: ClassVar[tuple[str, ...] | None] = None
    """The keys that a person sets; None for all of the table's own keys. The other keys have defaults that serve nearly
    every run, and the docstring of their table says when to open it."""

    @property
    def changed(self) -> list[str]:
        """Keys with another value than their default: what somebody wanted, also after a round trip through a file."""
        return [name for name, f in type(self).model_fields.items() if getattr(self, name) != f.default]


class Choice(Section):
    """A function chosen by name; every other key is an argument of that function."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str
    """Which function."""

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
