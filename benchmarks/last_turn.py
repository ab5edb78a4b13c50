"""What is learned where only the last turn of an attempt is given credit, as in a known bug of step-wise training?

    python benchmarks/last_turn.py [--seeds 0 1 2] [--quick] [--json PATH] [--picture PATH]

Trains the quick start, chains of lookups whose early turns decide the rest, with the same seeds and settings twice:
with the advantage of an attempt on the tokens of all of its turns, and on those of its last turn alone. Printed are
held-out success before and after training, training success by tenths of the run, and the differences after training.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from learned import Case
from paired import compare

from turnwise.credit.estimators import ESTIMATORS, Estimator
from turnwise.credit.returns import Credit, Scores
from turnwise.credit.totals import grpo
from turnwise.types import Group


def last_turn(groups: Sequence[Group], scores: Scores) -> Credit:
    """GRPO's advantages on the last turn of every attempt, and 0 on the turns before it."""
    is_last = [
        turn is attempt.turns[-1] for group in groups for attempt in group.trajectories for turn in attempt.turns
    ]
    return [one if last else np.zeros_like(one) for one, last in zip(grpo(groups, scores), is_last, strict=True)]


def only_last_turns() -> AbstractContextManager[Any]:
    changed = Estimator(last_turn, compares_attempts=True, zero_for_equal_totals=True)
    return patch.dict(ESTIMATORS, {"grpo": changed})


if __name__ == "__main__":
    quickstart = Case("quickstart")
    compare(__doc__, {"all turns": (quickstart, nullcontext), "last turn only": (quickstart, only_last_turns)})
