"""The learner over ranks: deals plans to the ranks and merges their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from turnwise.cluster.deal import deal
from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.rank import NOTHING, Share, share_of
from turnwise.credit.scope import PerTurn
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change
from turnwise.plan.balance import Cost
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer
from turnwise.weights.manifest import Outline
from turnwise.weights.parted import PartedWeights

PATIENCE = 0.1
"""Seconds between two questions whether a checkpoint is written."""


class Ranks(Protocol):
    """Processes that each hold a `Rank`."""

    shape: MeshShape

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """The results of a method on all ranks. Each argument has one entry per rank. If a rank fails, all ranks end,
        because the others would wait for it, and LearnerLost is raised."""
        ...

    def read(self, weights: PartedWeights) -> Mapping[str, Any]:
        """The weights of these ranks where this process can read them."""
        ...

    def close(self) -> None: ...


class RankedLearner:
    """A learner whose weights and plans are spread over ranks. The training loop uses it like any other learner."""

    def __init__(self, ranks: Ranks, cost: Cost) -> None:
        self.ranks = ranks
        self.cost = cost
        self.seconds: dict[str, float] = {}
        self.num_skipped_in_a_row = 0
        self.lock = threading.Lock()
        """Held during a call: a thread that waits for a checkpoint asks the ranks about it between others' calls."""
        self.count()

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        with self.lock:
            return self.ranks.call(method, *arguments)

    def count(self) -> None:
        """Copy the counters of the first rank. Ranks wait for each other, so the counters of the others are similar."""
        self.seconds, self.num_skipped_in_a_row = self.call("count")[0]

    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        dealt = self.dealt(plans)
        shares = self.call("score", dealt, self.for_all(num_turns), self.for_all(name))
        self.count()
        return merged(shares, num_turns)

    def update(
        self,
        plans: Sequence[Plan],
        credit: PerTurn,
        token_weights: PerTurn,
        scores: Mapping[str, PerTurn],
        objective: Objective,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        dealt, size = self.dealt(plans), len(credit)
        results = self.call(
            "update",
            dealt,
            self.for_all(size),
            shares_of(dealt, credit),
            shares_of(dealt, token_weights),
            [{name: share_of(rank_plans, values) for name, values in scores.items()} for rank_plans in dealt],
            self.for_all(objective),
        )
        self.count()
        return results[0][0], merged([share for _, share in results], size)

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, token_weights: PerTurn, old: PerTurn
    ) -> dict[str, float]:
        dealt = self.dealt(plans)
        shares = (shares_of(dealt, values) for values in (targets, token_weights, old))
        metrics: dict[str, float] = self.call("update_critic", dealt, self.for_all(len(targets)), *shares)[0]
        self.count()
        return metrics

    def publish(self) -> PartedWeights:
        """The weights, which stay with the ranks until a transport asks for them."""
        return PartedWeights(self.outline, self.ask, self.ranks.read)

    @cached_property
    def outline(self) -> Outline:
        """What weights there are."""
        outline: Outline = self.call("outline")[0]
        return outline

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What all ranks answer, each asked the same."""
        return self.call(method, *(self.for_all(argument) for argument in arguments))

    def disturb(self, change: Change) -> int:
        counts: list[int] = self.call("disturb", self.for_all(change))
        return max(counts)

    def undisturb(self) -> None:
        self.call("undisturb")

    def release(self) -> None:
        self.call("release")

    def gradients(self) -> Mapping[str, Any]:
        """The gradient of the last update."""
        gradients: Mapping[str, Any] = self.call("gradients")[0]
        return gradients

    def stage(self, tokenizer: ChatTokenizer) -> StagedOnRanks:
        """Every rank copies its part of a checkpoint to the memory of its host."""
        self.call("stage", self.for_all(tokenizer))
        return StagedOnRanks(self)

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        self.stage(tokenizer).write(folder)

    def restore(self, folder: Path) -> None:
        self.call("restore", self.for_all(folder.absolute()))
        self.count()

    def dealt(self, plans: Sequence[Plan]) -> list[list[Plan]]:
        """The plans of every rank: ranks that compute layers together get the same."""
        shape = self.ranks.shape
        hands = deal(plans, shape.hands, self.cost)
        return [hands[shape.hand_of(rank)] for rank in range(shape.ranks)]

    def for_all(self, value: Any) -> list[Any]:
        return [value] * self.ranks.shape.ranks

    def close(self) -> None:
        with self.lock:
            self.ranks.close()


class StagedOnRanks:
    """A checkpoint in the memory of the ranks' hosts."""

    def __init__(self, learner: RankedLearner) -> None:
        self.learner = learner

    def write(self, folder: Path) -> None:
        """Every rank writes into the folder, so all of them must be able to reach it. Ranks train on meanwhile."""
        self.learner.call("begin_write", self.learner.for_all(folder.absolute()))
        while True:
            results = self.learner.call("writing_result")
            if all(ended for ended, _ in results):
                break
            time.sleep(PATIENCE)
        for _, error in results:
            if error is not None:
                raise error


def shares_of(dealt: Sequence[Sequence[Plan]], per_turn: PerTurn) -> list[Share]:
    return [share_of(plans, per_turn) for plans in dealt]


def merged(shares: Sequence[Share], num_turns: int) -> list[NDArray[Any]]:
    """One array per turn, from the rank that computed it."""
    arrays = {turn: values for share in shares for turn, values in share.items()}
    return [arrays.get(turn, NOTHING) for turn in range(num_turns)]
