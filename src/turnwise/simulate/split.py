"""The split of cards between learner and engines with the most steps per hour, by simulation. Predicted, not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from turnwise.assemble.run import settings_of
from turnwise.preflight.attempt_shape import AttemptShape
from turnwise.preflight.card import RESERVED, Card
from turnwise.preflight.engine_memory import EngineMemory
from turnwise.preflight.fit import SHARDED
from turnwise.preflight.operation_counter import OPTIMIZER
from turnwise.preflight.rehearsal import Rehearsal
from turnwise.preflight.step_time import StepTime, step_time
from turnwise.recipe.schema import Recipe
from turnwise.simulate.outcome import SimulatedRun
from turnwise.simulate.pace import CardPace, LearnerPace
from turnwise.simulate.simulation import Setup, simulate
from turnwise.simulate.workload import LognormalDelay, ShapedGroups

SYNC_RATE = 5e9
"""Bytes of weights that reach the engines in a second, all in all. An assumption: no GPU was measured."""
PAUSE_SHARE = 0.5
"""Of the time of a sync, the share in which engines sample nothing. An assumption."""
TURN_SECONDS = 2.5e-3
"""That the agent loop computes for a turn, requests to a server included."""
DELAY = LognormalDelay(median=0.2, sigma=1.0)
"""Of an environment call, where nothing else is said."""
STEPS = 5
"""After the pipeline is filled."""
EIGHTHS = 8


@dataclass(frozen=True, slots=True)
class Split:
    """A number of cards, some of them for the learner and the rest for engines.

    Example:
        Split(cards=8, ranks=4, replicas=4, engine=engine, time=time)
    """

    cards: int
    ranks: int
    """Cards of the learner."""
    replicas: int
    engine: EngineMemory
    """A replica, over `engine.cards` cards."""
    time: StepTime
    """Of the learner with so many ranks."""

    def estimate(self, recipe: Recipe, card: Card) -> float:
        """Seconds of a step by arithmetic: those of the slower part, with engines as full as attempts or memory
        allow."""
        shape = AttemptShape.of(recipe)
        length = max(1, shape.num_tokens // 2)
        together = min(recipe.lag_slots * shape.group // self.replicas, self.engine.attempts(card, length))
        rate = self.engine.rate(card, max(1, together), length) * self.replicas
        return max(self.time.learning, recipe.groups_per_step * shape.num_action_tokens / 4 / rate)

    def setup(self, recipe: Recipe, card: Card, workload: ShapedGroups, drivers: int) -> Setup:
        hands = self.ranks // recipe.cluster.tp
        full = hands * recipe.tokens_per_pass("cuda")
        passes = max(1, self.time.passes)
        again = 1 + self.time.scoring / max(1e-9, passes * self.time.of_pass)
        seconds = 2.0 * self.engine.num_parameters / SYNC_RATE
        learner = LearnerPace(
            fixed=self.time.optimizer,
            token=recipe.epochs * again * self.time.compute / full,
            publish=(1 - PAUSE_SHARE) * seconds,
            load=PAUSE_SHARE * seconds,
            pass_tokens=full,
            pass_seconds=recipe.epochs * again * max(self.time.communicate, self.time.launch),
        )
        return Setup(
            engine=CardPace(self.engine, card),
            learner=learner,
            workload=workload,
            replicas=self.replicas,
            max_sequences=recipe.engine.max_num_seqs,
            room=self.engine.room(card) / self.engine.kv_token,
            turn_seconds=TURN_SECONDS,
            drivers=drivers,
        )


def splits(recipe: Recipe, found: Rehearsal, engine: EngineMemory, card: Card, cards: int) -> Iterator[Split]:
    """Splits by eighths whose ranks and replicas have room; ranks share the weights by FSDP. Replicas have as many
    cards as the recipe says, or as a text of its length needs."""
    spread = engine.on(card, AttemptShape.of(recipe).num_tokens)
    for ranks in sorted({max(1, cards * part // EIGHTHS) for part in range(1, EIGHTHS)}):
        replicas = (cards - ranks) // spread.cards
        here = with_ranks(found, ranks)
        if not replicas or ranks % recipe.cluster.tp or here.peak > card.memory - RESERVED:
            continue
        if spread.attempts(card, AttemptShape.of(recipe).num_tokens):
            yield Split(cards, ranks, replicas, spread, step_time(recipe, here, engine, card))


def with_ranks(found: Rehearsal, ranks: int) -> Rehearsal:
    """What another number of ranks would need: their share of what is divided, and the rest as it is."""
    share = found.ranks / ranks
    divided = sum(found.at_peak.get(name, 0) for name in SHARDED)
    costs = {
        (part, flops * share, moved * share) if part == OPTIMIZER else (part, flops, moved): count
        for (part, flops, moved), count in found.costs.items()
    }
    collectives = {
        (kind, ranks if size == found.ranks else size): count for (kind, size), count in found.collectives.items()
    }
    peak = round(found.peak - divided + divided * share)
    return replace(found, ranks=ranks, peak=peak, costs=costs, collectives=collectives)


def best_split(
    recipe: Recipe,
    found: Rehearsal,
    engine: EngineMemory,
    card: Card,
    cards: int,
    *,
    delay: LognormalDelay = DELAY,
    drivers: int = 1,
    seed: int = 0,
) -> tuple[Split, SimulatedRun]:
    """The best split: from the one that is best by arithmetic, cards move to the busier part as long as that helps."""
    candidates = list(splits(recipe, found, engine, card, cards))
    if not candidates:
        raise ValueError(
            f"{cards} cards ({card.name}) have no room for a learner and an engine of this model; raise the number of "
            "cards, or lower rollout.max_trajectory_tokens"
        )
    workload = ShapedGroups(AttemptShape.of(recipe), delay)
    settings = replace(settings_of(recipe), steps=STEPS + recipe.max_lag + 1)

    def simulated(place: int) -> SimulatedRun:
        return simulate(candidates[place].setup(recipe, card, workload, drivers), settings, seed=seed)

    place = min(range(len(candidates)), key=lambda place: candidates[place].estimate(recipe, card))
    best = simulated(place)
    towards = 1 if best.learner_busy > best.engines_busy else -1
    while 0 <= place + towards < len(candidates):
        found_there = simulated(place + towards)
        if found_there.steps_per_hour <= best.steps_per_hour:
            break
        place, best = place + towards, found_there
    return candidates[place], best
