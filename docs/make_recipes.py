"""Writes docs/reference/recipes.md from the docstrings of the recipe's models: python docs/make_recipes.py"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.assemble.objective import GIVEN_TO_ESTIMATORS, Variant
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.filters import FILTERS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.envs.guess import Guess
from turnwise.envs.hops import Hops
from turnwise.envs.math.env import Math
from turnwise.envs.search.env import Search
from turnwise.envs.sql.env import Sql
from turnwise.learn.losses import LOSSES
from turnwise.recipe.allowed import allowed_values, default_value, toml
from turnwise.recipe.keys import RecipeKey, keys_of, tables_of
from turnwise.recipe.section import Section

HEAD = """# Recipes

A recipe is a TOML file; `key=value` on the command line overrides it (`turnwise train recipe.toml max_lag=2
optimizer.learning_rate=1e-5 env.0.weight=2`). Unknown keys are refused, and so is a setting that the chosen combination
would ignore. This page is made by `python docs/make_recipes.py`; `turnwise train --keys WORD` shows the same in a
terminal.

* A value without a key is the name of what a table chooses, or its main key: `credit=rloo`, `loss=gspo`, `env=hops`,
  `engine=vllm`, `model=Qwen/Qwen3-0.6B`, `kl=0.1`, `lora=8`. A recipe may write it, too: `credit = "rloo"`.
* `key=` removes a key, so that its default holds: `model.hidden=`; `env.1=` removes an entry.
* A list may be written as words: `trackers=wandb,tensorboard`.
* Words of TRL, verl, SkyRL and prime-rl are answered with the key: `lr is optimizer.learning_rate here`.
* What may change on a resume: [run folders](runs.md#changes-on-a-resume).

The [short list](#the-short-list) has the {short} keys that a person sets. The other {rest} keys are in
[tables that you can forget](#tables-that-you-can-forget): their defaults serve nearly every run, and each table says
when to open it.

## The short list
"""
FORGET = """
## Tables that you can forget

You can forget these tables until the sentence below a heading describes your run. A recipe without a table has all
defaults of the table.
"""


def tables(*, short: bool) -> list[str]:
    """The keys of the short list, or the others, table by table."""
    lines, names = [], defaultdict(list)
    for name, model in tables_of():
        names[model].append(name)
    for model, tables in names.items():
        keys = [key for key in keys_of(model) if key.table == "" and key.in_short_list is short]
        if keys:
            lines += [f"\n### {', '.join(f'`[{name}]`' if name else 'Top level' for name in tables)}\n"]
            lines += [*described(model, short=short), "", "| key | values | default | meaning |", "|---|---|---|---|"]
            lines += [row(replace(key, table=tables[0])) for key in keys]
    return lines


def described(model: type[Section], *, short: bool) -> list[str]:
    """The docstring of a table. When to open it is said where its other keys are."""
    text = " ".join(inspect.cleandoc(model.__doc__ or "").split())
    return [text.partition(" Open it ")[0] if short else text]


def row(key: RecipeKey) -> str:
    meaning = " ".join((key.field.description or "").split()).replace("|", "\\|")
    return f"| `{key.name}` | {allowed_values(key).replace('|', 'or')} | {default_of(key)} | {meaning} |"


def default_of(key: RecipeKey) -> str:
    text = default_value(key.field)
    return text if text == "required" else f"`{text}`"


def choices(
    title: str, variants: Mapping[str, Variant], default: str, extra: str = "", given: Collection[str] = ()
) -> list[str]:
    """A table of the functions a name chooses from, with their settings: all parameters but the given ones."""
    lines = [f"\n### `[{title}]`\n", f"`name` chooses one; the default is `{default}`. {extra}".strip(), ""]
    lines += ["| name | settings | what it is |", "|---|---|---|"]
    for name, variant in variants.items():
        lines.append(f"| `{name}` | {settings_of(variant.function, given)} | {first_line(variant.function)} |")
    return lines


def settings_of(function: Callable[..., Any], given: Collection[str] = ()) -> str:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    own = [
        p for p in parameters if p.kind is p.KEYWORD_ONLY or (p.default is not p.empty and inspect.isclass(function))
    ]
    return ", ".join(f"`{p.name} = {toml(p.default)}`" for p in own) or "none"


def first_line(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def page() -> str:
    keys = list(keys_of())
    num_short = sum(key.in_short_list for key in keys)
    anchor = (
        '`anchor = "engine" | "learner"` says which logprobs a ratio is taken against '
        "([decision 4](../decisions/0004-anchor.md))."
    )
    lines = [HEAD.format(short=num_short, rest=len(keys) - num_short), *tables(short=True)]
    lines += choices("credit", ESTIMATORS, "grpo", given=GIVEN_TO_ESTIMATORS)
    lines += choices("weighting", WEIGHTINGS, "token_mean")
    lines += choices("loss", LOSSES, "ppo_clip", anchor)
    lines += choices("filter", FILTERS, "keep_all")
    lines += ["\n### Built-in environments\n", "| name | settings | tasks |", "|---|---|---|"]
    built_in: dict[str, Any] = {"hops": Hops, "guess": Guess, "search": Search, "sql": Sql, "math": Math}
    for name, environment in built_in.items():
        arguments = list(inspect.signature(environment.tasks).parameters.values())[2:]
        tasks = ", ".join(f"`{p.name} = {toml(p.default)}`" for p in arguments)
        lines.append(f"| `{name}` | {settings_of(environment)} | {tasks} |")
    lines += [FORGET, *tables(short=False)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "recipes.md").write_text(page())
