"""The rehearsal: one update of a recipe's learner, by the code of a run, on tensors that have shapes and no numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turnwise.assemble import objective as choices
from turnwise.assemble.learner import LAYOUTS, rl_learner_of
from turnwise.assemble.models import Folders, OnRanks, Whole
from turnwise.cluster.loading import model_class
from turnwise.cluster.mesh import Mesh, MeshShape
from turnwise.cluster.spread import Spread
from turnwise.learn.learner import Learner
from turnwise.preflight.attempt_shape import AttemptShape, full_plan
from turnwise.preflight.blank_model import NO_TOKENIZER, BlankLoading, blank, filled
from turnwise.preflight.operation_counter import OperationCounter
from turnwise.preflight.stand_ins import replaced, stand_ins, world
from turnwise.recipe.schema import Recipe

MASTERS, MOMENTS, GRADIENTS, FROZEN = "masters", "moments", "gradients", "frozen weights"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one update of one full pass takes on one rank."""

    device: str
    ranks: int
    layers: int
    checkpoints: bool
    """Whether layers are computed again in the backward pass."""
    num_parameters: int
    """Of the policy."""
    num_trained: int
    num_tokens: int
    num_actions: int
    num_pairs: int
    peak_of_loading: int
    """The most bytes until the models had their weights."""
    peak: int
    """The most bytes at any moment of the update."""
    at_peak: Mapping[str, int]
    """Bytes by category at that moment."""
    most: Mapping[str, int]
    """The most bytes of each category."""
    on_host: Mapping[str, int]
    """The most bytes of each category that `cluster.offload` keeps in the memory of the host; not counted above."""
    kernels: Mapping[str, int]
    """How many, by part."""
    bytes: Mapping[str, float]
    """Read and written, by part."""
    flops: Mapping[str, float]
    costs: Mapping[tuple[str, float, float], int]
    """How many kernels of each (part, floating-point operations, bytes)."""
    products: Mapping[tuple[str, str, tuple[str, ...]], int]
    """How many matrix products of each (part, operation, dtypes)."""
    waits: Mapping[str, int]
    """How often the host waits for the device, by place."""
    collectives: Mapping[tuple[str, int], int]
    """Bytes of each (collective, ranks)."""


def rehearse(
    recipe: Recipe,
    config: Any,
    device: str,
    layers: int | None = None,
    counter: OperationCounter | None = None,
    brief: bool = False,
) -> Rehearsal:
    """One update of a pass as full as the recipe allows, on one rank of a learner on `device`; of a model that is cut
    to fewer layers where `layers` says so. In brief the attention of a CPU, which takes thousands of operations, is
    taken to keep what that of a GPU does."""
    config = shallower(config, layers)
    counter = counter or OperationCounter(say_true=recipe.entropy > 0)
    shape = AttemptShape.of(recipe)
    vocabulary = config.get_text_config().vocab_size
    plan, turns = full_plan(shape, LAYOUTS[recipe.layout], recipe.tokens_per_pass(device), vocabulary)
    loading = BlankLoading(config, recipe.model.path)
    with stand_ins(counter, loading, device, brief), world(recipe.cluster.ranks):
        # Made of numbers: which ranks are in which group.
        spread = Spread(Mesh(MeshShape.of(recipe.cluster), "cpu")) if recipe.cluster.is_spread else None
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            learner = blank_learner(recipe, config, spread, device)
            peak_of_loading = counter.memory.peak
            settle(learner, counter)
            numbers = [np.ones(len(turn.action), np.float32) for turn in turns]
            needed = choices.needs(recipe) & {"reference", "old"}
            scores = dict.fromkeys(needed, numbers)
            with replaced(learner.stepper, "step", partial(marked_step, learner, counter, learner.stepper.step)):
                learner.update([plan], numbers, numbers, scores, choices.objective_of(recipe))
        memory = counter.memory
        elsewhere = (MASTERS, MOMENTS, GRADIENTS) if recipe.cluster.offload else ()
        peak, moment = memory.peak_without(elsewhere) if elsewhere else (memory.peak, memory.peak_tick)
        return Rehearsal(
            device=device,
            ranks=recipe.cluster.ranks,
            layers=config.get_text_config().num_hidden_layers,
            checkpoints=bool(learner.policy.recomputed),
            num_parameters=sum(each.numel() for each in learner.policy.model.parameters()),
            num_trained=sum(each.numel() for each in learner.stepper.parameters),
            num_tokens=plan.num_tokens,
            num_actions=len(plan.action_nodes),
            num_pairs=plan.num_pairs,
            peak_of_loading=peak_of_loading,
            peak=peak,
            at_peak=without(memory.at(moment), elsewhere),
            most=without(memory.most, elsewhere),
            on_host={name: memory.most[name] for name in elsewhere},
            kernels=Counter(counter.kernels),
            bytes=Counter(counter.bytes),
            flops=Counter(counter.flops),
            costs=Counter(counter.costs),
            products=Counter(counter.products),
            waits=Counter(counter.waits),
            collectives=Counter(counter.collectives),
        )


def without(sizes: Mapping[str, int], elsewhere: Collection[str]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name not in elsewhere}


def shallower(config: Any, layers: int | None) -> Any:
    """A config with fewer layers; one of several kinds of layers keeps those of the first."""
    if layers is None:
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = list(kinds)[:layers]
    return config


# ---------------------------------------------------------------- the learner


def blank_learner(recipe: Recipe, config: Any, spread: Spread | None, device: str) -> Learner:
    """A rank's learner whose weights have shapes alone. It is told to be on a CPU, with what auto means elsewhere."""
    wanted = recipe.model.gradient_checkpointing
    if wanted == "auto":
        can = bool(getattr(model_class(config), "supports_gradient_checkpointing", False))
        wanted = device == "cuda" and can
    model = recipe.model.model_copy(update={"device": "cpu", "gradient_checkpointing": wanted})
    here = recipe.model_copy(update={"model": model})
    if spread is None:
        return rl_learner_of(here, Whole(filled(blank(config)), NO_TOKENIZER, lambda: filled(blank(config))))
    folder = Path(recipe.model.path)
    paths = {str(folder), recipe.kl.reference, recipe.teacher}
    folders = Folders(folder, folder, dict.fromkeys(paths, ()))
    return rl_learner_of(here, OnRanks(spread, folders, here))


def settle(learner: Learner, counter: OperationCounter) -> None:
    """Take a first step, after which the optimizer has its moments, and begin to count."""
    for parameter in learner.policy.model.parameters():
        counter.memory.mark(local(parameter), MASTERS)
    before = set(counter.memory.living)
    for parameter in learner.stepper.parameters:
        parameter.grad = torch.empty_like(parameter)
    for optimizer in learner.stepper.optimizers:
        optimizer.step()
    learner.stepper.clear()
    for key, segment in counter.memory.living.items():
        if key not in before:
            counter.memory.assign(segment, MOMENTS)
    counter.begin()


def marked_step(learner: Learner, counter: OperationCounter, step: Any, *arguments: Any, **more: Any) -> Any:
    """An optimizer step, at whose beginning gradients are known to be gradients."""
    for parameter in learner.stepper.parameters:
        if parameter.grad is not None:
            counter.memory.mark(local(parameter.grad), GRADIENTS)
    return step(*arguments, **more)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
