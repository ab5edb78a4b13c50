"""What does it do to training if the number of optimizer steps grows with the number of turns?

    python benchmarks/updates_by_rows.py [--seeds 0 1 2] [--quick] [--json PATH] [--picture PATH]

Trains the quick start at a constant learning rate, with the same seeds in three arms: one update a step; mini-batches
of two groups, so eight updates a step whatever the attempts do; and mini-batches of 64 rows, a row being a turn: their
number grows with the turns of the attempts, as in systems that make a row of every turn. Every mini-batch of rows
has the objective of the step, on its own rows, with its own normalisation. Two more arms have the linear schedule of
the recipe, which counts on one update a step. Printed are held-out success before and after training, training success
by tenths of the run, the updates by rows of every step, and the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from learned import Case
from paired import compare

from turnwise.credit.scope import PerTurn
from turnwise.schedule.take import Taken
from turnwise.training import loop
from turnwise.types import Turn, turns_of

ROWS = 64


class RowUpdates:
    """A learner whose one update of a step is an update for every mini-batch of rows, in an order drawn by the step."""

    def __init__(self, learner: Any, turns: Sequence[Turn], plan: Callable[[Sequence[Turn]], Any], seed: int) -> None:
        self.learner = learner
        self.turns = turns
        self.plan = plan
        self.order = np.random.default_rng(seed).permutation(len(turns))
        self.num_updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)

    def update(
        self, plans: Any, credit: PerTurn, weights: PerTurn, loss_inputs: Any, objective: Any
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        logged: list[dict[str, float]] = []
        logprobs: list[np.ndarray] = [turn.logprobs for turn in self.turns]
        for start in range(0, len(self.order), ROWS):
            rows = self.order[start : start + ROWS].tolist()
            total = sum(float(weights[row].sum()) for row in rows)
            own = [weights[row] / max(total, 1e-9) for row in rows]
            old = {"old": [self.turns[row].logprobs for row in rows]}
            plans = self.plan([self.turns[row] for row in rows])
            metrics, found = self.learner.update(plans, [credit[row] for row in rows], own, old, objective)
            if not logged:  # the others are of weights that have changed since, which the run would take for a fault
                for row, of_row in zip(rows, found, strict=True):
                    logprobs[row] = of_row
            logged.append(metrics)
        self.num_updates = len(logged)
        return loop.mean_of_updates(logged), logprobs


@contextmanager
def by_rows() -> Iterator[None]:
    """Training steps whose mini-batches are of so many rows."""
    updates: list[int] = []
    of_groups = loop.train_step

    def step(settings: loop.Settings, stages: loop.Stages, learner: Any, taken: Taken, version: int) -> Any:
        if all(len(group.trajectories) == 1 for group in taken.kept):  # the warm start, on single demonstrations
            return of_groups(settings, stages, learner, taken, version)
        rows = RowUpdates(learner, list(turns_of(taken.kept)), stages.plan, version)
        done = of_groups(settings, stages, rows, taken, version)
        updates.append(rows.num_updates)
        return done

    with patch.object(loop, "train_step", step):
        yield
    print(f"\nupdates by rows, in every step of every run: {' '.join(map(str, updates))}")


if __name__ == "__main__":
    constant = ("optimizer.schedule=constant",)
    quickstart = Case("quickstart", constant)
    compare(
        __doc__,
        {
            "one update a step": (quickstart, nullcontext),
            "8 updates, by groups": (Case("quickstart", (*constant, "groups_per_update=2")), nullcontext),
            f"updates of {ROWS} rows": (quickstart, by_rows),
            "one update a step, linear": (Case("quickstart"), nullcontext),
            f"updates of {ROWS} rows, linear": (Case("quickstart"), by_rows),
        },
    )
