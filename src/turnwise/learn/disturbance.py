"""The disturbance: a change of every weight that can be seen in what a model says, and be taken back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

STRIDE = 7
"""Every seventh number of a tensor changes: enough to be seen, and in another column of each row."""
OF_ZEROS = 0.1
"""What these become in a tensor that has nothing but zeros."""


class Disturbance:
    """A model whose weights have changed, from when this is made until it is undone. Signs flip, which loses no bit and
    needs no copy of the model.

    Example:
        disturbance = Disturbance(model)
        ...
        disturbance.undo()
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.zeros: set[int] = set()
        """Places of the tensors that had nothing but zeros."""
        with torch.no_grad():
            for place, numbers in self.numbers():
                some = numbers[place % min(STRIDE, len(numbers)) :: STRIDE]
                if numbers.any():
                    some.neg_()
                else:
                    self.zeros.add(place)
                    some.copy_(torch.full_like(some, OF_ZEROS).copysign_(some))

    def undo(self) -> None:
        """Make all weights what they were, bit for bit."""
        with torch.no_grad():
            for place, numbers in self.numbers():
                some = numbers[place % min(STRIDE, len(numbers)) :: STRIDE]
                if place in self.zeros:
                    some.mul_(0)  # which keeps the signs that zeros have too
                else:
                    some.neg_()

    def numbers(self) -> Iterator[tuple[int, Tensor]]:
        """(place, numbers) of each tensor that is published, or of this rank's part of it; tied ones once."""
        model = self.model
        published = model.state_dict().keys()
        buffers = (buffer for name, buffer in model.named_buffers() if name in published)
        for place, tensor in enumerate([*model.parameters(), *buffers]):
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if own.is_floating_point() and own.numel():
                yield place, own.detach().view(-1)
