"""Arguments of functions that a recipe names, checked against their signatures before anything is called."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from turnwise.recipe.section import Choice


def choose(
    kind: str, choice: Choice, functions: Mapping[str, Callable[..., Any]], supplied: Sequence[str]
) -> dict[str, Any]:
    """The arguments of the chosen function, checked against its signature; `supplied` ones are the caller's."""
    if choice.name not in functions:
        raise ValueError(f"{kind}.name = {choice.name!r} does not exist{suggest(choice.name, functions)}")
    return check_arguments(f"{kind} {choice.name}", kind, functions[choice.name], choice.arguments, supplied)


def check_arguments(
    who: str, where: str, function: Callable[..., Any], arguments: Mapping[str, Any], supplied: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments converted to the types of the function's signature, or a one-line ValueError."""
    target = function.__init__ if inspect.isclass(function) else function
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in supplied and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    try:
        hints = get_type_hints(target)
    except (NameError, TypeError):
        hints = {}
    checked = {}
    for name, value in arguments.items():
        if name not in parameters:
            raise ValueError(f"{where}.{name}: {who} takes no such setting{suggest(name, parameters)}")
        try:
            checked[name] = TypeAdapter(hints.get(name, Any)).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{where}.{name}: {error.errors()[0]['msg']} (got {value!r})") from None
        if isinstance(checked[name], float) and not math.isfinite(checked[name]):
            raise ValueError(f"{where}.{name}: must be finite (got {value!r})")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in checked:
            raise ValueError(f"{where}.{name} is missing: {who} needs it")
    return checked


def suggest(name: str, names: Iterable[str]) -> str:
    """A phrase that names the nearest known name, or lists them all."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(names)) or 'none'}"
