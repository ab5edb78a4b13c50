"""The cost of one recorded update in each layout: exact counts, and seconds on this machine, predicted by a fit to a
few passes of the run's model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from turnwise.assemble.learner import LAYOUTS, policy_of, tokens_per_pass
from turnwise.assemble.model import set_threads
from turnwise.inspect.layout_load import PACKED, Load, load_of_plans, loads
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.learn.policy import Policy, pick_device
from turnwise.plan.plan import Plan
from turnwise.plan.tree import tree
from turnwise.pretrained import CausalLM
from turnwise.runs.screen import table
from turnwise.types import turns_of

CALIBRATION_SECONDS = 12.0
CHECK_SECONDS = 3.0
"""A pass that would take longer is not measured to check the prediction."""
PASS_SECONDS = 1.0
"""Approximate time of one pass of the calibration."""

# ---------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that determine the number of operations."""

    parameters: int
    """Without the embedding and the output head."""
    attention: int
    """Layers times heads times the width of a head."""
    head: int
    """Parameters of the output head."""

    @classmethod
    def of(cls, model: CausalLM) -> Sizes:
        config = model.config.get_text_config()
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        excluded = {id(head): head.numel(), id(embedding): embedding.numel()}  # one entry if they are tied
        total = sum(parameter.numel() for parameter in model.parameters())
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = config.num_hidden_layers * config.num_attention_heads * width
        return cls(total - sum(excluded.values()), attention, head.numel())

    def operations(self, load: Load) -> float:
        """Additions and multiplications of a load, forward and backward.

        A parameter costs 2 operations per token forward, and 4 backward: for the gradient of the input and of the
        parameter. A pair costs a product of two vectors for its attention weight and one more to add the value, 4 per
        element of a head; backward, the gradients of query, key, value and weight cost 8. Recomputation inside a kernel
        is not counted.
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
    """Least squares of relative errors. Parts whose coefficient would be negative are left out."""
    units = np.stack([load.numbers for load, _ in measured])
    seconds = np.array([taken for _, taken in measured])
    rows = units / seconds[:, None]
    used = rows.any(0)
    while True:
        per_unit = np.zeros(rows.shape[1])
        per_unit[used] = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        if (per_unit >= 0.0).all():
            return Pace(tuple(per_unit.tolist()))
        used &= per_unit > 0.0


def calibrate(policy: Policy, tokens_per_pass: int, seconds: float = CALIBRATION_SECONDS) -> Pace:
    """A fit to a few passes over chains of artificial tokens: short and long chains, few and many targets, equal and
    unequal lengths, large and small passes."""
    began = time.perf_counter()
    context = getattr(policy.model.config, "max_position_embeddings", None) or tokens_per_pass
    probe = chains([32] * 4)
    seconds_of(policy, probe)  # the first pass allocates memory that the others reuse
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
        chains([short - index % 2 for index in range(count)]),
        chains([short - index % 2 for index in range(count // 4)], targets=True),
    ]
    best = [float("inf")] * len(plans)
    while best[-1] == float("inf") or time.perf_counter() - began < seconds - sum(best):
        for index, plan in enumerate(plans):
            best[index] = min(best[index], seconds_of(policy, plan))
    return fit([(load_of_plans([plan]), taken) for plan, taken in zip(plans, best, strict=True)])


def chains(lengths: Sequence[int], *, targets: bool = False) -> Plan:
    """A plan of chains of the given lengths. The action is the last token of each chain; with `targets`, all tokens but
    the first."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    nodes = np.arange(int(ends[-1]))
    depth = nodes - np.repeat(ends - sizes, sizes)
    actions = sizes - 1 if targets else np.ones_like(sizes)
    return Plan(
        tokens=(nodes % 8).astype(np.int32),
        depth=depth.astype(np.int32),
        parent=np.where(depth == 0, -1, nodes - 1).astype(np.int32),
        exit=np.repeat(ends, sizes).astype(np.int32),
        turns=np.arange(len(sizes)),
        offsets=np.concatenate(([0], np.cumsum(actions))),
        action_nodes=nodes[depth >= np.repeat(sizes - actions, sizes)],
    )


def seconds_of(policy: Policy, plan: Plan) -> float:
    """The time of a forward and backward pass."""
    before = time.perf_counter()
    for _, logprobs, _ in policy.passes(plan):
        logprobs.sum().backward()
    gradient = policy.model.get_output_embeddings().weight.grad
    assert gradient is not None
    float(gradient[0, 0])  # waits until an asynchronous device has finished
    return time.perf_counter() - before


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Layout:
    """A line of the comparison."""

    name: str
    load: Load
    operations: float
    seconds: float
    """The predicted time."""


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """A prediction and a measurement that the fit did not use: one pass of the run's layout."""

    layout: str
    predicted: float
    measured: float | None
    """None if the measurement would take too long."""

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
    """The cost of one update in each layout."""

    taken: tuple[str, ...]
    num_unique: int
    """The number of different (token, prefix) pairs: a tree in one pass has each of them once."""
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
    """The cost of one update of a run in every layout: the first update of the archived step."""
    past = RecordedRun.open(path)
    step, recipe = past.step(step), past.recipe
    set_threads(recipe)
    records = past.kept(step)
    groups = [record.group for record in islice(records, recipe.groups_per_update or None)]
    turns = [turn for turn in turns_of(groups) if len(turn.action)]
    if not turns:
        raise ValueError(f"no turn of step {step} has an action; choose another --step")
    model = past.model().to(pick_device(recipe.model.device))
    loads_by_layout, sizes, policy = (
        loads(turns, tokens_per_pass(recipe)),
        Sizes.of(model),
        policy_of(recipe, model),
    )
    pace = calibrate(policy, tokens_per_pass(recipe), seconds)
    prediction = check(policy, pace, recipe.layout, LAYOUTS[recipe.layout](turns, tokens_per_pass(recipe))[0])
    lines = (Layout(name, load, sizes.operations(load), pace.seconds(load)) for name, load in loads_by_layout.items())
    num_unique = tree(turns).num_tokens
    taken = (
        f"one update of step {step} of {path}: {len(groups)} groups, "
        f"{sum(len(group.trajectories) for group in groups)} attempts, {len(turns)} turns",
        f"{num_unique:,} unique tokens, at most {tokens_per_pass(recipe):,} tokens a pass, "
        f"{sizes.parameters:,} parameters beside embedding and head",
    )
    return Costs(taken, num_unique, tuple(lines), prediction)
