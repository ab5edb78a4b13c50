"""What one recorded update of a run costs in each layout: counted exactly, and in seconds as this machine is likely to
take, by a fit to a few passes of the run's own model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.assemble.learner import LAYOUTS, policy_of
from turnwise.assemble.model import set_threads
from turnwise.inspect.layout_load import PACKED, Load, load_of_plans, loads
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.learn.policy import Policy, pick_device
from turnwise.plan.plan import Plan
from turnwise.plan.tree import tree
from turnwise.runs.screen import table
from turnwise.types import turns_of

CALIBRATION_SECONDS = 12.0
CHECK_SECONDS = 3.0
"""A pass that is longer is not measured to check the prediction."""
PASS_SECONDS = 1.0
"""About what one pass of the calibration may take."""

# ---------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that operations are counted by."""

    parameters: int
    """Without the embedding and the output head."""
    attention: int
    """Layers times heads times the width of a head."""
    head: int
    """Parameters of the output head."""

    @classmethod
    def of(cls, model: Any) -> Sizes:
        config = model.config.get_text_config()
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        apart = {id(head): head.numel(), id(embedding): embedding.numel()}  # one where they are tied
        total = sum(parameter.numel() for parameter in model.parameters())
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = config.num_hidden_layers * config.num_attention_heads * width
        return cls(total - sum(apart.values()), attention, head.numel())

    def operations(self, load: Load) -> float:
        """Additions and multiplications of a load, forward and backward.

        A parameter costs 2 per token forward, and 4 backward: for the gradient of what came in and its own. A pair
        costs a product of two vectors for its weight and one more to add the value, 4 per number of a head; backward
        the gradients of query, key, value and weight, 8. What a kernel computes again to save memory is not counted.
        """
        return 6.0 * self.parameters * load.tokens + 12.0 * self.attention * load.pairs + 6.0 * self.head * load.targets


# ---------------------------------------------------------------- seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per unit of each part of a load, fitted to measurements; none is negative."""

    per_unit: tuple[float, ...]

    def seconds(self, load: Load) -> float:
        return float(load.numbers @ self.per_unit)


def fit(measured: Sequence[tuple[Load, float]]) -> Pace:
    """Least squares of relative errors, without the parts that would come out negative."""
    units = np.stack([load.numbers for load, _ in measured])
    seconds = np.array([taken for _, taken in measured])
    rows = units / seconds[:, None]
    used = rows.any(0)
    while True:
        found = np.zeros(rows.shape[1])
        found[used] = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0.0).all():
            return Pace(tuple(found.tolist()))
        used &= found > 0.0


def calibrate(policy: Policy, tokens_per_pass: int, seconds: float = CALIBRATION_SECONDS) -> Pace:
    """A fit to a few passes over chains of made-up tokens: short and long ones, with few targets and many, of equal
    lengths and not, large and small."""
    began = time.perf_counter()
    context = getattr(policy.model.config, "max_position_embeddings", None) or tokens_per_pass
    probe = chains([32] * 4)
    seconds_of(policy, probe)  # the first pass allocates what all others use
    size = int(probe.num_tokens * PASS_SECONDS / seconds_of(policy, probe))
    size = max(128, min(size, tokens_per_pass, 16384))
    long = max(64, min(context, 2048, size // 2))
    short = max(16, min(64, long // 4))
    count = size // short
    plans = [
        probe,
        chains([short] * count),
        chains([short] * count, targets=True),
        chains([long] * (size // long)),
        chains([short - place % 2 for place in range(count)]),
        chains([short - place % 2 for place in range(count // 4)], targets=True),
    ]
    best = [float("inf")] * len(plans)
    while best[-1] == float("inf") or time.perf_counter() - began < seconds - sum(best):
        for place, plan in enumerate(plans):
            best[place] = min(best[place], seconds_of(policy, plan))
    return fit([(load_of_plans([plan]), taken) for plan, taken in zip(plans, best, strict=True)])


def chains(lengths: Sequence[int], *, targets: bool = False) -> Plan:
    """A plan of chains of given lengths, with the last token of each as an action, or all but the first."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    places = np.arange(int(ends[-1]))
    depth = places - np.repeat(ends - sizes, sizes)
    actions = sizes - 1 if targets else np.ones_like(sizes)
    return Plan(
        tokens=(places % 8).astype(np.int32),
        depth=depth.astype(np.int32),
        parent=np.where(depth == 0, -1, places - 1).astype(np.int32),
        exit=np.repeat(ends, sizes).astype(np.int32),
        turns=np.arange(len(sizes)),
        offsets=np.concatenate(([0], np.cumsum(actions))),
        action_nodes=places[depth >= np.repeat(sizes - actions, sizes)],
    )


def seconds_of(policy: Policy, plan: Plan) -> float:
    """How long a forward and backward pass takes."""
    before = time.perf_counter()
    for _, logprobs, _ in policy.passes(plan):
        logprobs.sum().backward()
    float(policy.model.get_output_embeddings().weight.grad[0, 0])  # waits for a device that runs by itself
    return time.perf_counter() - before


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Layout:
    """A line of the comparison."""

    name: str
    load: Load
    operations: float
    seconds: float
    """Predicted."""


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """A prediction beside a measurement that it was not fitted to: one pass of the run's own layout."""

    layout: str
    predicted: float
    measured: float | None
    """None where it would take too long."""

    def describe(self) -> str:
        if self.measured is None:
            return f"Not checked: one {self.layout} pass of this update would take some {self.predicted:.0f} s."
        return f"One {self.layout} pass of this update took {self.measured:.3g} s, {self.predicted:.3g} s predicted."


def check(policy: Policy, pace: Pace, layout: str, plan: Plan) -> PredictionCheck:
    predicted = pace.seconds(load_of_plans([plan]))
    if predicted > CHECK_SECONDS:
        return PredictionCheck(layout, predicted, None)
    return PredictionCheck(layout, predicted, min(seconds_of(policy, plan) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class Costs:
    """What one update costs in each layout."""

    taken: tuple[str, ...]
    num_unique: int
    """Tokens that differ in what they are or in what comes before: a tree in one pass has each once."""
    layouts: tuple[Layout, ...]
    check: PredictionCheck

    @property
    def packed_seconds(self) -> float:
        return next(layout.seconds for layout in self.layouts if layout.name == PACKED)

    def describe(self) -> list[str]:
        """Lines for a person."""
        head = ("layout", "passes", "tokens", "per unique", "pairs", "operations", "predicted", "of packed")
        rows = [
            (
                layout.name,
                f"{layout.load.passes:.0f}",
                f"{layout.load.tokens:,.0f}",
                f"{layout.load.tokens / self.num_unique:.2f}",
                f"{layout.load.pairs:.2e}",
                f"{layout.operations:.2e}",
                f"{layout.seconds:.3g} s",
                f"{layout.seconds / self.packed_seconds:.2f}",
            )
            for layout in self.layouts
        ]
        note = [
            "tokens, pairs and operations are counted; seconds are predicted by a fit to made-up passes of this model",
            "on this machine just now. " + self.check.describe(),
        ]
        return [*self.taken, "", *table(head, rows), "", *note]


def cost(path: Path, step: int | None, seconds: float = CALIBRATION_SECONDS) -> Costs:
    """One update of a run in every layout: the first of a step that the archive has."""
    past = RecordedRun.open(path)
    step, recipe = past.step(step), past.recipe
    set_threads(recipe)
    kept = past.kept(step)
    groups = [record.group for record in islice(kept, recipe.groups_per_update or None)]
    turns = [turn for turn in turns_of(groups) if len(turn.action)]
    if not turns:
        raise ValueError(f"no turn of step {step} has an action; choose another --step")
    model = past.model().to(pick_device(recipe.model.device))
    found, sizes, policy = loads(turns, recipe.max_tokens_per_microbatch), Sizes.of(model), policy_of(recipe, model)
    pace = calibrate(policy, recipe.max_tokens_per_microbatch, seconds)
    own = check(policy, pace, recipe.layout, LAYOUTS[recipe.layout](turns, recipe.max_tokens_per_microbatch)[0])
    lines = (Layout(name, load, sizes.operations(load), pace.seconds(load)) for name, load in found.items())
    num_unique = tree(turns).num_tokens
    taken = (
        f"one update of step {step} of {path}: {len(groups)} groups, "
        f"{sum(len(group.trajectories) for group in groups)} attempts, {len(turns)} turns",
        f"{num_unique:,} unique tokens, at most {recipe.max_tokens_per_microbatch:,} tokens a pass, "
        f"{sizes.parameters:,} parameters beside embedding and head",
    )
    return Costs(taken, num_unique, tuple(lines), own)
