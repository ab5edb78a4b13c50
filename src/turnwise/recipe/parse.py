"""Reading recipes: TOML files, overrides from the command line, and mistakes explained in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from turnwise.recipe.arguments import suggest
from turnwise.recipe.renamed import new_names, new_values
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice
from turnwise.recipe.shipped import find_recipe, say_missing
from turnwise.recipe.spellings import MAIN_KEYS, our_names, our_values

FOR_RECORDED = "an earlier version of turnwise made this run: use that version, or start a new run with the new names"
SHOWN_OF_RECORDED = 3
"""Old keys that are shown of a recorded run, which has every key of its version: nobody can rename them."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, or of a bare name that comes with turnwise, with `key=value` overrides applied; a
    mistake is a one-line ValueError."""
    path = find_recipe(path)
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(say_missing(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}") from None
    tree = unfolded(tree)
    for override in overrides:
        apply_override(tree, override)
    recipe = parse_recipe(tree, str(path))
    out = recipe.out.replace("{recipe}", path.stem).replace("{seed}", str(recipe.seed))
    return recipe.model_copy(update={"out": out})


def parse_recipe(tree: Mapping[str, Any], source: str, *, is_recorded: bool = False) -> Recipe:
    """The recipe a mapping describes; every mistake in one ValueError line. A recorded recipe is that of a run folder,
    which nobody can rename keys in: a checksum protects it."""
    tree = unfolded(tree)
    problems, renamed = list(our_values(tree)), list(new_values(tree))
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        for problem in said_once(error.errors()):
            is_unknown = problem["type"] == "extra_forbidden"
            if is_unknown and (phrases := new_names(problem["loc"], problem["input"])):
                renamed += phrases
            elif is_unknown and (phrases := our_names(problem["loc"], problem["input"])):
                problems += phrases
            else:
                problems.append(explain(problem))
    else:
        if not renamed and not problems:
            return recipe
    if renamed:
        problems.append(say_renamed(renamed, is_recorded))
    raise ValueError(f"{source}: " + "; ".join(problems)) from None


def say_renamed(phrases: Sequence[str], is_recorded: bool) -> str:
    """What is called otherwise now, and what to do."""
    if not is_recorded:
        return f"{', '.join(phrases)}; {'rename it' if len(phrases) == 1 else 'rename them'}"
    more = len(phrases) - SHOWN_OF_RECORDED
    shown = ", ".join(phrases[:SHOWN_OF_RECORDED])
    return f"{shown}{f', and {more} more' if more > 0 else ''}; {FOR_RECORDED}"


def said_once(problems: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Problems without those of lists that are too short only because pydantic does not count a faulty entry."""
    problems = list(problems)
    faulty = {problem["loc"][:1] for problem in problems if len(problem["loc"]) > 1}
    return [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in faulty]


def explain(problem: Mapping[str, Any]) -> str:
    """One pydantic error as a phrase with the dotted key and, for an unknown one, the nearest name."""
    location = list(problem["loc"])
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        names = list(section_at(location[:-1]).model_fields)
        return f"unknown key {key}{suggest(str(location[-1]), names)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "model_type":
        return f"{key} is a table; write its keys below [{key}] (got {problem.get('input')!r})"
    if problem["type"] == "missing":
        return f"{key} is missing; add it"
    given = problem.get("input")
    shown = f" (got {given!r})" if isinstance(given, (str, int, float, bool)) else ""
    return f"{key}: {message}{shown}" if key else message


def unfolded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe in which a single value given to a table is the key of the table that it is for, as in credit = "rloo",
    and in which settings of a function without a name are those of the default."""
    found = dict(tree)
    for key, value in tree.items():
        if key == "env":
            found[key] = named(value)
        elif is_single(value) and (main := main_key([key])) is not None:
            found[key] = {main: value}
        elif isinstance(value, Mapping) and isinstance(default := default_of(key), Choice):
            found[key] = {"name": default.name, **value}
    return found


def default_of(key: str) -> Any:
    field = Recipe.model_fields.get(key)
    return None if field is None else field.default


def is_single(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def named(value: Any) -> Any:
    """Environments, of which a string names one."""
    return [{"name": value}] if isinstance(value, str) else value


def main_key(parts: Sequence[str]) -> str | None:
    """The key that a single value given to a table is for; None for what is no table or has no such key."""
    try:
        table = section_at(part for part in parts if not part.isdigit())
    except (KeyError, StopIteration):
        return None
    return "name" if "name" in table.model_fields else MAIN_KEYS.get(".".join(parts))


def section_at(location: Iterable[Any]) -> type[BaseModel]:
    """The pydantic model a path of keys leads to."""
    section: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return section


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in a nested mapping; the value is TOML, or a string where it is not. Without a value the key is
    removed, so that its default holds."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f'"{override}" is not an override; write key=value, for instance max_lag=2')
    node: Any = tree
    for part in parts[:-1]:
        node = step_into(node, part, override)
    if not text.strip():
        remove(node, parts, override)
        return
    value = toml_value(text.strip())
    if parts == ["env"]:
        value = named(value)
    elif is_single(value) and (main := main_key(parts)) is not None:
        node, parts = step_into(node, parts[-1], override), [*parts, main]
    elif isinstance(value, str) and is_list(parts):
        value = value.split(",")
    if isinstance(node, list):
        raise ValueError(f'"{override}": name which entry, for instance {parts[0]}.0.weight=2')
    node[parts[-1]] = value


def remove(node: Any, parts: Sequence[str], override: str) -> None:
    """Remove a key, or an entry of a list; one that is not written already has its default."""
    last = parts[-1]
    if isinstance(node, list):
        step_into(node, last, override)
        del node[int(last)]
    elif node.pop(last, None) is None and field_at(parts) is None:
        raise ValueError(f'"{override}" removes nothing: the recipe has no {".".join(parts)}')


def field_at(parts: Sequence[str]) -> FieldInfo | None:
    """The key that a path of names leads to."""
    try:
        table = section_at(part for part in parts[:-1] if not part.isdigit())
    except (KeyError, StopIteration):
        return None
    return table.model_fields.get(parts[-1])


def is_list(parts: Sequence[str]) -> bool:
    """Whether a key holds any number of values, as trackers does."""
    field = field_at(parts)
    return field is not None and Ellipsis in getattr(field.annotation, "__args__", ())


def step_into(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ValueError(f'"{override}": {part} is not an entry; there are {len(node)}, counted from 0')
        return node[int(part)]
    child = node.setdefault(part, {})
    if not isinstance(child, (dict, list)):
        raise ValueError(f'"{override}": {part} is a value, not a table')
    return child


def toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
