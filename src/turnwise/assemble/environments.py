"""From a recipe to its environments: their classes, agents, batched calls and tasks."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.assemble.task_tables import given_tasks
from turnwise.cluster.remote_envs import RemoteEnvironments
from turnwise.data.json_lines import numbered_lines, parse_line
from turnwise.envs.adapters import ADAPTERS, adapted
from turnwise.envs.base import Environment
from turnwise.envs.capabilities import (
    brings_agent,
    check_settings,
    heldout_settings_of,
    is_batchable,
    makes_tasks,
    models_of,
    reads_calls,
)
from turnwise.envs.isolation.isolated import Isolated
from turnwise.envs.isolation.user_environment import isolated_class
from turnwise.envs.isolation.variables import check_variables
from turnwise.envs.live import is_live, live_class, refuse_processes
from turnwise.recipe.arguments import check_arguments, suggest
from turnwise.recipe.built_in import BUILT_IN
from turnwise.recipe.environment import EnvironmentConfig
from turnwise.recipe.schema import Recipe
from turnwise.rollout.batching.batches import Batches, lane_of, rule_of
from turnwise.rollout.environment_host import EnvironmentHost
from turnwise.rollout.environments import DEMONSTRATED, DatasetEnvironments, Environments
from turnwise.rollout.failures import Failures
from turnwise.rollout.open_limit import OpenLimit, default_open_limit
from turnwise.schedule.tasks import FreshTasks, TaskOrder
from turnwise.seeds import seed_of
from turnwise.serve.agents.agent import Agent, calling, find_agent, is_function
from turnwise.serve.agents.drive import Driver
from turnwise.serve.endpoint import Endpoint
from turnwise.types import Task

FRESH_PROBES = 4
"""Visits of a dataset that are drawn before the first step, to see whether they differ."""


def environment_class(name: str, variables: tuple[str, ...] = ()) -> Any:
    """The class a recipe's `env.name` means: built in, of a library that has an adapter, or the user's own. A library's
    process gets these variables beside the usual ones."""
    target = BUILT_IN.get(name, name)
    module, colon, attribute = target.partition(":")
    if module in ADAPTERS:
        return adapted(module, attribute, variables)
    if not colon:
        raise ValueError(f'env.name = "{name}" is not built in{suggest(name, BUILT_IN)} or write "module:Class"')
    found = live_class(name) if is_live(name) else imported_class(name, module, attribute)
    for method in ("open", "step", "close"):
        if not callable(getattr(found, method, None)):
            raise ValueError(f'env.name = "{name}": {attribute} needs a method {method}')
    if not makes_tasks(found):
        raise ValueError(f'env.name = "{name}": {attribute} needs a method tasks')
    return found


def imported_class(name: str, module: str, attribute: str) -> Any:
    """What a module has under a name."""
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        near = get_close_matches(module, ADAPTERS, n=1)
        advice = f"did you mean {near[0]}:{attribute}?" if near else "is the module on PYTHONPATH?"
        raise ValueError(f'env.name = "{name}": {error}; {advice}') from None
    except AttributeError:
        raise ValueError(f'env.name = "{name}": module {module} has no {attribute}') from None


def kind_of(entry: EnvironmentConfig) -> Any:
    """The class that an entry of a recipe means, isolated where it says so."""
    found = environment_class(entry.name, entry.isolation.variables)
    if entry.concurrency.actors:
        refuse_processes(entry.name, "env.concurrency.actors")
    if not entry.isolation.enabled:
        return found
    refuse_processes(entry.name, "env.isolation.enabled")
    return isolated_class(
        BUILT_IN.get(entry.name, entry.name), found, entry.isolation.memory, entry.isolation.variables
    )


def environment_makers(recipe: Recipe) -> dict[str, Callable[[], Environment]]:
    """By dataset: makes a fresh environment with the recipe's settings."""
    makers: dict[str, Callable[[], Environment]] = {}
    for entry in recipe.env:
        found = kind_of(entry)
        if not is_batchable(found) and (ignored := entry.batching.changed):
            raise ValueError(
                f"env.batching.{ignored[0]} would be ignored: {entry.name} has no step_many or close_many; remove it"
            )
        if reads_calls(found) and recipe.rollout.tools == "none":
            raise ValueError(f'{entry.name} is made of tools; set rollout.tools = "auto"')
        check_variables(entry.isolation.variables)
        if entry.isolation.variables and not (has_process(found) or (entry.agent and not is_function(entry.agent))):
            raise ValueError(
                f"env.isolation.variables would be ignored: {entry.name} runs in the run's own process, which has "
                "them; remove it"
            )
        settings = check_arguments(entry.name, "env.settings", found, entry.settings)
        check_settings(found, settings)
        makers[entry.label] = partial(found, **settings)
    return makers


def heldout_makers(recipe: Recipe) -> dict[str, Callable[[], Environment]]:
    """By dataset: makes a fresh environment for a held-out attempt, which may have settings of its own."""
    makers: dict[str, Callable[[], Environment]] = {}
    for entry in recipe.env:
        found = kind_of(entry)
        settings = heldout_settings_of(found, check_arguments(entry.name, "env.settings", found, entry.settings))
        check_settings(found, settings)
        makers[entry.label] = partial(found, **settings)
    return makers


def seats_of(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """By dataset: the models of a game of several seats; datasets of one seat are not in it."""
    models = {
        entry.label: models_of(
            found := kind_of(entry), check_arguments(entry.name, "env.settings", found, entry.settings)
        )
        for entry in recipe.env
    }
    seats = {label: of_seats for label, of_seats in models.items() if len(of_seats) > 1}
    if driven := [entry.label for entry in recipe.env if entry.agent and entry.label in seats]:
        raise ValueError(f"env.agent drives one seat, and {driven[0]} has several that models play; remove one")
    return seats


def has_process(found: Any) -> bool:
    """Whether a class of environments runs in processes that are told their variables."""
    return issubclass(found, Isolated) or brings_agent(found)


def agent_of(entry: EnvironmentConfig) -> Agent | None:
    """The agent that drives an environment's attempts: the one that is named, or that it brings; None where the model
    acts in it directly."""
    found = kind_of(entry)
    if not brings_agent(found):
        return find_agent(entry.agent, entry.isolation.variables) if entry.agent else None
    if entry.agent:
        raise ValueError(f'env.agent = "{entry.agent}" would be ignored: {entry.name} plays itself; remove it')
    settings = check_arguments(entry.name, "env.settings", found, entry.settings)
    return calling(found.agent_for(**settings), entry.name)


def open_limits_of(recipe: Recipe) -> dict[str, OpenLimit]:
    """By dataset: how many of its environments may be alive at once. Those without a bound of their own share one: what
    they take is the machine's."""
    shared: dict[int, OpenLimit] = {}
    open_limits = {}
    for entry in recipe.env:
        limit = entry.concurrency.max_open or (entry.concurrency.max_concurrent_agents if entry.is_driven else 0)
        usual = default_open_limit(kind_of(entry), entry.concurrency.actors or None)
        is_shared = not limit and not entry.concurrency.actors
        open_limits[entry.label] = (
            shared.setdefault(usual, OpenLimit(usual)) if is_shared else OpenLimit(limit or usual)
        )
    return open_limits


def endpoint_of(recipe: Recipe) -> Endpoint:
    """The endpoint of a run, which listens once an agent needs it."""
    return Endpoint(recipe.endpoint.host, recipe.endpoint.port, aliases=recipe.endpoint.aliases)


def environments_of(
    recipe: Recipe,
    endpoint: Endpoint,
    open_limits: Mapping[str, OpenLimit] | None = None,
    failures: Failures | None = None,
) -> Environments:
    """The environments of a recipe; agents that drive them find the model at the endpoint. Rollout workers have the
    limits and failures of the run."""
    open_limits, failures = open_limits or open_limits_of(recipe), failures or Failures()
    makers = environment_makers(recipe)
    heldout = heldout_makers(recipe)
    datasets = {}
    for entry in recipe.env:
        agent = agent_of(entry)
        datasets[entry.label] = DatasetEnvironments(
            make=makers[entry.label],
            make_heldout=heldout[entry.label],
            draw=partial(draw_tasks, recipe, entry),
            host=host_of(recipe, entry, open_limits[entry.label], failures),
            open_limit=open_limits[entry.label],
            training=lane_of(entry.batching, validation=False),
            validation=lane_of(entry.batching, validation=True),
            play=None
            if agent is None
            else Driver(agent, endpoint, asyncio.Semaphore(entry.concurrency.max_concurrent_agents)),
        )
    return Environments(datasets, failures, validation_overlaps=recipe.schedule.overlap_evaluations)


def host_of(recipe: Recipe, entry: EnvironmentConfig, open_limit: OpenLimit, failures: Failures) -> EnvironmentHost:
    """What puts calls of an entry's environments together, for training and validation alike, or has them live in other
    processes."""
    kind = kind_of(entry)
    if entry.concurrency.actors:
        return RemoteEnvironments(
            kind, actors=entry.concurrency.actors, cluster=recipe.cluster, open_limit=open_limit, failures=failures
        )
    rule, slots, seconds = rule_of(entry.batching), entry.batching.slots, recipe.rollout.limits.call_seconds
    return Batches(kind, rule=rule, slots=slots, call_seconds=seconds, open_limit=open_limit, failures=failures)


def draw_tasks(recipe: Recipe, entry: EnvironmentConfig, split: str, count: int | None = None) -> list[Task]:
    """The tasks of a split of one entry, at most `count`. Those that are demonstrated are training tasks, drawn with
    arguments of their own."""
    tasks: Iterable[Task]
    if entry.data:
        of_data = "train" if split == DEMONSTRATED else split
        tasks = given_tasks(entry.data, entry.heldout, of_data, entry.label, kind_of(entry))
    elif split == DEMONSTRATED:
        tasks = made_tasks(entry, "train", recipe.seed, "env.demonstrated", {**entry.tasks, **entry.demonstrated})
    else:
        tasks = made_tasks(entry, split, recipe.seed if split == "train" else 0, "env.tasks", entry.tasks)
    drawn = [checked(task, entry.label) for task in islice(tasks, count)]
    if not drawn:
        raise ValueError(f"{entry.label} has no {split} tasks")
    return drawn


def made_tasks(entry: EnvironmentConfig, split: str, seed: int, table: str, given: Mapping[str, Any]) -> Iterable[Task]:
    """What the `tasks` of an environment makes, with the arguments that a table of the recipe gives."""
    kind = kind_of(entry)
    arguments = check_arguments(entry.name, table, kind.tasks, given, ("self", "split", "seed", "settings"))
    if "settings" in inspect.signature(kind.tasks).parameters:
        arguments["settings"] = check_arguments(entry.name, "env.settings", kind, entry.settings)
    made: Iterable[Task] = kind.tasks(split, seed, **arguments)
    return made


def fresh_tasks(recipe: Recipe, entry: EnvironmentConfig, heldout: Sequence[Task]) -> FreshTasks:
    """Training tasks of one entry, a new one for each visit. ValueError where the seed does not matter to them; where
    one of them is held out, that visit raises it."""
    counted = "count" in inspect.signature(kind_of(entry).tasks).parameters
    given = {**entry.tasks, **({"count": 1} if counted else {})}
    held = {task.id for task in heldout}

    def draw(number: int) -> Task:
        seed = seed_of(recipe.seed, "fresh", entry.label, number) >> 1  # within 63 bits, for those who pass it on
        task = checked(next(iter(made_tasks(entry, "train", seed, "env.tasks", given))), entry.label)
        if task.id in held:
            raise ValueError(f'{entry.label}: task "{task.id}" is drawn for training and held out; set env.fresh=false')
        return task

    if len({draw(number).id for number in range(FRESH_PROBES)}) == 1:
        raise ValueError(f"env.fresh = true: {entry.name}.tasks makes the same task for every seed; remove fresh")
    return FreshTasks(draw)


def tasks_of(recipe: Recipe, split: str, count: int | None = None) -> dict[str, list[Task]]:
    """The tasks of a split, by dataset, at most `count` of each."""
    return {entry.label: draw_tasks(recipe, entry, split, count) for entry in recipe.env}


def read_tasks(recipe: Recipe, path: Path) -> list[Task]:
    """Tasks from JSON lines like {"id": "a", "dataset": "hops", "data": {"store": 7, "links": 2}}. The dataset names an
    environment of the recipe and may be left out where that has one; a mistake is named by line and field."""
    labels = [entry.label for entry in recipe.env]
    tasks: dict[Task, int] = {}
    for number, line in numbered_lines(path, "tasks from ", "; give a number or a file"):
        row = parse_line(line, f"{path}, line {number}")
        try:
            task = task_of(row, labels)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if task in tasks:
            raise ValueError(f'{path}, line {number}: id "{task.id}" is that of line {tasks[task]}; give each its own')
        tasks[task] = number
    if not tasks:
        raise ValueError(f"{path} holds no tasks; write one a line")
    return list(tasks)


def task_of(row: Any, labels: Sequence[str]) -> Task:
    """The task that a row describes, for one of the environments with these labels."""
    if not isinstance(row, dict):
        raise ValueError(f'expected {{"id": ..., "dataset": ..., "data": {{...}}}}, got {type(row).__name__}')
    fields: dict[str, Any] = {"id": None, "dataset": labels[0] if len(labels) == 1 else None, "data": {}}
    for name in row:
        if name not in fields:
            raise ValueError(f'unknown field "{name}"{suggest(name, list(fields))}')
    given = {**fields, **row}
    if not isinstance(given["id"], str) or not given["id"]:
        raise ValueError(f"id: needs to be a text, got {json.dumps(given['id'])}")
    if given["dataset"] not in labels:
        wanted = suggest(str(given["dataset"]), labels)
        raise ValueError(f"dataset: {json.dumps(given['dataset'])} is no environment of the recipe{wanted}")
    if not isinstance(given["data"], dict):
        raise ValueError(f"data: needs to be an object, got {json.dumps(given['data'])}")
    return Task(given["id"], given["dataset"], given["data"])


def checked(task: Task, dataset: str) -> Task:
    """The task under its dataset's name, once its data is known to be JSON: the archive will have to write it."""
    if not isinstance(task, Task):
        raise ValueError(f"{dataset}: tasks must be Task values, got {type(task).__name__}")
    try:
        json.dumps(task.data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{dataset}: the data of task {task.id} is not JSON: {error}") from None
    return Task(task.id, dataset, task.data)


def training_order(recipe: Recipe, environments: Environments) -> TaskOrder:
    """The tasks of training in their order."""
    train = environments.tasks("train")
    heldout = environments.tasks("heldout", recipe.evaluation.most_tasks)
    datasets = {
        entry.label: fresh_tasks(recipe, entry, heldout[entry.label]) if entry.fresh else train[entry.label]
        for entry in recipe.env
    }
    return task_order(recipe, datasets, recipe.schedule.max_rest)


def task_order(recipe: Recipe, datasets: Mapping[str, Sequence[Task] | FreshTasks], max_rest: int = 0) -> TaskOrder:
    return TaskOrder(datasets, {entry.label: entry.weight for entry in recipe.env}, recipe.seed, max_rest)
