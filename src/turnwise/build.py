"""From a recipe to the parts of a run. The one place where names in a recipe become functions and objects."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from turnwise import choices, config
from turnwise.config import Recipe
from turnwise.credit.estimators import imitate
from turnwise.credit.scope import of_tokens
from turnwise.credit.weighting import token_mean
from turnwise.engines.base import Engine, Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.slots import SlotEngine, SlotModel
from turnwise.learn.critic import Critic, ValueModel
from turnwise.learn.learner import Learner
from turnwise.learn.losses import likelihood
from turnwise.learn.objective import Objective
from turnwise.learn.policy import DTYPES, Policy, load_model, load_tokenizer, pick_device
from turnwise.learn.schedules import Schedule, schedule
from turnwise.learn.stepper import OptimizerSettings
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.loop import Settings, Stages
from turnwise.mixture import batched_makers, batches_of, environment_makers, task_order, tasks_of
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.rollout.batching import Batches
from turnwise.rollout.demonstrate import Demonstrator, Recital, can_demonstrate, read_demonstrations
from turnwise.rollout.group import Practice, all_of
from turnwise.rollout.limits import Limits
from turnwise.rollout.render import Renderer
from turnwise.schedule.tasks import Draw, TaskOrder
from turnwise.schedule.workers import Worker, Workers, in_own_thread, inline
from turnwise.types import Group

LAYOUTS = {"tree": cut, "packed": pack}


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
    generous = replace(
        limits(recipe), max_prompt_tokens=1 << 20, max_action_tokens=1 << 20, max_trajectory_tokens=1 << 21
    )
    expert = Demonstrator(makers, spell, generous, recipe.seed, noise=0.2)
    tasks = [task for of_dataset in tasks_of(recipe, "train", count).values() for task in of_dataset]
    groups = await all_of(expert.group(task, 0) for task in tasks)
    played = [trajectory for group in groups for trajectory in (*group.trajectories, *group.failed)]
    texts = [spell.decode([*last.prompt, *last.action]) for made in played for last in made.turns[-1:]]
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
    exam_engine: Engine
    """What held-out attempts are sampled by: the same, or one of its own where they overlap training."""
    batches: Mapping[str, Batches]
    """By dataset."""
    tasks: TaskOrder
    settings: Settings
    stages: Stages


def check(recipe: Recipe) -> None:
    """Refuse, before anything heavy, names that do not exist and settings that would be ignored."""
    environment_makers(recipe)
    if recipe.model.path != "tiny" and not Path(recipe.model.path).is_dir():
        where = recipe.model.path
        raise ValueError(f'no model folder at {where}; save one there with save_pretrained, or set model.path = "tiny"')
    for name, path in (("kl.reference", recipe.kl.reference), ("teacher", recipe.teacher)):
        if path not in ("", "start") and not Path(path).is_dir():
            raise ValueError(f"no model folder at {path}; set {name} to one that save_pretrained wrote")
    choices.check(recipe)


def learner_of(
    recipe: Recipe,
    model: Any,
    optimizer: config.Optimizer,
    updates: int,
    frozen: Mapping[str, Any] = MappingProxyType({}),
    critic: Critic | None = None,
) -> Learner:
    """The learner of a model, with frozen ones beside it by the name of what they score."""
    made = {name: policy_of(recipe, beside.requires_grad_(False)) for name, beside in frozen.items()}
    return Learner(policy_of(recipe, model), *stepping(optimizer, updates), made, critic)


def stepping(optimizer: config.Optimizer, updates: int) -> tuple[OptimizerSettings, Schedule]:
    settings = OptimizerSettings(optimizer.learning_rate, optimizer.betas, optimizer.weight_decay, optimizer.clip_norm)
    return settings, schedule(optimizer.schedule, optimizer.warmup, updates)


def critic_of(recipe: Recipe, model: Any) -> Critic | None:
    """A critic that starts as a copy of the model, where the recipe needs one."""
    if "values" not in choices.needs(recipe):
        return None
    values = ValueModel(copy.deepcopy(model), **how_computed(recipe, model))
    updates = recipe.steps * recipe.updates_per_step
    return Critic(values, *stepping(recipe.critic.optimizer, updates), clip=recipe.critic.clip)


def policy_of(recipe: Recipe, model: Any) -> Policy:
    return Policy(model, temperature=recipe.sampling.temperature, **how_computed(recipe, model))


def how_computed(recipe: Recipe, model: Any) -> dict[str, Any]:
    """What a policy and a critic have in common: how they compute plans."""
    longest, device = recipe.rollout.max_trajectory_tokens, model.device.type
    if device != "cpu" and recipe.tokens_per_pass < longest:
        raise ValueError(
            f"tokens_per_pass = {recipe.tokens_per_pass} cannot hold a turn of rollout.max_trajectory_tokens = "
            f"{longest}, and only a CPU computes one in several passes; raise it"
        )
    return {
        "dtype": DTYPES[recipe.model.dtype],
        "layout": LAYOUTS[recipe.layout],
        "longest": longest,
        "checkpointing": recipe.model.checkpointing,
    }


def frozen_models(recipe: Recipe, tokenizer: Any, start: Callable[[], Any]) -> dict[str, Any]:
    """The models that a step needs scores of beside the policy's; `start` gives the one that training started from."""
    needed, frozen = choices.needs(recipe), {}
    if "reference" in needed:
        path = recipe.kl.reference
        frozen["reference"] = start() if path == "start" else same_vocabulary(path, tokenizer)
    if "teacher" in needed:
        frozen["teacher"] = same_vocabulary(recipe.teacher, tokenizer)
    device = pick_device(recipe.model.device)
    return {name: model.to(device) for name, model in frozen.items()}


def same_vocabulary(path: str, tokenizer: Any) -> Any:
    """The model in a folder, once its tokens are known to be the policy's."""
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the model in {path} has another vocabulary than the policy, so it cannot score its tokens")
    return load_model(path)


def renderer_of(recipe: Recipe, model: Any, tokenizer: Any) -> Renderer:
    """The renderer of a model, which may end its actions with what its generation config names too."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [named] if isinstance(named, int) else named or []
    return Renderer(tokenizer, recipe.rollout.history, recipe.rollout.tools, ends)


def engine_of(
    recipe: Recipe, model: Any, renderer: Renderer, version: int, workers: Workers = in_own_thread
) -> SlotEngine:
    """The in-process engine: on the learner's own module at lag 0, on a copy where sampling and learning overlap."""
    return slot_engine(recipe, model, renderer, version, workers("engine") if recipe.max_lag else None)


def slot_engine(
    recipe: Recipe, model: Any, renderer: Renderer, version: int, worker: Worker | None = None
) -> SlotEngine:
    """An in-process engine: on the model itself, in the event loop, or on a copy of it, where a worker computes."""
    slot_model = SlotModel(
        model if worker is None else copy.deepcopy(model),
        slots=recipe.engine.slots,
        context=recipe.engine.context or recipe.rollout.max_trajectory_tokens,
        end_tokens=renderer.end_tokens,
        decode=renderer.decode,
        dtype=DTYPES[recipe.model.dtype],
        version=version,
    )
    return SlotEngine(slot_model, run=worker or inline, shares_weights=worker is None)


def practice_of(recipe: Recipe, engine: Engine, renderer: Renderer, batches: Mapping[str, Batches]) -> Practice:
    """How training attempts are made."""
    return Practice(
        environments=batched_makers(recipe, batches, validation=False),
        engine=engine,
        renderer=renderer,
        sampling=Sampling(recipe.rollout.max_action_tokens, recipe.sampling.temperature),
        limits=limits(recipe),
        seed=recipe.seed,
        split="train",
        attempts=recipe.rollout.attempts,
        retries=recipe.rollout.retries,
    )


def exam_of(
    recipe: Recipe, engine: Engine, renderer: Renderer, batches: Mapping[str, Batches], *, greedy: bool
) -> Practice:
    """How held-out attempts are made: the same loop with its own sampling."""
    e = recipe.evaluation
    greedily = Sampling(recipe.rollout.max_action_tokens, temperature=0.0)
    sampled = Sampling(recipe.rollout.max_action_tokens, e.temperature, e.top_p, e.top_k)
    return Practice(
        environments=batched_makers(recipe, batches, validation=True),
        engine=engine,
        renderer=renderer,
        sampling=greedily if greedy else sampled,
        limits=limits(recipe),
        seed=recipe.seed,
        split="heldout/greedy" if greedy else "heldout/sampled",
        attempts=1 if greedy else e.attempts,
        retries=recipe.rollout.retries,
    )


def build(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    step: int = 0,
    start: Callable[[], Any] | None = None,
    workers: Workers = in_own_thread,
) -> Parts:
    """The parts of a reinforcement-learning run that has done `step` steps; `start` gives the model it started from,
    where that is not `model` itself, and `workers` make the calls of engines and learner where these overlap."""
    check(recipe)
    renderer = renderer_of(recipe, model, tokenizer)
    frozen = frozen_models(recipe, tokenizer, start or (lambda: copy.deepcopy(model)))
    updates = recipe.steps * recipe.updates_per_step
    learner = learner_of(recipe, model, recipe.optimizer, updates, frozen, critic_of(recipe, model))
    engine = engine_of(recipe, model, renderer, step, workers)
    overlap = recipe.evaluation.overlap
    exam_engine = slot_engine(recipe, model, renderer, step, workers("exam")) if overlap else engine
    batches = batches_of(recipe)
    practice = practice_of(recipe, engine, renderer, batches)
    settle = choices.failure_of(recipe)

    async def practise(draw: Draw) -> Group:
        return settle(await practice.group(draw.task, draw.visit))

    stages = Stages(
        practise=practise,
        keep=choices.keep_of(recipe),
        plan=partial(LAYOUTS[recipe.layout], tokens_per_pass=recipe.tokens_per_pass),
        estimate=choices.estimate_of(recipe),
        correct=choices.correct_of(recipe),
        targets=choices.targets_of(recipe),
        weigh=choices.weighting_of(recipe),
        anchor=choices.ratio_of(recipe).compare,
        objective=choices.objective_of(recipe),
        run=workers("learner") if recipe.max_lag or overlap else inline,
    )
    order = task_order(recipe, tasks_of(recipe, "train"))
    return Parts(recipe, tokenizer, renderer, learner, engine, exam_engine, batches, order, settings_of(recipe), stages)


def settings_of(recipe: Recipe) -> Settings:
    return Settings(
        steps=recipe.steps,
        max_lag=recipe.max_lag,
        groups_per_step=recipe.groups_per_step,
        groups_per_update=recipe.groups_per_update or recipe.groups_per_step,
        epochs=recipe.epochs,
        anchor=choices.ratio_of(recipe).anchor,
        needs=choices.needs(recipe),
        success_at=recipe.rollout.success_at,
        nonfinite_limit=recipe.nonfinite_limit,
        dropped_limit=recipe.dropped_limit,
        order=recipe.order,
        stale=recipe.stale,
        patience=recipe.patience,
        gap_limit=choices.gap_limit_of(recipe),
    )


def build_sft(recipe: Recipe, model: Any, tokenizer: Any) -> Parts:
    """The parts of a warm start: the same loop, with demonstrations for attempts and likelihood for a loss."""
    renderer = renderer_of(recipe, model, tokenizer)
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
        plan=partial(LAYOUTS[recipe.layout], tokens_per_pass=recipe.tokens_per_pass),
        estimate=imitate,
        correct=choices.uncorrected,
        targets=None,
        weigh=token_mean,
        anchor=of_tokens,
        objective=Objective(likelihood),
        run=inline,
    )
    settings = Settings(
        steps=sft.updates,
        max_lag=0,
        groups_per_step=sft.batch,
        groups_per_update=sft.batch,
        epochs=1,
        anchor="learner",
        needs=frozenset(),
        success_at=recipe.rollout.success_at,
        nonfinite_limit=recipe.nonfinite_limit,
        dropped_limit=recipe.dropped_limit,
        order="started",
        stale="drop_group",
        patience=recipe.patience,
        gap_limit=math.inf,
    )
    nobody = ScriptedEngine(lambda prompt, session, seed: "", lambda text: [], end_token=renderer.end_token)
    return Parts(recipe, tokenizer, renderer, learner, nobody, nobody, {}, order, settings, stages)
