"""From a recipe to its learner: the policy, the models that score or learn with it, in this process or over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from turnwise.assemble import objective as choices
from turnwise.assemble.models import Folders, Models, ModelSource, OnRanks, Whole
from turnwise.cluster.actors import ActorRanks
from turnwise.cluster.deal import cost_of, split_for_ranks
from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.placement import Site
from turnwise.cluster.processes import ProcessRanks
from turnwise.cluster.rank import MakeLearner
from turnwise.cluster.ranked import RankedLearner
from turnwise.cluster.room import Room
from turnwise.cluster.spread import Placed, PutAdapters, Spread
from turnwise.learn.base import AnyLearner
from turnwise.learn.critic import Critic, ValueModel
from turnwise.learn.learner import Learner
from turnwise.learn.lora import Adapters, LoraSettings, WithoutAdapters
from turnwise.learn.model_checks import Layout, Reach, why_unshared
from turnwise.learn.model_cut import check_by_config, cut_of, model_on_meta
from turnwise.learn.policy import DTYPES, Policy, load_model, pick_device
from turnwise.learn.schedules import Schedule, schedule
from turnwise.learn.stepper import OptimizerSettings
from turnwise.learn.teacher import Teacher
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.rows import in_rows
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.optimizer import OptimizerConfig
from turnwise.recipe.schema import Recipe

LAYOUTS: dict[str, Layout] = {"tree": cut, "packed": pack, "rows": in_rows}

BASE = "../../reference"
"""Where the folder of a checkpoint finds the model that training started from: see `RunFolder`."""


def layout_of(recipe: Recipe, model: CausalLM) -> Layout:
    """How turns are laid out, for as many ranks as have plans of their own."""
    return split_for_ranks(LAYOUTS[recipe.layout], MeshShape.of(recipe.cluster).hands, cost_of(model))


def told_of_layout(recipe: Recipe, model: CausalLM) -> list[str]:
    """What a user should know of the layout before a run."""
    if recipe.layout != "rows":
        return []
    reason = why_unshared(model)
    why = f"because this model {reason}" if reason else 'as layout = "rows" asks; "tree" would share them'
    return [f"layout: rows, padded; no prefix is shared between attempts or with a changed history, {why}"]


# ---------------------------------------------------------------- in this process, or over ranks


def device_of(recipe: Recipe) -> str:
    """Where models compute. The machine of a run on Ray may lack the GPUs that the nodes have."""
    named = recipe.model.device
    return named if recipe.cluster.on_ray and named != "auto" else pick_device(named)


def tokens_per_pass(recipe: Recipe) -> int:
    """Tokens of a forward and backward pass, where the learner of this recipe computes."""
    return recipe.tokens_per_pass(device_of(recipe))


def room_of(recipe: Recipe) -> Room:
    """What a run needs on a Ray cluster."""
    cluster, on_gpus = recipe.cluster, device_of(recipe) == "cuda"
    assert cluster.placement != "local"
    engine = recipe.engine
    # a server's client computes nothing
    of_replica = 0 if engine.servers or not on_gpus else engine.vllm.tensor_parallel_size
    return Room(cluster.placement, cluster.ranks, cluster.replicas, cluster.cpus, int(on_gpus), of_replica)


@contextmanager
def placed(recipe: Recipe) -> Iterator[Site | None]:
    """The part of a Ray cluster that a run has for itself, given back afterwards; None where it needs none."""
    if not recipe.cluster.on_ray:
        yield None
        return
    with closing(Site(recipe.cluster, room_of(recipe))) as site:
        yield site


def open_learner(
    recipe: Recipe, source: ModelSource, beginning: Path | None = None, site: Site | None = None
) -> AnyLearner:
    """The learner of a run, in this process or over ranks that hold it together: of this machine, or at a site.
    `beginning` is the folder of the model that training started from, where that is not the source itself."""
    if not recipe.cluster.is_spread:
        start = None if beginning is None else partial(load_model, beginning)
        return rl_learner(recipe, source.model, source.tokenizer, start)
    folders = folders_of(recipe, source, beginning)
    return ranked(recipe, source.model, partial(rl_learner_of_rank, recipe, source.tokenizer, folders), site)


def open_sft_learner(recipe: Recipe, source: ModelSource, site: Site | None = None) -> AnyLearner:
    """The learner of a warm start, likewise."""
    if not recipe.cluster.is_spread:
        return sft_learner(recipe, Whole(source.model.to(device_of(recipe)), source.tokenizer))
    folders = Folders(source.own_folder, source.own_folder, {str(source.own_folder): reach_of(recipe, source.model)})
    return ranked(recipe, source.model, partial(sft_learner_of_rank, recipe, folders), site)


def ranked(recipe: Recipe, model: CausalLM, make: MakeLearner, site: Site | None) -> RankedLearner:
    """The learner that `make` makes on every rank."""
    cluster, device = recipe.cluster, device_of(recipe)
    if site is not None:
        threads = recipe.model.threads or max(1, int(cluster.cpus))
        return RankedLearner(ActorRanks(site, make, device=device, threads=threads), cost_of(model))
    threads = recipe.model.threads or max(1, (os.cpu_count() or 1) // cluster.ranks)
    ranks = ProcessRanks(
        MeshShape.of(cluster),
        make,
        device=device,
        threads=threads,
        on_host=cluster.offload,
        answer_seconds=cluster.answer_seconds,
    )
    return RankedLearner(ranks, cost_of(model))


def rl_learner(
    recipe: Recipe, model: CausalLM, tokenizer: ChatTokenizer, start: Callable[[], CausalLM] | None = None
) -> Learner:
    """The learner of a run in this process; `start` gives the model that training started from, where that is not
    `model` itself."""
    return rl_learner_of(recipe, Whole(model.to(device_of(recipe)), tokenizer, start))


def rl_learner_of_rank(recipe: Recipe, tokenizer: ChatTokenizer, folders: Folders, spread: Spread) -> Learner:
    return rl_learner_of(recipe, OnRanks(spread, folders, recipe))


def sft_learner_of_rank(recipe: Recipe, folders: Folders, spread: Spread) -> Learner:
    return sft_learner(recipe, OnRanks(spread, folders, recipe))


def rl_learner_of(recipe: Recipe, models: Models) -> Learner:
    """The learner of a run. With adapters the model is the one that training started from, and no second one is made
    to refer to."""
    frozen = frozen_models(recipe, models)
    critic = critic_of(recipe, models)
    updates = recipe.steps * recipe.updates_per_step
    learner = learner_of(recipe, models, recipe.optimizer, updates, frozen, critic, putting_adapters(recipe))
    if learner.adapters is not None and refers_to_start(recipe):
        learner.models["reference"] = WithoutAdapters(learner.policy, learner.adapters)
    return learner


def sft_learner(recipe: Recipe, models: Models) -> Learner:
    """The learner of a warm start."""
    return learner_of(recipe, models, recipe.sft.optimizer, recipe.sft.updates)


# ---------------------------------------------------------------- its parts


def learner_of(
    recipe: Recipe,
    models: Models,
    optimizer: OptimizerConfig,
    updates: int,
    frozen: Mapping[str, Placed] = MappingProxyType({}),
    critic: Critic | None = None,
    put_adapters: PutAdapters | None = None,
) -> Learner:
    """The learner of a model, with frozen ones beside it by the name of what they score."""
    placed = models.policy(put_adapters)
    policy = policy_of(recipe, placed)
    if placed.adapters is not None and placed.enter is None:
        placed.adapters.check()  # of a model that is spread they were checked before
    ready: dict[int, Policy] = {}  # one model may score under two names
    made: dict[str, Policy | Teacher] = {}
    for name, beside in frozen.items():
        if id(beside) not in ready:
            beside.model.requires_grad_(False)
            ready[id(beside)] = policy_of(recipe, beside, replay=False)
        scores = ready[id(beside)]
        made[name] = Teacher(scores, recipe.distill.top_k, policy.vocabulary) if name == "buckets" else scores
    return Learner(policy, *stepping(optimizer, updates), made, critic, models.reduce, placed.adapters)


def stepping(optimizer: OptimizerConfig, updates: int) -> tuple[OptimizerSettings, Schedule]:
    adamw = optimizer.adamw
    settings = OptimizerSettings(
        optimizer.learning_rate, adamw.betas, optimizer.weight_decay, adamw.clip_norm, optimizer.name
    )
    return settings, schedule(optimizer.schedule, optimizer.warmup, updates)


def critic_of(recipe: Recipe, models: Models) -> Critic | None:
    """A critic that starts as a copy of the model, where the recipe needs one."""
    if "values" not in choices.needs(recipe):
        return None
    placed = models.critic()
    values = ValueModel(placed.model, placed.head, **how_computed(recipe, placed))
    updates = recipe.steps * recipe.updates_per_step
    return Critic(values, *stepping(recipe.critic.optimizer, updates), clip=recipe.critic.clip)


def policy_of(recipe: Recipe, model: CausalLM | Placed, *, replay: bool | None = None) -> Policy:
    """The policy of a model, which is made ready for an engine too. One that is not computed exactly is refused. Those
    that score beside the policy choose experts for themselves: the recorded routes are not theirs."""
    placed = model if isinstance(model, Placed) else Placed(model)
    replay = recipe.model.router_replay if replay is None else replay
    how = how_computed(recipe, placed)
    return Policy(placed.model, temperature=recipe.sampling.temperature, replay=replay, **how)


def how_computed(recipe: Recipe, placed: Placed) -> dict[str, Any]:
    """What a policy and a critic have in common: how they compute plans."""
    longest, device = recipe.rollout.max_trajectory_tokens, placed.device or placed.model.device.type
    # Somebody gives a model in float64 to compare it with a reference.
    in_float64 = next(placed.model.parameters()).dtype is torch.float64
    if device not in ("cpu", "cuda") and recipe.tokens_per_pass(device) < longest:
        raise ValueError(
            f"max_tokens_per_microbatch = {recipe.max_tokens_per_microbatch} cannot hold a turn of "
            f"rollout.max_trajectory_tokens = {longest}, and {device} computes no turn in several passes; raise it"
        )
    return {
        "dtype": torch.float64 if in_float64 else DTYPES[recipe.model.dtype],
        "layout": LAYOUTS[recipe.layout],
        "longest": longest,
        "checkpointing": recomputes(recipe, placed.model, device),
        "reach": placed.reach,
        "enter": placed.enter,
        "shard": placed.shard,
        "sync": placed.sync,
        "context": placed.context,
        "device": placed.device,
    }


def recomputes(recipe: Recipe, model: CausalLM, device: str) -> bool:
    """Whether layers are computed again in the backward pass."""
    wanted = recipe.model.gradient_checkpointing
    return wanted if wanted != "auto" else device == "cuda" and model.supports_gradient_checkpointing


def frozen_models(recipe: Recipe, models: Models) -> dict[str, Placed]:
    """The models that a step needs scores of beside the policy's."""
    needed, frozen = choices.needs(recipe), {}
    if "reference" in needed and not (recipe.lora.rank and refers_to_start(recipe)):
        path = recipe.kl.reference
        frozen["reference"] = models.start() if path == "start" else models.frozen(path)
    if asked := needed & {"teacher", "buckets"}:
        frozen |= dict.fromkeys(asked, models.frozen(recipe.teacher))
    return frozen


def refers_to_start(recipe: Recipe) -> bool:
    return "reference" in choices.needs(recipe) and recipe.kl.reference == "start"


def putting_adapters(recipe: Recipe) -> PutAdapters | None:
    """What puts the adapters that are trained into a model, where the recipe has some."""
    if not recipe.lora.rank:
        return None
    settings = LoraSettings(recipe.lora.rank, recipe.lora.alpha, recipe.lora.targets)
    return partial(Adapters, settings=settings, base=BASE, seed=recipe.seed)


# ---------------------------------------------------------------- before there are ranks


def reach_of(recipe: Recipe, model: CausalLM) -> tuple[Reach, ...]:
    """How long a turn may be for a model that is spread over ranks to compute it exactly, and why. One that would not
    compute the turns of the recipe so is refused."""
    reach = check_by_config(model, LAYOUTS[recipe.layout], recipe.rollout.max_trajectory_tokens)
    return tuple(reach)


def folders_of(recipe: Recipe, source: ModelSource, beginning: Path | None) -> Folders:
    """Where ranks find the models of a run, once it is known that they are computed exactly."""
    folder = source.own_folder
    reaches = {str(folder): reach_of(recipe, source.model)}
    if (put_adapters := putting_adapters(recipe)) is not None:
        adapters = put_adapters(cut_of(source.model))
        if experts := [weight for weight in adapters.adapted.values() if weight.parameter != "weight"]:
            raise ValueError(
                f"lora.targets: {experts[0].parameter} is a weight of all experts in one, whose adapters are not "
                "loaded over ranks; leave it out, or set cluster.fsdp = 1"
            )
        adapters.check()
    for path in other_models(recipe):
        reaches[path] = reach_of(recipe, model_on_meta(path))
    start = beginning or folder
    reaches.setdefault(str(start), reaches[str(folder)])
    return Folders(folder, start, reaches)


def other_models(recipe: Recipe) -> set[str]:
    """Paths of a reference and a teacher."""
    needed = choices.needs(recipe)
    paths = {recipe.kl.reference} if "reference" in needed else set()
    return (paths | ({recipe.teacher} if needed & {"teacher", "buckets"} else set())) - {"start", ""}
