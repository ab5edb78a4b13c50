"""From a recipe to its learner: the policy, the models that score or learn with it, in this process or over ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from turnwise.assemble import objective as choices
from turnwise.cluster.actors import ActorRanks
from turnwise.cluster.deal import cost_of, split_for_ranks
from turnwise.cluster.placement import Site
from turnwise.cluster.processes import ProcessRanks
from turnwise.cluster.rank import MakeLearner
from turnwise.cluster.ranked import RankedLearner
from turnwise.learn.base import AnyLearner
from turnwise.learn.critic import Critic, ValueModel
from turnwise.learn.learner import Learner
from turnwise.learn.lora import Adapters, LoraSettings, WithoutAdapters
from turnwise.learn.model_checks import Layout
from turnwise.learn.policy import DTYPES, Policy, load_model, load_tokenizer, pick_device
from turnwise.learn.schedules import Schedule, schedule
from turnwise.learn.stepper import OptimizerSettings, Reduce, alone
from turnwise.learn.teacher import Teacher
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.optimizer import OptimizerConfig
from turnwise.recipe.schema import Recipe

LAYOUTS: dict[str, Layout] = {"tree": cut, "packed": pack}

BASE = "../../reference"
"""Where the folder of a checkpoint finds the model that training started from: see `RunFolder`."""

Prepare = Callable[[Policy], Policy]
"""What is done with every policy once it is made: its weights are spread over ranks, or nothing."""


def as_it_is(policy: Policy) -> Policy:
    return policy


def layout_of(recipe: Recipe, model: CausalLM) -> Layout:
    """How turns are laid out, for as many ranks as there are."""
    return split_for_ranks(LAYOUTS[recipe.layout], recipe.cluster.ranks, cost_of(model))


# ---------------------------------------------------------------- in this process, or over ranks


def device_of(recipe: Recipe) -> str:
    """Where models compute."""
    cluster = recipe.cluster
    return ("cuda" if cluster.gpus else "cpu") if cluster.on_ray else pick_device(recipe.model.device)


@contextmanager
def placed(recipe: Recipe) -> Iterator[Site | None]:
    """The part of a Ray cluster that a run has for itself, given back afterwards; None where it needs none."""
    if not recipe.cluster.on_ray:
        yield None
        return
    with closing(Site(recipe.cluster)) as site:
        yield site


def portable(recipe: Recipe, model: CausalLM) -> CausalLM:
    """The model as it can be handed to other processes, where there are any."""
    return copy.deepcopy(model).cpu() if recipe.cluster.is_spread and model.device.type != "cpu" else model


def learner_for(recipe: Recipe, model: CausalLM, make: MakeLearner, site: Site | None) -> AnyLearner:
    """What `make` makes, by this process or by ranks that hold it together: of this machine, or at a site."""
    if not recipe.cluster.is_spread:
        return make(as_it_is, alone)
    policy_of(recipe, model)  # which refuses a model that is not computed exactly before anything starts
    cluster, device = recipe.cluster, device_of(recipe)
    if site is not None:
        threads = recipe.model.threads or max(1, int(cluster.cpus))
        return RankedLearner(ActorRanks(site, make, device=device, threads=threads), cost_of(model))
    threads = recipe.model.threads or max(1, (os.cpu_count() or 1) // cluster.ranks)
    return RankedLearner(ProcessRanks(cluster.ranks, make, device=device, threads=threads), cost_of(model))


def rl_learner(
    recipe: Recipe,
    model: CausalLM,
    tokenizer: ChatTokenizer,
    start: Callable[[], CausalLM] | None = None,
    prepare: Prepare = as_it_is,
    reduce: Reduce = alone,
) -> Learner:
    """The learner of a run; `start` gives the model that training started from, where that is not `model` itself.

    With adapters the model is the one that training started from, and no second one is made to refer to.
    """
    model = model.to(device_of(recipe))
    frozen = frozen_models(recipe, tokenizer, start or partial(copy.deepcopy, model))
    critic = critic_of(recipe, model, prepare)
    updates = recipe.steps * recipe.updates_per_step
    adapters = adapters_of(recipe, model)
    learner = learner_of(recipe, model, recipe.optimizer, updates, frozen, critic, prepare, reduce, adapters)
    if adapters is not None and refers_to_start(recipe):
        learner.models["reference"] = WithoutAdapters(learner.policy, adapters)
    return learner


def sft_learner(recipe: Recipe, model: CausalLM, prepare: Prepare = as_it_is, reduce: Reduce = alone) -> Learner:
    """The learner of a warm start."""
    model = model.to(device_of(recipe))
    return learner_of(recipe, model, recipe.sft.optimizer, recipe.sft.updates, prepare=prepare, reduce=reduce)


# ---------------------------------------------------------------- its parts


def learner_of(
    recipe: Recipe,
    model: CausalLM,
    optimizer: OptimizerConfig,
    updates: int,
    frozen: Mapping[str, CausalLM] = MappingProxyType({}),
    critic: Critic | None = None,
    prepare: Prepare = as_it_is,
    reduce: Reduce = alone,
    adapters: Adapters | None = None,
) -> Learner:
    """The learner of a model, with frozen ones beside it by the name of what they score."""
    policy = policy_of(recipe, model)
    if adapters is not None:
        adapters.check()  # while the model is whole
    policy = prepare(policy)
    ready: dict[int, Policy] = {}  # one model may score under two names
    made: dict[str, Policy | Teacher] = {}
    for name, beside in frozen.items():
        if id(beside) not in ready:
            ready[id(beside)] = prepare(policy_of(recipe, beside.requires_grad_(False)))
        scores = ready[id(beside)]
        made[name] = Teacher(scores, recipe.distill.top_k, len(policy.output)) if name == "buckets" else scores
    return Learner(policy, *stepping(optimizer, updates), made, critic, reduce, adapters)


def stepping(optimizer: OptimizerConfig, updates: int) -> tuple[OptimizerSettings, Schedule]:
    settings = OptimizerSettings(
        optimizer.learning_rate, optimizer.adamw.betas, optimizer.weight_decay, optimizer.adamw.clip_norm
    )
    return settings, schedule(optimizer.schedule, optimizer.warmup, updates)


def critic_of(recipe: Recipe, model: CausalLM, prepare: Prepare = as_it_is) -> Critic | None:
    """A critic that starts as a copy of the model, where the recipe needs one."""
    if "values" not in choices.needs(recipe):
        return None
    values = ValueModel(copy.deepcopy(model), **how_computed(recipe, model))
    prepare(values)
    updates = recipe.steps * recipe.updates_per_step
    return Critic(values, *stepping(recipe.critic.optimizer, updates), clip=recipe.critic.clip)


def policy_of(recipe: Recipe, model: CausalLM) -> Policy:
    return Policy(model, temperature=recipe.sampling.temperature, **how_computed(recipe, model))


def how_computed(recipe: Recipe, model: CausalLM) -> dict[str, Any]:
    """What a policy and a critic have in common: how they compute plans."""
    longest, device = recipe.rollout.max_trajectory_tokens, model.device.type
    in_float64 = next(model.parameters()).dtype is torch.float64  # as somebody gives it who compares with a reference
    if device != "cpu" and recipe.max_tokens_per_microbatch < longest:
        raise ValueError(
            f"max_tokens_per_microbatch = {recipe.max_tokens_per_microbatch} cannot hold a turn of "
            f"rollout.max_trajectory_tokens = {longest}, and only a CPU computes one in several passes; raise it"
        )
    return {
        "dtype": torch.float64 if in_float64 else DTYPES[recipe.model.dtype],
        "layout": LAYOUTS[recipe.layout],
        "longest": longest,
        "checkpointing": recipe.model.gradient_checkpointing,
    }


def frozen_models(recipe: Recipe, tokenizer: ChatTokenizer, start: Callable[[], CausalLM]) -> dict[str, CausalLM]:
    """The models that a step needs scores of beside the policy's; `start` gives the one that training started from."""
    needed, frozen = choices.needs(recipe), {}
    if "reference" in needed and not (recipe.lora.rank and refers_to_start(recipe)):
        path = recipe.kl.reference
        frozen["reference"] = start() if path == "start" else same_vocabulary(path, tokenizer)
    if asked := needed & {"teacher", "buckets"}:
        frozen |= dict.fromkeys(asked, same_vocabulary(recipe.teacher, tokenizer))
    device = device_of(recipe)
    return {name: model.to(device) for name, model in frozen.items()}


def refers_to_start(recipe: Recipe) -> bool:
    return "reference" in choices.needs(recipe) and recipe.kl.reference == "start"


def adapters_of(recipe: Recipe, model: CausalLM) -> Adapters | None:
    """The adapters that are trained, put into the model, where the recipe has some."""
    if not recipe.lora.rank:
        return None
    settings = LoraSettings(recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets)
    return Adapters(model, settings, base=BASE, seed=recipe.seed)


def same_vocabulary(path: str, tokenizer: ChatTokenizer) -> CausalLM:
    """The model in a folder, once its tokens are known to be the policy's."""
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the model in {path} has another vocabulary than the policy, so it cannot score its tokens")
    return load_model(path)
