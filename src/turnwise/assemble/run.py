"""From a recipe to the parts of a run. The one place where names in a recipe become functions and objects."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from turnwise.assemble import objective as choices
from turnwise.assemble.environments import (
    batched_makers,
    batches_of,
    environment_makers,
    plays_of,
    supplies_of,
    task_order,
    tasks_of,
)
from turnwise.assemble.learner import device_of, layout_of, learner_for, policy_of, portable, rl_learner, sft_learner
from turnwise.cluster.placement import Site
from turnwise.cluster.remote_envs import Worlds
from turnwise.cluster.replica import open_replicas
from turnwise.credit.estimators import imitate
from turnwise.credit.scope import of_tokens
from turnwise.credit.weighting import token_mean
from turnwise.data.catalogue import model_folder
from turnwise.engines.base import Engine, Sampling, vocabulary_of
from turnwise.engines.remote.process import ProcessEngine
from turnwise.engines.remote.router import Router
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.local import LocalSettings, LocalVllm
from turnwise.engines.vllm.server import VllmServer
from turnwise.learn.base import AnyLearner
from turnwise.learn.learner import save_policy
from turnwise.learn.losses import likelihood
from turnwise.learn.objective import Objective
from turnwise.learn.policy import DTYPES, load_model, load_tokenizer
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.agent import Play
from turnwise.rollout.batching.batches import Batches
from turnwise.rollout.demonstrate import Demonstrator, Recital, can_demonstrate, read_demonstrations
from turnwise.rollout.failures import Failures
from turnwise.rollout.group import Practice, all_of
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.runs.checkpoint import check_model_folder
from turnwise.schedule.hopeless import RunStopped, attempts_of, one_failure, why_hopeless
from turnwise.schedule.tasks import Draw, TaskOrder
from turnwise.schedule.workers import Worker, Workers, in_own_thread, inline
from turnwise.serve.endpoint import Endpoint, check_installed
from turnwise.train.loop import Settings, Stages
from turnwise.train.weight_check import Check
from turnwise.types import Group
from turnwise.weights.publisher import Publisher
from turnwise.weights.skeleton import outline_of
from turnwise.weights.vllm_transfer import FileTransfer, NativeTransfer


def limits(recipe: Recipe) -> Limits:
    r = recipe.rollout
    return Limits(
        r.max_turns,
        r.max_prompt_tokens,
        r.max_action_tokens,
        r.max_trajectory_tokens,
        r.turn_seconds,
        r.attempt_seconds,
        r.max_observation_bytes,
    )


# ---------------------------------------------------------------- model


async def tiny_texts(recipe: Recipe, count: int = 256) -> list[str]:
    """Conversations of the recipe's environments, for a tokenizer to learn its words from."""
    spell = Renderer(build_tokenizer([]), tools=recipe.rollout.tools)
    endpoint = endpoint_of(recipe)
    failures = Failures()
    supplies = supplies_of(recipe, failures)
    expert = Demonstrator(supplies, spell, roomy(recipe), recipe.seed, 0.2, plays_of(recipe, endpoint))
    tasks = [task for of_dataset in tasks_of(recipe, "train", count).values() for task in of_dataset]
    try:
        groups = await all_of(expert.group(task, 0) for task in tasks)
    finally:
        endpoint.close()
        failures.sum_up("conversations for the tiny tokenizer")
    stop_if_none_opens(groups)
    played = [trajectory for group in groups for trajectory in (*group.trajectories, *group.failed)]
    texts = [spell.decode([*last.prompt, *last.action]) for made in played for last in made.turns[-1:]]
    return [part for text in texts for part in text.replace("<|im_start|>", "<|im_end|>").split("<|im_end|>")]


def roomy(recipe: Recipe) -> Limits:
    """A recipe's limits with room for a tokenizer that knows no word."""
    return replace(limits(recipe), max_prompt_tokens=1 << 20, max_action_tokens=1 << 20, max_trajectory_tokens=1 << 21)


def stop_if_none_opens(groups: Sequence[Group]) -> None:
    """Raise RunStopped where no environment could be opened, for one reason. What fails later may do so because nobody
    demonstrates."""
    attempts = attempts_of(groups)
    if (failure := one_failure(groups)) and not any(made.turns for made in attempts):
        raise RunStopped(why_hopeless(len(attempts), "at training tasks", failure))


async def model_and_tokenizer(recipe: Recipe, path: str | Path | None = None) -> tuple[Any, Any]:
    """The policy's model in float32 and its tokenizer: from a folder, or the tiny ones built by code."""
    if path is None and recipe.model.path != "tiny":
        path = recipe.model.path
    if path is not None:
        try:
            model, tokenizer = load_model(path), load_tokenizer(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot load the model in {path}: {str(error).splitlines()[0]}") from None
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
    return model.to("cpu" if recipe.cluster.on_ray else device_of(recipe)), tokenizer


def set_threads(recipe: Recipe) -> None:
    cores = 1 if recipe.model.path == "tiny" else os.cpu_count() or 1
    torch.set_num_threads(recipe.model.threads or max(1, cores // (2 if recipe.max_lag else 1)))


# ---------------------------------------------------------------- parts of a run


@dataclass(frozen=True, slots=True)
class Parts:
    """All that a run is made of."""

    recipe: Recipe
    tokenizer: Any
    renderer: Renderer
    learner: AnyLearner
    engine: Engine
    exam_engine: Engine
    """What held-out attempts are sampled by: the same, or one of its own where they overlap training."""
    batches: Mapping[str, Batches]
    """By dataset."""
    tasks: TaskOrder
    settings: Settings
    stages: Stages
    check: Check | None
    """Of the engine's weights; None where there is nothing that samples."""
    site: Site | None
    """Where learner and engines are, if on a Ray cluster."""
    endpoint: Endpoint
    plays: Mapping[str, Play]
    """By dataset: the agents that drive attempts through the endpoint."""
    failures: Failures = field(default_factory=Failures)
    """How attempts fail, in training, evaluation and demonstrations."""

    def close(self) -> None:
        """End the processes of learner and environments and the endpoint, and give the site back."""
        self.endpoint.close()
        self.learner.close()
        for own in self.batches.values():
            if isinstance(own, Worlds):
                own.close()
        if self.site is not None:
            self.site.close()


def check(recipe: Recipe) -> None:
    """Refuse, before anything heavy, names that do not exist and settings that would be ignored."""
    environment_makers(recipe)
    if recipe.model.path != "tiny" and not model_folder(recipe.model.path).is_dir():
        where = recipe.model.path
        raise ValueError(f'no model folder at {where}; save one there with save_pretrained, or set model.path = "tiny"')
    for name, path in (("kl.reference", recipe.kl.reference), ("teacher", recipe.teacher)):
        if path not in ("", "start") and not model_folder(path).is_dir():
            raise ValueError(f"no model folder at {path}; set {name} to one that save_pretrained wrote")
    for path in {recipe.model.path, recipe.kl.reference, recipe.teacher} - {"", "start", "tiny"}:
        check_model_folder(model_folder(path))
    choices.check(recipe)
    check_packages(recipe)


def check_packages(recipe: Recipe) -> None:
    """Refuse what needs packages that are not installed."""
    if plays_of(recipe, endpoint_of(recipe)):
        check_installed()
    if recipe.cluster.on_ray and importlib.util.find_spec("ray") is None:
        raise ValueError('cluster.placement needs Ray: pip install "turnwise[ray]"')
    if recipe.lora.rank and importlib.util.find_spec("peft") is None:
        raise ValueError('lora needs peft: pip install "turnwise[lora]"')
    if recipe.engine.name != "vllm":
        return
    own = recipe.engine.vllm
    needed = {"aiohttp": "vllm-client"} if own.server else {"vllm": "vllm"}
    if own.transfer != "file":
        needed["vllm"] = "vllm"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f'engine.name = "vllm" needs {package}: pip install "turnwise[{extra}]" '
                "(on a CPU see docs/guides/vllm.md)"
            )


def renderer_of(recipe: Recipe, model: Any, tokenizer: Any) -> Renderer:
    """The renderer of a model, which may end its actions with what its generation config names too."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [named] if isinstance(named, int) else named or []
    own = recipe.rollout
    return Renderer(tokenizer, own.history, own.tools, ends, trust_text=own.trust_text)


def engine_of(recipe: Recipe, model: Any, renderer: Renderer, version: int, workers: Workers = in_own_thread) -> Engine:
    """The engine that a recipe names: on the learner's own module at lag 0, on a copy where sampling and learning
    overlap or learning is done elsewhere, or a vLLM."""
    if recipe.engine.name == "vllm":
        return vllm_engine(recipe, model, renderer, version)
    if recipe.engine.processes:
        return process_engines(recipe, model, renderer, version)
    apart = inline if recipe.cluster.is_spread else None
    return slot_engine(recipe, model, renderer, version, workers("engine") if recipe.max_lag else apart)


def exam_engine_of(recipe: Recipe, model: Any, renderer: Renderer, version: int, workers: Workers) -> Engine:
    """An engine with weights of its own, for what overlaps training."""
    if recipe.engine.name == "vllm":
        return vllm_engine(recipe, model, renderer, version)
    return slot_engine(recipe, model, renderer, version, workers("exam"))


def slot_engine(
    recipe: Recipe, model: Any, renderer: Renderer, version: int, worker: Worker | None = None
) -> SlotEngine:
    """An in-process engine: on the model itself, in the event loop, or on a copy of it, where a worker computes."""
    own = slot_model_of(recipe, model if worker is None else copy.deepcopy(model), renderer, version)
    return SlotEngine(own, run=worker or inline, shares_weights=worker is None)


def replica_engine(recipe: Recipe, model: Any, tokenizer: Any, version: int) -> Engine:
    """The engine of a process of its own, which has the model for itself."""
    torch.set_num_threads(recipe.model.threads or max(1, int(recipe.cluster.cpus)))
    model = model.to(device_of(recipe))
    policy_of(recipe, model)  # which makes it ready for an engine
    renderer = renderer_of(recipe, model, tokenizer)
    if recipe.engine.name == "vllm":
        return vllm_engine(recipe, model, renderer, version)
    own = slot_model_of(recipe, model, renderer, version)
    return SlotEngine(own, run=in_own_thread("engine"), shares_weights=False)


def process_engines(recipe: Recipe, model: Any, renderer: Renderer, version: int) -> Router:
    """Engines in processes of this machine, which read their weights from one place."""
    publisher = Publisher()
    publisher.publish(model.state_dict(), version)
    make = partial(engine_of_process, recipe, renderer.tokenizer)
    outline = outline_of(model)
    context = recipe.engine.context or recipe.rollout.max_trajectory_tokens

    def start(number: int) -> ProcessEngine:
        return ProcessEngine(make, outline, publisher, context=context, name=f"engine process {number}")

    return Router(start, recipe.engine.processes, publisher)


def engine_of_process(recipe: Recipe, tokenizer: Any, model: Any, version: int) -> Engine:
    return replica_engine(recipe, model, tokenizer, version)


def slot_model_of(recipe: Recipe, model: Any, renderer: Renderer, version: int) -> SlotModel:
    return SlotModel(
        model,
        slots=recipe.engine.slots,
        context=recipe.engine.context or recipe.rollout.max_trajectory_tokens,
        end_tokens=renderer.end_tokens,
        decode=renderer.decode,
        dtype=DTYPES[recipe.model.dtype],
        version=version,
        cache=recipe.engine.cache,
        keep_cache=recipe.engine.keep_cache,
        pass_tokens=recipe.engine.pass_tokens,
    )


def vllm_engine(recipe: Recipe, model: Any, renderer: Renderer, version: int) -> VllmEngine:
    """A vLLM with a copy of the model, which starts when it is first needed, or the server that a recipe names."""
    engine, own = recipe.engine, recipe.engine.vllm
    dtype, device = DTYPES[recipe.model.dtype], model.device.type
    if device != "cuda" and (gpus := {"transfer", "memory", "tensor_parallel"} & set(own.changed)):
        raise ValueError(f"engine.vllm.{min(gpus)} = {getattr(own, min(gpus))!r} needs a GPU; remove it")
    weights = model.state_dict()
    local = LocalSettings(
        slots=engine.slots,
        dtype=recipe.model.dtype,
        device=device,
        threads=torch.get_num_threads(),
        cache=engine.cache,
        pass_tokens=engine.pass_tokens,
        memory=own.memory,
        eager=device == "cpu" if own.eager == "auto" else own.eager,
        tensor_parallel=own.tensor_parallel,
        transfer=own.transfer,
    )
    save = partial(save_policy, model, renderer.tokenizer)
    folder = Path(own.folder) if own.folder else None
    return VllmEngine(
        VllmServer(own.server) if own.server else LocalVllm(save, local),
        FileTransfer(dtype, folder) if own.transfer == "file" else NativeTransfer(own.transfer, dtype),
        slots=engine.slots,
        context=engine.context or recipe.rollout.max_trajectory_tokens,
        vocabulary=vocabulary_of(model),
        end_tokens=renderer.end_tokens,
        tensors=weights,
        version=version,
        keep_cache=engine.keep_cache,
        first=weights if own.server else None,
    )


def endpoint_of(recipe: Recipe) -> Endpoint:
    """The endpoint of a run, which listens once an agent needs it."""
    return Endpoint(recipe.endpoint.host, recipe.endpoint.port)


def driven(recipe: Recipe, plays: Mapping[str, Play]) -> Mapping[str, Play]:
    """The agents of a recipe, all of them."""
    assert all(entry.label in plays for entry in recipe.env if entry.is_driven), "an agent is left out"
    return plays


def practice_of(
    recipe: Recipe, engine: Engine, renderer: Renderer, batches: Mapping[str, Batches], plays: Mapping[str, Play]
) -> Practice:
    """How training attempts are made."""
    return Practice(
        plays=driven(recipe, plays),
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
    recipe: Recipe,
    engine: Engine,
    renderer: Renderer,
    batches: Mapping[str, Batches],
    plays: Mapping[str, Play],
    *,
    greedy: bool,
) -> Practice:
    """How held-out attempts are made: the same loop with its own sampling."""
    e = recipe.evaluation
    greedily = Sampling(recipe.rollout.max_action_tokens, temperature=0.0)
    sampled = Sampling(recipe.rollout.max_action_tokens, e.temperature, e.top_p, e.top_k)
    return Practice(
        plays=driven(recipe, plays),
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
    plain = without_adapters(recipe, model)
    site = Site(recipe.cluster) if recipe.cluster.on_ray else None
    make = partial(rl_learner, recipe, portable(recipe, model), tokenizer, start)
    learner = learner_for(recipe, model, make, site)
    engine: Engine
    if site is None:
        engine = engine_of(recipe, model if shares_module(recipe) else plain, renderer, step, workers)
    else:
        make_engine = partial(replica_engine, recipe, model, tokenizer, step)
        context = recipe.engine.context or recipe.rollout.max_trajectory_tokens
        engine = open_replicas(site, make_engine, context=context)
    overlap = recipe.evaluation.overlap
    exam_engine = exam_engine_of(recipe, plain, renderer, step, workers) if overlap else engine
    failures = Failures()
    batches = batches_of(recipe, failures)
    endpoint = endpoint_of(recipe)
    plays = plays_of(recipe, endpoint)
    practice = practice_of(recipe, engine, renderer, batches, plays)
    settle = choices.failure_of(recipe)

    async def practise(draw: Draw) -> Group:
        return settle(await practice.group(draw.task, draw.visit))

    lay_out = layout_of(recipe, model)
    run = workers("learner") if recipe.max_lag or overlap else inline
    plan = lambda turns: lay_out(turns, recipe.tokens_per_pass)
    check_weights = Check(
        engine,
        learner,
        plan,
        run,
        temperature=recipe.sampling.temperature,
        vocabulary=min(len(tokenizer), model.get_input_embeddings().num_embeddings),
        exact=recipe.model.dtype == "float32",
        longest=recipe.rollout.max_trajectory_tokens,
        limit=recipe.sync.limit,
        every=recipe.sync.every,
    )
    stages = Stages(
        practise=practise,
        keep=choices.keep_of(recipe),
        plan=plan,
        estimate=choices.estimate_of(recipe),
        correct=choices.correct_of(recipe),
        targets=choices.targets_of(recipe),
        weigh=choices.weighting_of(recipe),
        anchor=choices.ratio_of(recipe).compare,
        objective=choices.objective_of(recipe),
        run=run,
        arrived=check_weights.arrived,
    )
    order = task_order(recipe, tasks_of(recipe, "train"))
    settings = settings_of(recipe)
    return Parts(
        recipe,
        tokenizer,
        renderer,
        learner,
        engine,
        exam_engine,
        batches,
        order,
        settings,
        stages,
        check_weights,
        site,
        endpoint,
        plays,
        failures,
    )


def shares_module(recipe: Recipe) -> bool:
    """Whether the engine computes with the learner's own module."""
    return recipe.engine_shares_weights


def without_adapters(recipe: Recipe, model: Any) -> Any:
    """The model that engines make copies of: another one where the learner is about to put adapters into it."""
    if not recipe.lora.rank or recipe.cluster.is_spread or (shares_module(recipe) and not recipe.evaluation.overlap):
        return model
    policy_of(recipe, model)  # which makes it ready for an engine
    return copy.deepcopy(model)


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
    site = Site(recipe.cluster) if recipe.cluster.on_ray else None
    learner = learner_for(recipe, model, partial(sft_learner, recipe, portable(recipe, model)), site)
    practise: Callable[[Draw], Awaitable[Group]]
    endpoint = endpoint_of(recipe)
    plays = plays_of(recipe, endpoint)
    failures = Failures()
    if sft.data:
        recital = Recital(renderer)
        tasks = read_demonstrations(Path(sft.data))
        order = TaskOrder({tasks[0].dataset: tasks}, {tasks[0].dataset: 1.0}, recipe.seed)
        practise = lambda draw: recital.group(draw.task, draw.visit)
    else:
        supplies = supplies_of(recipe, failures)
        for label, make in supplies.items():
            if not can_demonstrate(make()):
                raise ValueError(
                    f"{label} cannot demonstrate; give it a method demonstrate(noise, random) or set sft.data"
                )
        expert = Demonstrator(supplies, renderer, limits(recipe), recipe.seed, sft.noise, plays)
        order = task_order(recipe, tasks_of(recipe, "train", sft.demonstrations))
        practise = lambda draw: expert.group(draw.task, draw.visit)
    lay_out = layout_of(recipe, model)
    stages = Stages(
        practise=practise,
        keep=lambda group: bool(group.trajectories),
        plan=lambda turns: lay_out(turns, recipe.tokens_per_pass),
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
    return Parts(
        recipe,
        tokenizer,
        renderer,
        learner,
        nobody,
        nobody,
        {},
        order,
        settings,
        stages,
        None,
        site,
        endpoint,
        plays,
        failures,
    )
