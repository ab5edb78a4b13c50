"""The terms of an update: of which tokens it has any, and what is reported of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnwise.plan.blocks import Index

if TYPE_CHECKING:
    from turnwise.learn.policy import Policy


def counted(
    policy: Policy, told: Mapping[str, NDArray[Any]], picked: Index, found: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
    """What was told, and what a pass found, of the tokens that have a weight. One without is left out, not multiplied
    by zero: zero times what is not a number would spoil the whole update."""
    here = {name: values[picked] for name, values in told.items()}
    if not here["weight"].all():
        some = np.flatnonzero(here["weight"])
        here = {name: values[some] for name, values in here.items()}
        found = [tensor[policy.tensor(some)] for tensor in found]
    return {name: policy.tensor(values, found[0].dtype) for name, values in here.items()}, found


def means_of(sums: Mapping[str, float], loss: str) -> dict[str, float]:
    """The loss, which is a sum, and the mean of everything else that was measured, under the weights of the tokens.
    Where none has a weight nothing was measured."""
    total = sums["weight"]
    means = {name: value / total for name, value in sums.items() if name not in (loss, "weight")} if total else {}
    return {loss: sums[loss], **means}
