"""From a recipe to the parts of a run. The one place where names in a recipe become functions and objects."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from turnwise import config
from turnwise.config import Recipe
from turnwise.credit.estimators import COMPARE_ATTEMPTS, ESTIMATORS, imitate, needs
from turnwise.credit.filters import FILTERS, WITHIN_GROUPS
from turnwise.credit.truncation import TRUNCATIONS
from turnwise.credit.weighting import WEIGHTINGS, token_mean
from turnwise.engines.base import Engine, Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.slots import SlotEngine, SlotModel
from turnwise.envs.base import Environment
from turnwise.learn.learner import Learner, OptimizerSettings
from turnwise.learn.losses import LOSSES, likelihood
from turnwise.learn.policy import DTYPES, Policy, load_model, load_tokenizer, pick_device
from turnwise.learn.schedules import schedule
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.loop import Settings, Stages
from turnwise.plan.pack import pack
from turnwise.rollout.demonstrate import Demonstrator, Recital, can_demonstrate, read_demonstrations
from turnwise.rollout.group import Practice
from turnwise.rollout.limits import Limits
from turnwise.rollout.render import Renderer
from turnwise.schedule.tasks import Draw, TaskOrder
from turnwise.types import Group, Task

BUILT_IN = {"hops": "turnwise.envs.hops:Hops", "guess": "turnwise.envs.guess:Guess"}


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in the event loop itself: nothing else runs meanwhile."""
    return function(*arguments)


def in_own_thread(name: str) -> Callable[..., Awaitable[Any]]:
    """Calls in one thread that is always the same: a thread has its own memory arena and its own OpenMP team, and a
    pool would grow one of each per worker."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    return run


# ---------------------------------------------------------------- environments


def environment_class(name: str) -> Any:
    """The class a recipe's `env.name` means."""
    target = BUILT_IN.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(f'env.name = "{name}" is not built in{config.suggest(name, BUILT_IN)} or write "module:Class"')
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
        makers[entry.label] = partial(
            found, **config.check_arguments(entry.name, "env.settings", found, entry.settings)
        )
    return makers


def tasks_of(recipe: Recipe, split: str, count: int | None = None) -> dict[str, list[Task]]:
    """By dataset: the tasks of a split, at most `count` of each."""
    datasets = {}
    for entry in recipe.env:
        found = environment_class(entry.name)
        arguments = config.check_arguments(entry.name, "env.tasks", found.tasks, entry.tasks, ("self", "split", "seed"))
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


def limits(recipe: Recipe) -> Limits:
    r = recipe.rollout
    return Limits(
        r.max_turns,
        r.max_prompt_tokens,
        r.max_action_tokens,
        r.max_trajectory_tokens,
        r.turn_seconds,
        r.attempt_seconds,
    )


# ---------------------------------------------------------------- model


async def tiny_texts(recipe: Recipe, count: int = 256) -> list[str]:
    """Conversations of the recipe's environments, for a tokenizer to learn its words from."""
    spell = Renderer(build_tokenizer([]))
    makers = environment_makers(recipe)
    generous = Limits(recipe.rollout.max_turns, 1 << 20, 1 << 20, 1 << 21)
    texts = []
    expert = Demonstrator(makers, spell, generous, recipe.seed, noise=0.2)
    for tasks in tasks_of(recipe, "train", count).values():
        for task in tasks:
            group = await expert.group(task, 0)
            for trajectory in (*group.trajectories, *group.failed):
                for last in trajectory.turns[-1:]:
                    texts.append(spell.decode([*last.prompt, *last.action]))
    return [part for text in texts for part in text.replace("<|im_start|>", "<|im_end|>").split("<|im_end|>")]


async def model_and_tokenizer(recipe: Recipe, path: str | Path | None = None) -> tuple[Any, Any]:
    """The policy's model in float32 and its tokenizer: from a folder, or the tiny ones built by code."""
    if path is None and recipe.model.path != "tiny":
        path = recipe.model.path
    if path is not None:
        model, tokenizer = load_model(path), load_tokenizer(path)
    else:
        tokenizer = build_tokenizer(await tiny_texts(recipe))
        context = recipe.rollout.max_trajectory_tokens
        model = build_model(tokenizer, recipe.model.hidden, recipe.model.layers, context, recipe.seed)
    longest = getattr(model.config, "max_position_embeddings", None) or recipe.rollout.max_trajectory_tokens
    if recipe.rollout.max_trajectory_tokens > longest:
        raise ValueError(
            f"rollout.max_trajectory_tokens = {recipe.rollout.max_trajectory_tokens} is more than "
            f"the {longest} positions of this model; lower it"
        )
    return model.to(pick_device(recipe.model.device)), tokenizer


def set_threads(recipe: Recipe) -> None:
    cores = os.cpu_count() or 1
    torch.set_num_threads(recipe.model.threads or max(1, cores // (2 if recipe.max_lag else 1)))


# ---------------------------------------------------------------- parts of a run


@dataclass(frozen=True, slots=True)
class Parts:
    """All that a run is made of."""

    recipe: Recipe
    tokenizer: Any
    renderer: Renderer
    learner: Learner
    engine: Engine
    tasks: TaskOrder
    settings: Settings
    stages: Stages


def check(recipe: Recipe) -> None:
    """Refuse, before anything heavy, names that do not exist and settings that would be ignored."""
    environment_makers(recipe)
    if recipe.model.path != "tiny" and not Path(recipe.model.path).is_dir():
        where = recipe.model.path
        raise ValueError(f'no model folder at {where}; save one there with save_pretrained, or set model.path = "tiny"')
    estimator = config.choose("credit", recipe.credit, ESTIMATORS, ("groups", "scores"))
    ESTIMATORS[recipe.credit.name]([], {}, **estimator)  # settings out of range are refused here
    weighting = config.choose("weighting", recipe.weighting, WEIGHTINGS, ("groups",))
    WEIGHTINGS[recipe.weighting.name]([], **weighting)
    config.choose("filter", recipe.filter, FILTERS, ("group",))
    split_loss(recipe)
    if recipe.filter.name == "zero_variance" and recipe.credit.name not in WITHIN_GROUPS:
        raise ValueError(
            f"filter zero_variance would drop groups that still carry signal for {recipe.credit.name}; "
            f"use it with {' or '.join(sorted(WITHIN_GROUPS))}, or remove it"
        )
    if missing := needs(recipe.credit.name, estimator):
        raise ValueError(
            f"credit {recipe.credit.name} needs {' and '.join(sorted(missing))} from a model beside the policy, which "
            "no recipe can name yet"
        )
    if recipe.credit.name in COMPARE_ATTEMPTS and recipe.rollout.min_attempts < 2:
        raise ValueError(f"credit {recipe.credit.name} compares attempts; rollout.min_attempts must be at least 2")
    if recipe.credit.name not in COMPARE_ATTEMPTS and recipe.groups_per_step * recipe.rollout.attempts < 2:
        raise ValueError(
            "a step of one attempt has nothing to compare it with; raise groups_per_step or rollout.attempts"
        )


def split_loss(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """(anchor, arguments of the loss function)."""
    arguments = recipe.loss.arguments
    anchor = arguments.pop("anchor", "engine")
    if anchor not in ("learner", "engine"):
        raise ValueError(
            f'loss.anchor = {anchor!r}: write "learner" (scored before the update) or "engine" (as sampled)'
        )
    named = config.Choice(name=recipe.loss.name, **arguments)
    if anchor == "learner" and recipe.updates_per_step == 1 and (arguments or recipe.max_lag):
        ignored = "max_lag" if recipe.max_lag else f"loss.{next(iter(arguments))}"
        raise ValueError(
            f'{ignored} would be ignored: with loss.anchor = "learner" the ratio of a step\'s only update is 1; '
            'set loss.anchor = "engine", or more updates by groups_per_update or epochs'
        )
    return anchor, config.choose("loss", named, LOSSES, ("logprobs", "old", "advantages"))


def learner_of(recipe: Recipe, model: Any, optimizer: config.Optimizer, updates: int) -> Learner:
    policy = Policy(model, dtype=DTYPES[recipe.model.dtype], temperature=recipe.sampling.temperature)
    settings = OptimizerSettings(optimizer.learning_rate, optimizer.betas, optimizer.weight_decay, optimizer.clip_norm)
    return Learner(policy, settings, schedule(optimizer.schedule, optimizer.warmup, updates))


def engine_of(recipe: Recipe, model: Any, renderer: Renderer, version: int) -> SlotEngine:
    """The in-process engine: on the learner's own module at lag 0, on a copy where sampling and learning overlap."""
    overlapping = recipe.max_lag > 0
    slot_model = SlotModel(
        copy.deepcopy(model) if overlapping else model,
        slots=recipe.engine.slots,
        context=recipe.engine.context or recipe.rollout.max_trajectory_tokens,
        end_tokens=[renderer.end_token],
        decode=renderer.decode,
        dtype=DTYPES[recipe.model.dtype],
        version=version,
    )
    return SlotEngine(
        slot_model, run=in_own_thread("engine") if overlapping else inline, shares_weights=not overlapping
    )


def practice_of(recipe: Recipe, engine: Engine, renderer: Renderer) -> Practice:
    """How training attempts are made."""
    return Practice(
        environments=environment_makers(recipe),
        engine=engine,
        renderer=renderer,
        sampling=Sampling(recipe.rollout.max_action_tokens, recipe.sampling.temperature),
        limits=limits(recipe),
        seed=recipe.seed,
        split="train",
        attempts=recipe.rollout.attempts,
        retries=recipe.rollout.retries,
    )


def exam_of(recipe: Recipe, engine: Engine, renderer: Renderer, *, greedy: bool) -> Practice:
    """How held-out attempts are made: the same loop with its own sampling."""
    e = recipe.evaluation
    greedily = Sampling(recipe.rollout.max_action_tokens, temperature=0.0)
    sampled = Sampling(recipe.rollout.max_action_tokens, e.temperature, e.top_p, e.top_k)
    return Practice(
        environments=environment_makers(recipe),
        engine=engine,
        renderer=renderer,
        sampling=greedily if greedy else sampled,
        limits=limits(recipe),
        seed=recipe.seed,
        split="heldout/greedy" if greedy else "heldout/sampled",
        attempts=1 if greedy else e.attempts,
        retries=recipe.rollout.retries,
    )


def build(recipe: Recipe, model: Any, tokenizer: Any, step: int = 0) -> Parts:
    """The parts of a reinforcement-learning run that has done `step` steps."""
    check(recipe)
    anchor, loss_arguments = split_loss(recipe)
    renderer = Renderer(tokenizer, recipe.rollout.history)
    learner = learner_of(recipe, model, recipe.optimizer, recipe.steps * recipe.updates_per_step)
    engine = engine_of(recipe, model, renderer, step)
    practice = practice_of(recipe, engine, renderer)
    truncation = TRUNCATIONS[recipe.rollout.truncated]
    worth = partial(FILTERS[recipe.filter.name], **config.choose("filter", recipe.filter, FILTERS, ("group",)))
    estimator = config.choose("credit", recipe.credit, ESTIMATORS, ("groups", "scores"))
    estimate = partial(ESTIMATORS[recipe.credit.name], **estimator)
    weighting = config.choose("weighting", recipe.weighting, WEIGHTINGS, ("groups",))
    stages = Stages(
        practise=lambda draw: practice.group(draw.task, draw.visit),
        keep=lambda group: len(group.trajectories) >= recipe.rollout.min_attempts and worth(truncation.pay([group])[0]),
        plan=partial(pack, tokens_per_pass=recipe.tokens_per_pass),
        estimate=lambda groups, scores: estimate(truncation.pay(groups), scores),
        weigh=truncation.weigh(partial(WEIGHTINGS[recipe.weighting.name], **weighting)),
        loss=partial(LOSSES[recipe.loss.name], **loss_arguments),
        run=in_own_thread("learner") if recipe.max_lag else inline,
    )
    return Parts(
        recipe,
        tokenizer,
        renderer,
        learner,
        engine,
        task_order(recipe, tasks_of(recipe, "train")),
        settings_of(recipe, anchor),
        stages,
    )


def settings_of(recipe: Recipe, anchor: str) -> Settings:
    return Settings(
        steps=recipe.steps,
        max_lag=recipe.max_lag,
        groups_per_step=recipe.groups_per_step,
        groups_per_update=recipe.groups_per_update or recipe.groups_per_step,
        epochs=recipe.epochs,
        anchor=anchor,
        success_at=recipe.rollout.success_at,
        nonfinite_limit=recipe.nonfinite_limit,
        dropped_limit=recipe.dropped_limit,
    )


def build_sft(recipe: Recipe, model: Any, tokenizer: Any) -> Parts:
    """The parts of a warm start: the same loop, with demonstrations for attempts and likelihood for a loss."""
    renderer = Renderer(tokenizer, recipe.rollout.history)
    sft = recipe.sft
    learner = learner_of(recipe, model, sft.optimizer, sft.updates)
    practise: Callable[[Draw], Awaitable[Group]]
    if sft.data:
        recital = Recital(renderer)
        tasks = read_demonstrations(Path(sft.data))
        order = TaskOrder({tasks[0].dataset: tasks}, {tasks[0].dataset: 1.0}, recipe.seed)
        practise = lambda draw: recital.group(draw.task, draw.visit)
    else:
        makers = environment_makers(recipe)
        for label, make in makers.items():
            if not can_demonstrate(make()):
                raise ValueError(
                    f"{label} cannot demonstrate; give it a method demonstrate(noise, random) or set sft.data"
                )
        expert = Demonstrator(makers, renderer, limits(recipe), recipe.seed, sft.noise)
        order = task_order(recipe, tasks_of(recipe, "train", sft.demonstrations))
        practise = lambda draw: expert.group(draw.task, draw.visit)
    stages = Stages(
        practise=practise,
        keep=lambda group: bool(group.trajectories),
        plan=partial(pack, tokens_per_pass=recipe.tokens_per_pass),
        estimate=imitate,
        weigh=token_mean,
        loss=likelihood,
        run=inline,
    )
    settings = Settings(
        steps=sft.updates,
        max_lag=0,
        groups_per_step=sft.batch,
        groups_per_update=sft.batch,
        epochs=1,
        anchor="learner",
        success_at=recipe.rollout.success_at,
        nonfinite_limit=recipe.nonfinite_limit,
        dropped_limit=recipe.dropped_limit,
    )
    nobody = ScriptedEngine(lambda prompt, session, seed: "", lambda text: [], end_token=renderer.end_token)
    return Parts(recipe, tokenizer, renderer, learner, nobody, order, settings, stages)
