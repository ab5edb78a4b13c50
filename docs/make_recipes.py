"""Writes docs/reference/recipes.md from the docstrings of the recipe's models: python docs/make_recipes.py"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from turnwise.assemble.objective import Variant
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.filters import FILTERS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.envs.guess import Guess
from turnwise.envs.hops import Hops
from turnwise.envs.math.env import Math
from turnwise.envs.search.env import Search
from turnwise.envs.sql.env import Sql
from turnwise.learn.losses import LOSSES
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice

HEAD = """# Recipes

A recipe is a TOML file; `key=value` on the command line overrides it (`turnwise train recipe.toml max_lag=2
optimizer.learning_rate=1e-5 env.0.weight=2`). Unknown keys are refused, and so is a setting that the chosen combination
would ignore. This page is made by `python docs/make_recipes.py`.
"""


def section(name: str, model: type[BaseModel]) -> list[str]:
    """A table of the fields of one model, then of the models inside it."""
    lines = [f"\n## {f'`[{name}]`' if name else 'Top level'}\n", inspect.cleandoc(model.__doc__ or ""), ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    inner = []
    for key, field in model.model_fields.items():
        nested = [c for c in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_section(c)]
        if nested:
            inner.append((f"{name}.{key}" if name else key, nested[0]))
            continue
        lines.append(f"| `{key}` | {default_of(field)} | {' '.join((field.description or '').split())} |")
    if len(lines) == 5:
        lines = lines[:3]
    for key, nested_model in inner:
        if nested_model is not Choice:
            lines += section(key, nested_model)
    return lines


def is_section(candidate: Any) -> bool:
    return inspect.isclass(candidate) and issubclass(candidate, BaseModel)


def default_of(field: Any) -> str:
    if field.default is not PydanticUndefined:
        return f"`{field.default!r}`".replace("'", '"')
    return "required" if field.default_factory is None else "`{}`"


def choices(title: str, variants: Mapping[str, Variant], default: str, extra: str = "") -> list[str]:
    """A table of the functions a name chooses from, with their own settings."""
    lines = [f"\n## `[{title}]`\n", f"`name` chooses one; the default is `{default}`. {extra}".strip(), ""]
    lines += ["| name | settings | what it is |", "|---|---|---|"]
    for name, variant in variants.items():
        lines.append(f"| `{name}` | {settings_of(variant.function)} | {first_line(variant.function)} |")
    return lines


def settings_of(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    own = [
        p for p in parameters if p.kind is p.KEYWORD_ONLY or (p.default is not p.empty and inspect.isclass(function))
    ]
    return ", ".join(f"`{p.name} = {toml(p.default)}`" for p in own) or "none"


def toml(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def first_line(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def page() -> str:
    lines = [HEAD, *section("", Recipe)]
    anchor = (
        '`anchor = "engine" | "learner"` says which logprobs a ratio is taken against '
        "([decision 4](../decisions/0004-anchor.md))."
    )
    lines += choices("credit", ESTIMATORS, "grpo")
    lines += choices("weighting", WEIGHTINGS, "token_mean")
    lines += choices("loss", LOSSES, "ppo_clip", anchor)
    lines += choices("filter", FILTERS, "keep_all")
    lines += ["\n## Built-in environments\n", "| name | settings | tasks |", "|---|---|---|"]
    built_in: dict[str, Any] = {"hops": Hops, "guess": Guess, "search": Search, "sql": Sql, "math": Math}
    for name, environment in built_in.items():
        arguments = list(inspect.signature(environment.tasks).parameters.values())[2:]
        tasks = ", ".join(
            f"`{p.name} = {list(p.default) if isinstance(p.default, tuple) else p.default}`" for p in arguments
        )
        lines.append(f"| `{name}` | {settings_of(environment)} | {tasks} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "recipes.md").write_text(page())
