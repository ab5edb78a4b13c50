"""A table of splits: for numbers of cards, how to divide them, the steps per hour, and what limits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnwise.preflight.brief import rehearse_a_few
from turnwise.preflight.card import Card
from turnwise.preflight.engine_memory import EngineMemory
from turnwise.preflight.model_config import config_of
from turnwise.recipe.schema import Recipe
from turnwise.simulate.outcome import SimulatedRun
from turnwise.simulate.split import DELAY, SYNC_RATE, TURN_SECONDS, Split, best_split
from turnwise.simulate.workload import LognormalDelay

COLUMNS = ("cards", "learner", "engines", "steps/h", "learner", "engines", "loop", "in env", "lag", "what limits")


def split_lines(
    recipe: Recipe, card: Card, numbers: Sequence[int], *, delay: LognormalDelay = DELAY, drivers: int = 1
) -> Iterator[str]:
    """The best split of each number of cards. The learner is rehearsed with a few layers, and the others are
    taken to cost what the last of these does."""
    config = config_of(recipe).config
    found = rehearse_a_few(recipe, config, "cuda")
    engine = EngineMemory.of(recipe, config, found.num_parameters)
    yield (
        f"splits of {card.name} cards with the most steps per hour, simulated and never run: environment calls of "
        f"{delay.median:g} s (median; lognormal, sigma {delay.sigma:g}), {TURN_SECONDS * 1e3:g} ms of the agent loop "
        f"a turn in {drivers} process{'es' * (drivers > 1)}, weights at {SYNC_RATE / 1e9:g} GB/s"
    )
    yield "{:>6}{:>9}{:>9}{:>9}  busy:{:>8}{:>9}{:>6}{:>8}{:>6}  {}".format(*COLUMNS)
    for cards in numbers:
        try:
            yield row(*best_split(recipe, found, engine, card, cards, delay=delay, drivers=drivers))
        except ValueError as error:
            yield f"{cards:6}  {error}"


def row(split: Split, outcome: SimulatedRun) -> str:
    engines = f"{split.replicas} x {split.engine.cards}"
    busy = f"{outcome.learner_busy:8.0%}{outcome.engines_busy:9.0%}{outcome.driver_busy:6.0%}"
    return (
        f"{split.cards:6}{split.ranks:9}{engines:>9}{outcome.steps_per_hour:9.1f}       {busy}"
        f"{outcome.in_environment:8.0%}{outcome.mean_lag:6.2f}  {outcome.limit}"
    )
