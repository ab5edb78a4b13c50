"""Rounding: how far logprobs and gradients of turns are from float64, layout by layout.

In float64 all layouts agree to 1e-12, so there is one truth. In bfloat16 no two ways to compute agree, and neither do
two batch sizes of padded rows: what a layout can be asked for is to be no further from the truth than padded rows are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.learn.policy import Policy
from turnwise.learn.transformers_reference import in_float64, stock_attention, stock_passes
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import length
from turnwise.pretrained import CausalLM
from turnwise.runs.screen import table
from turnwise.types import Turn

aten = torch.ops.aten
ROOM = 2.0
"""How many times further from the truth than padded rows a layout may be: on a few turns, rounding differs by chance,
and in a mixture a few tokens that take other experts decide. What is wrong and smaller than that, float64 finds."""
NEAR = 1e-5
"""A distance that is never too far."""
PADDED = "padded rows"


class Products(TorchDispatchMode):
    """Products of bfloat16 matrices: sums in float32, rounded once, as tensor cores compute them. So does the kernel of
    a CPU without bfloat16 units, but a hundred times slower."""

    KERNELS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        if func.overloadpacket not in self.KERNELS or all(each.dtype != torch.bfloat16 for each in tensors):
            return func(*args, **(kwargs or {}))
        wide = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
        return func(*wide, **(kwargs or {})).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Precision:
    """What a model computes in.

    Example:
        Precision("bfloat16", torch.bfloat16)
    """

    name: str
    dtype: torch.dtype

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Where passes are made and differentiated."""
        with Products():  # type: ignore[no-untyped-call]
            yield

    def policy(self, model: CausalLM, temperature: float) -> Policy:
        """The policy of a model, which is given in float32 and is then in this precision, as the layers of a learner
        are while they compute."""
        policy = Policy(model, dtype=self.dtype, temperature=temperature)
        model.to(self.dtype)
        return policy


FLOAT64 = Precision("float64", torch.float64)
FLOAT32 = Precision("float32", torch.float32)
BFLOAT16 = Precision("bfloat16", torch.bfloat16)
PRECISIONS = {each.name: each for each in (FLOAT32, BFLOAT16)}
"""What a learner computes in, by model.dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What came of some turns in one layout, in float64."""

    logprobs: NDArray[np.float64]
    """Of all action tokens, turn after turn."""
    gradient: Tensor
    """Of the sum of factors times logprobs, of all parameters in their order."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a layout is from the truth."""

    layout: str
    largest: float
    """Of the differences of logprobs."""
    mean: float
    rms: float
    gradient: float
    """Norm of the difference relative to the norm of the true gradient."""

    @classmethod
    def between(cls, layout: str, found: Computed, truth: Computed) -> Distance:
        off = np.abs(found.logprobs - truth.logprobs)
        gradient = float((found.gradient - truth.gradient).norm() / truth.gradient.norm())
        return cls(layout, float(off.max()), float(off.mean()), float(np.sqrt((off**2).mean())), gradient)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.layout, *(f"{value:.1e}" for value in (self.largest, self.mean, self.rms, self.gradient)))


@dataclass(frozen=True, slots=True)
class Rounding:
    """The distances of all layouts in one precision."""

    precision: str
    num_tokens: int
    """Action tokens."""
    distances: tuple[Distance, ...]
    """The padded rows come first."""

    @property
    def further(self) -> list[str]:
        """The layouts that are further from the truth than padded rows are, or not at a number."""
        rows = self.distances[0]
        return [
            each.layout
            for each in self.distances[1:]
            if not (each.rms <= max(ROOM * rows.rms, NEAR) and each.gradient <= max(ROOM * rows.gradient, NEAR))
        ]

    def describe(self) -> list[str]:
        """Lines for a person."""
        head = ("layout", "logprobs: largest", "mean", "rms", "gradient")
        title = f"distance from float64, computed in {self.precision}, on {self.num_tokens:,} action tokens:"
        return [title, *table(head, [each.cells for each in self.distances]), self.verdict]

    @property
    def verdict(self) -> str:
        """One line."""
        rows, tree = self.distances[:2]
        numbers = f"gradient of the tree {tree.gradient:.1e} off, of padded rows {rows.gradient:.1e}"
        if self.further:
            return f"FURTHER from float64 than padded rows: {', '.join(self.further)} ({numbers})"
        return f"every layout is as near to float64 as padded rows, to a factor of {ROOM:g} ({numbers})"


# ---------------------------------------------------------------- measured


def rounding_of(
    model: CausalLM,
    turns: Sequence[Turn],
    factors: Sequence[NDArray[np.floating]],
    precision: Precision,
    *,
    temperature: float,
    tokens_per_pass: int,
) -> Rounding:
    """The distances on some turns, given a model in float32 and a factor for every action token."""
    exact = copy.deepcopy(model)
    exact.to(torch.float64)
    in_float64(exact)
    truth = by_rows(exact, turns, factors, FLOAT64, temperature, tokens_per_pass)
    del exact
    policy = precision.policy(copy.deepcopy(model), temperature)
    found = {PADDED: by_rows(policy.model, turns, factors, precision, temperature, tokens_per_pass)}
    longest = max(map(length, turns))
    for name, plans in (
        ("tree", cut(turns, tokens_per_pass)),
        ("packed", pack(turns, max(tokens_per_pass, longest))),
    ):
        found[name] = by_plans(policy, turns, plans, factors)
    distances = tuple(Distance.between(name, each, truth) for name, each in found.items())
    return Rounding(precision.name, len(truth.logprobs), distances)


def by_rows(
    model: CausalLM,
    turns: Sequence[Turn],
    factors: Sequence[NDArray[np.floating]],
    precision: Precision,
    temperature: float,
    tokens_per_pass: int,
) -> Computed:
    """Padded rows, computed by transformers."""
    logprobs, total = empty_of(turns), Total(model)
    with stock_attention(model), precision.computing():
        for rows, of_rows, _, _ in stock_passes(model, turns, tokens_per_pass, temperature):
            given = torch.from_numpy(np.concatenate([factors[turn] for turn in rows.turns]))
            (of_rows.double() * given).sum().backward()
            total.take()
            parts = of_rows.detach().double().split([len(turns[turn].action) for turn in rows.turns])
            for turn, part in zip(rows.turns, parts, strict=True):
                logprobs[turn] = part.numpy()
    return Computed(np.concatenate(logprobs), total.gradient)


def by_plans(
    policy: Policy, turns: Sequence[Turn], plans: Sequence[Plan], factors: Sequence[NDArray[np.floating]]
) -> Computed:
    """Plans, computed by a policy."""
    logprobs, total = empty_of(turns), Total(policy.model)
    for plan in plans:
        given = torch.from_numpy(plan.gather(factors))
        of_plan = np.empty(len(given))
        with Products():  # type: ignore[no-untyped-call]
            for picked, of_pass, _ in policy.passes(plan):
                (of_pass.double() * given[picked]).sum().backward()
                total.take()
                of_plan[picked] = of_pass.detach().double().numpy()
        for turn, part in zip(plan.turns, np.split(of_plan, plan.offsets[1:])[:-1], strict=True):
            logprobs[turn] = part
    return Computed(np.concatenate(logprobs), total.gradient)


def empty_of(turns: Sequence[Turn]) -> list[NDArray[np.float64]]:
    return [np.empty(0)] * len(turns)


class Total:
    """The gradient of several passes, added up in float64: as sharded parameters add theirs up in float32, not in the
    dtype of a pass."""

    def __init__(self, model: CausalLM) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parts: list[Tensor] = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in self.parameters]

    def take(self) -> None:
        """Add what a pass has left, and clear it."""
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            if parameter.grad is not None:
                part += parameter.grad
                parameter.grad = None

    @property
    def gradient(self) -> Tensor:
        return torch.cat([part.flatten() for part in self.parts])
