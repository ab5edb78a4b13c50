"""The terms of an update: which tokens have one, and what is reported of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnwise.plan.blocks import Index

if TYPE_CHECKING:
    from turnwise.learn.policy import Policy


def drop_unweighted(
    policy: Policy, loss_inputs: Mapping[str, NDArray[Any]], picked: Index, outputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
    """The loss inputs of the tokens that a pass picked, and its outputs, both without tokens of weight 0.

    Such a token is left out, not multiplied by zero: zero times NaN would spoil the whole update.
    """
    inputs = {name: values[picked] for name, values in loss_inputs.items()}
    if not inputs["weight"].all():
        weighted = np.flatnonzero(inputs["weight"])
        inputs = {name: values[weighted] for name, values in inputs.items()}
        outputs = [tensor[policy.tensor(weighted)] for tensor in outputs]
    return {name: policy.tensor(values, outputs[0].dtype) for name, values in inputs.items()}, outputs


def weighted_means(sums: Mapping[str, float], loss: str) -> dict[str, float]:
    """The loss, which is a sum, and the mean under the token weights of everything else that was measured.

    If no token has a weight, nothing was measured.
    """
    total = sums["weight"]
    means = {name: value / total for name, value in sums.items() if name not in (loss, "weight")} if total else {}
    return {loss: sums[loss], **means}
