"""The rows of a pass whose calls have a grammar: their logits are masked together, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.guidance import Guidance, Guide
from turnwise.engines.slots.request import Request


class GuidedRows:
    """The guided rows of a batch of logits, and the tokens that each may draw.

    Example:
        guided = GuidedRows(guidance, rows, [request.guide for request in requests])
        tokens, logprobs = draw(guided.mask(logits), sampling, noise)
        guided.take(tokens, lost)
    """

    def __init__(self, guidance: Guidance, rows: NDArray[np.int64], guides: list[Guide]) -> None:
        self.rows = rows
        self.guides = guides
        self.bits = guidance.bits([guide.matcher for guide in guides])
        self.problems = {int(row): guide.problem for row, guide in zip(rows, guides, strict=True) if guide.problem}
        """By row, why a grammar cannot be followed any further."""

    @classmethod
    def of(
        cls,
        guidance: Guidance | None,
        is_guided: NDArray[np.bool_],
        slots: NDArray[np.int64],
        running: Mapping[int, Request],
    ) -> GuidedRows | None:
        """Those of the slots of a pass; None where no call has a grammar."""
        if guidance is None or not is_guided.any():
            return None
        rows = np.flatnonzero(is_guided)
        return cls(guidance, rows, [guide for slot in slots[rows] if (guide := running[int(slot)].guide) is not None])

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] with minus infinity for tokens that a grammar does not allow."""
        dense = np.unpackbits(self.bits.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        forbidden = torch.from_numpy(dense).to(logits.device) == 0
        if len(self.rows) == len(logits):
            return logits.masked_fill(forbidden, -torch.inf)
        rows = torch.from_numpy(self.rows).to(logits.device)
        return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))

    def take(self, tokens: NDArray[np.int64], lost: NDArray[np.bool_]) -> None:
        """Go on with the tokens that were drawn, in all rows that are not lost."""
        for row, guide, bits in zip(self.rows.tolist(), self.guides, self.bits, strict=True):
            if not lost[row]:
                guide.take(int(tokens[row]), bits)
