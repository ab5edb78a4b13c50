"""The mixture of environments that a recipe trains on: their classes, their batched calls and their tasks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from turnwise.arguments import check_arguments, suggest
from turnwise.config import Recipe
from turnwise.envs.base import Environment
from turnwise.rollout.batching import Batches, is_batchable, lane_of, rule_of
from turnwise.schedule.tasks import TaskOrder
from turnwise.types import Task

BUILT_IN = {"hops": "turnwise.envs.hops:Hops", "guess": "turnwise.envs.guess:Guess"}


def environment_class(name: str) -> Any:
    """The class a recipe's `env.name` means."""
    target = BUILT_IN.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(f'env.name = "{name}" is not built in{suggest(name, BUILT_IN)} or write "module:Class"')
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f'env.name = "{name}": {error}; is the module on PYTHONPATH?') from None
    except AttributeError:
        raise ValueError(f'env.name = "{name}": module {module} has no {attribute}') from None
    for method in ("open", "step", "close", "tasks"):
        if not callable(getattr(found, method, None)):
            raise ValueError(f'env.name = "{name}": {attribute} needs a method {method}')
    return found


def environment_makers(recipe: Recipe) -> dict[str, Callable[[], Environment]]:
    """By dataset: makes a fresh environment with the recipe's settings."""
    makers: dict[str, Callable[[], Environment]] = {}
    for entry in recipe.env:
        found = environment_class(entry.name)
        if not is_batchable(found) and (ignored := entry.batching.changed):
            raise ValueError(
                f"env.batching.{ignored[0]} would be ignored: {entry.name} has no step_many or close_many; remove it"
            )
        makers[entry.label] = partial(found, **check_arguments(entry.name, "env.settings", found, entry.settings))
    return makers


def batches_of(recipe: Recipe) -> dict[str, Batches]:
    """By dataset: what puts calls of its environments together, for training and validation alike."""
    return {
        entry.label: Batches(
            environment_class(entry.name),
            rule=rule_of(entry.batching),
            slots=entry.batching.slots,
            call_seconds=recipe.rollout.turn_seconds,
        )
        for entry in recipe.env
    }


def batched_makers(
    recipe: Recipe, batches: Mapping[str, Batches], *, validation: bool
) -> dict[str, Callable[[], Environment]]:
    """By dataset: makes a fresh environment whose calls are put together with others."""
    lanes = {entry.label: lane_of(entry.batching, validation=validation) for entry in recipe.env}
    return {label: batches[label].wrap(make, lanes[label]) for label, make in environment_makers(recipe).items()}


def tasks_of(recipe: Recipe, split: str, count: int | None = None) -> dict[str, list[Task]]:
    """By dataset: the tasks of a split, at most `count` of each."""
    datasets = {}
    for entry in recipe.env:
        found = environment_class(entry.name)
        arguments = check_arguments(entry.name, "env.tasks", found.tasks, entry.tasks, ("self", "split", "seed"))
        made = islice(found.tasks(split, recipe.seed if split == "train" else 0, **arguments), count)
        tasks = [checked(task, entry.label) for task in made]
        if not tasks:
            raise ValueError(f"{entry.label} has no {split} tasks")
        datasets[entry.label] = tasks
    return datasets


def checked(task: Task, dataset: str) -> Task:
    """The task under its dataset's name, once its data is known to be JSON: the archive will have to write it."""
    if not isinstance(task, Task):
        raise ValueError(f"{dataset}: tasks must be Task values, got {type(task).__name__}")
    try:
        json.dumps(task.data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{dataset}: the data of task {task.id} is not JSON: {error}") from None
    return Task(task.id, dataset, task.data)


def task_order(recipe: Recipe, datasets: Mapping[str, list[Task]]) -> TaskOrder:
    return TaskOrder(datasets, {entry.label: entry.weight for entry in recipe.env}, recipe.seed)
