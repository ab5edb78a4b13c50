"""The sets of allowed tokens of a plan's action tokens.

Two turns may share an action token and have been allowed different tokens there, by grammars that differ. So a set
belongs to an action token of a turn, never to a node of the tree.

Letters: K action tokens of all turns of a plan, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.allowed import Bits, bits_of, in_sets
from turnwise.plan.blocks import Index
from turnwise.types import Turn

UNGUIDED = -1
"""The place of an action token that was drawn from all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetSets:
    """Which tokens each action token of a plan was drawn from.

    Example:
        TargetSets(places=np.array([0, 1, UNGUIDED]), sets=(pack_set([5, 9], 512), pack_set(range(100), 512)))
    """

    places: Index
    """[K] which of the sets; UNGUIDED where all tokens were allowed."""
    sets: tuple[bytes, ...]

    @classmethod
    def of(cls, turns: Sequence[Turn], order: Sequence[int] | Index) -> TargetSets | None:
        """Those of some turns, in this order; None where no turn has any. Equal sets are kept once."""
        chosen = [turns[index] for index in order]
        if all(turn.allowed is None for turn in chosen):
            return None
        numbers: dict[bytes, int] = {}
        places = [np.zeros(0, np.int64)]
        for turn in chosen:
            if turn.allowed is None:
                places.append(np.full(len(turn.action), UNGUIDED, np.int64))
            elif len(turn.action):
                renumbered = [numbers.setdefault(packed, len(numbers)) for packed in turn.allowed.sets]
                places.append(np.array(renumbered, np.int64)[turn.allowed.places])
        return cls(np.concatenate(places), tuple(numbers))

    def rows(self, places: Index, tokens: NDArray[np.int32], vocabulary: int) -> tuple[Bits, Index]:
        """(bits of the sets that occur at these places [rows, V / 8], the row of each place). A recorded token that was
        not allowed would have no logprob, and is refused."""
        used, rows = np.unique(places, return_inverse=True)
        width = -(-vocabulary // 8)
        bits = np.full((len(used), width), 0xFF, np.uint8)
        bits[used != UNGUIDED] = bits_of([self.sets[place] for place in used if place != UNGUIDED], width)[:, :width]
        if not in_sets(bits, rows, tokens).all():
            raise ValueError("a recorded token is not among those its grammar allowed: the turn is damaged")
        return bits, rows
