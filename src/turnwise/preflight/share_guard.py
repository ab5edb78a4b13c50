"""The share guard: fails at the operation by which a rank has more of the weights than its share."""

from __future__ import annotations

from torch import Tensor

from turnwise.preflight.live_memory import LiveMemory
from turnwise.preflight.operation_counter import BUFFERS, GATHER, GATHER_ROOT, size_of
from turnwise.preflight.rehearsal import MASTERS


class OverShareError(AssertionError):
    """A rank has more of the weights than it may."""


class ShareGuard:
    """Watches every new tensor of a rank, for an operation counter.

    Example:
        counter.watch = ShareGuard(counter.memory, share=4.1e9, gathered=3.7e9)
    """

    def __init__(self, memory: LiveMemory, share: float, gathered: float) -> None:
        self.memory = memory
        self.share = share
        """Bytes of the weights that belong to the rank."""
        self.gathered = gathered
        """Bytes of other ranks' weights that it may have besides, for as long as it computes with them."""

    def __call__(self, tensor: Tensor) -> None:
        now = self.memory.now
        weights = now[MASTERS] + now[GATHER] + now[GATHER_ROOT] + now[BUFFERS]
        if weights > self.share + self.gathered:
            raise OverShareError(
                f"a rank has {weights / 1e9:.2f} GB of weights, and its share is {self.share / 1e9:.2f} with "
                f"{self.gathered / 1e9:.2f} gathered"
            )


class LoadGuard(ShareGuard):
    """The same while a model is loaded, when every tensor is one of weights."""

    def __call__(self, tensor: Tensor) -> None:
        if self.memory.num_bytes > self.share + self.gathered:
            raise OverShareError(
                f"a rank has {self.memory.num_bytes / 1e9:.3f} GB while it loads {size_of(tensor) / 1e9:.3f} GB of "
                f"weights, and its share is {self.share / 1e9:.3f} with {self.gathered / 1e9:.3f} besides"
            )
