"""Tasks that a user gives in place of an environment's own: rows of a table, checked one by one."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from turnwise.data.tables import Row, read_rows
from turnwise.envs.capabilities import task_fields_of
from turnwise.envs.split import digest_of, is_heldout
from turnwise.recipe.arguments import suggest
from turnwise.types import Task

log = logging.getLogger(__name__)
WHOLE = frozenset({"id", "dataset", "data"})
"""Fields of a row that has a task's data in a field of its own; those of any other row are the data themselves."""


def given_tasks(train: str, heldout: str, split: str, label: str, kind: Any) -> Iterator[Task]:
    """The tasks of a split for a class of environments: of the table for it, or, where only one for training is given,
    the fifth of its tasks whose ids say so are held out. In a small table that may be none or all; then a fifth of it,
    at least one task, is held out by the order of the ids' digests."""
    found = tasks_in(heldout if split == "heldout" and heldout else train, label, kind)
    if heldout:
        yield from found
        return
    tasks = list(found)
    held = {task.id for task in tasks if is_heldout(task.id)}
    if not held or len(held) == len(tasks):
        if len(tasks) < 2:
            raise ValueError(
                f"{train} has {len(tasks)} task{'' if tasks else 's'}, too few to hold one out; name tasks to evaluate "
                "on in env.heldout"
            )
        held = {task.id for task in sorted(tasks, key=lambda task: digest_of(task.id))[: math.ceil(len(tasks) / 5)]}
        if split == "heldout":
            log.warning(
                "%s has only %d tasks: %d held out, %d to train on; name tasks to evaluate on in env.heldout",
                *(train, len(tasks), len(held), len(tasks) - len(held)),
            )
    yield from (task for task in tasks if (task.id in held) == (split == "heldout"))


def tasks_in(source: str, label: str, kind: Any) -> Iterator[Task]:
    """The tasks of a table, each with an id of its own."""
    wanted = fields_of(kind)
    seen: dict[str, str] = {}
    for place, row in read_rows(source):
        task = task_in((place, row), label, wanted)
        if task.id in seen:
            raise ValueError(f'{place}: id "{task.id}" is that of {seen[task.id]}; give each its own')
        seen[task.id] = place
        yield task


def fields_of(kind: Any) -> dict[str, TypeAdapter[Any]]:
    """What an environment needs of a task's data, where its class says so in `task_fields`."""
    return {name: TypeAdapter(hint) for name, hint in task_fields_of(kind).items()}


def task_in(row: Row, label: str, wanted: Mapping[str, TypeAdapter[Any]]) -> Task:
    """The task in a row; a mistake names the row and the field."""
    place, content = row
    if isinstance(content, Task):
        content = {"id": content.id, "data": dict(content.data)}
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{place}: expected an object with a name for every field, got {type(content).__name__}")
    data = dict(content)
    if isinstance(data.get("data"), Mapping) and data.keys() <= WHOLE:
        data = dict(content["data"])
    try:
        text = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {unwritable(data)}: cannot be written as JSON") from None
    for name, adapter in wanted.items():
        check_field(place, data, name, adapter)
    name = content.get("id", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError(f"{place}: id: needs to be a text or a number, got {json.dumps(name)}")
    return Task(str(name), label, data)


def check_field(place: str, data: Mapping[str, Any], name: str, adapter: TypeAdapter[Any]) -> None:
    found = [each for each in name.split("|") if each in data]
    if not found:
        raise ValueError(f"{place}: {name.replace('|', ' or ')}: is missing{suggest(name.partition('|')[0], data)}")
    name = found[0]
    try:
        adapter.validate_python(data[name], strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (name, *first["loc"]))
        raise ValueError(f"{place}: {where}: {first['msg']}, got {json.dumps(data[name])[:100]}") from None


def unwritable(data: Mapping[str, Any]) -> str:
    """The name of a field that is not JSON."""
    for name, value in data.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return name
    return "a field"
