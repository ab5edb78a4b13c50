"""The time of a step, predicted from what was counted and the figures of a card. No run has confirmed a prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.assemble import objective as choices
from turnwise.preflight.attempt_shape import AttemptShape
from turnwise.preflight.card import (
    CARDS_OF_NODE,
    LAUNCH,
    LINK_SHARE,
    MEMORY_SHARE,
    NETWORK,
    PRODUCT_SHARE,
    Card,
)
from turnwise.preflight.engine_memory import EngineMemory
from turnwise.preflight.operation_counter import OPTIMIZER
from turnwise.preflight.rehearsal import Rehearsal
from turnwise.recipe.schema import Recipe

SCORES = {"old", "reference", "teacher", "buckets", "values", "inspection"}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on a card."""

    compute: float
    """Of a full pass, forward and backward."""
    communicate: float
    """Of its collectives, which overlap with computing."""
    launch: float
    """In which the host starts its kernels, which overlaps too."""
    optimizer: float
    """Of an optimizer step."""
    passes: int
    """Full passes of a rank in a step."""
    scoring: float
    """Of the passes without a gradient in a step."""
    sampling: float
    """In which the engines sample the actions of a step; 0 where nothing is known of them."""
    overlaps: bool
    """Whether sampling goes on during learning."""

    @property
    def of_pass(self) -> float:
        return max(self.compute, self.communicate, self.launch)

    @property
    def learning(self) -> float:
        return self.passes * self.of_pass + self.scoring + self.optimizer

    @property
    def total(self) -> float:
        return max(self.learning, self.sampling) if self.overlaps else self.learning + self.sampling


def step_time(recipe: Recipe, found: Rehearsal, engine: EngineMemory, card: Card) -> StepTime:
    seconds = {False: 0.0, True: 0.0}
    for (part, flops, moved), count in found.costs.items():
        each = max(flops / (PRODUCT_SHARE * card.flops), moved / (MEMORY_SHARE * card.bandwidth))
        seconds[part == OPTIMIZER] += count * each
    shape = AttemptShape.of(recipe)
    engine = engine.on(card, shape.num_tokens)
    hands = found.ranks // recipe.cluster.tp
    tokens = recipe.groups_per_step * shape.num_group_tokens
    passes = math.ceil(tokens / (hands * recipe.tokens_per_pass(found.device)))
    launch = LAUNCH * sum(count for part, count in found.kernels.items() if part != OPTIMIZER)
    communicate = communication(recipe, found, card)
    of_pass = max(seconds[False], communicate, launch)
    forward = 1 / (4 if found.checkpoints else 3)
    scored = len(choices.needs(recipe) & SCORES)
    return StepTime(
        compute=seconds[False],
        communicate=communicate,
        launch=launch,
        optimizer=seconds[True] * recipe.updates_per_step,
        passes=passes * recipe.epochs,
        scoring=passes * scored * forward * of_pass,
        sampling=sampling(recipe, engines_of(recipe, found, engine), shape, engine, card),
        overlaps=recipe.max_lag > 0,
    )


def communication(recipe: Recipe, found: Rehearsal, card: Card) -> float:
    """Seconds of the collectives of a pass: a rank sends what it has to all others of its group."""
    total = 0.0
    for (kind, ranks), num_bytes in found.collectives.items():
        if ranks < 2:
            continue
        in_node = found.ranks <= CARDS_OF_NODE or ranks <= recipe.cluster.tp
        rate = card.link if in_node else min(card.link, NETWORK)
        rounds = 2 if kind in ("allreduce", "all_reduce") else 1
        total += rounds * num_bytes * (ranks - 1) / ranks / (LINK_SHARE * rate)
    return total


def engines_of(recipe: Recipe, found: Rehearsal, engine: EngineMemory) -> int:
    """Copies of the model that sample. A recipe does not say how many a server has; together they are taken to have as
    many GPUs as the learner, and one copy each at least."""
    if recipe.cluster.on_ray and not recipe.engine.servers:
        return recipe.cluster.replicas
    servers = len(recipe.engine.servers)
    return max(servers, found.ranks // engine.cards) if servers else 1


def sampling(recipe: Recipe, copies: int, shape: AttemptShape, engine: EngineMemory, card: Card) -> float:
    """Seconds of sampling; on average an attempt has half of its tokens."""
    length = max(1, shape.num_tokens // 2)
    together = min(max(1, recipe.engine.max_num_seqs // copies), engine.attempts(card, length))
    rate = engine.rate(card, together, length)
    return recipe.groups_per_step * shape.num_action_tokens / (rate * copies) if rate else 0.0
