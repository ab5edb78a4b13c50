"""The learner over ranks: deals plans to the ranks and merges their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from turnwise.cluster.deal import deal
from turnwise.cluster.rank import NOTHING, Share, share_of
from turnwise.credit.scope import PerTurn
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change
from turnwise.plan.balance import Cost
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer


class Ranks(Protocol):
    """Processes that each hold a `Rank`."""

    size: int

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """The results of a method on all ranks. Each argument has one entry per rank. If a rank fails, all ranks end,
        because the others would wait for it, and LearnerLost is raised."""
        ...

    def publish(self) -> Mapping[str, Any]:
        """All weights, from the first rank."""
        ...

    def close(self) -> None: ...


class RankedLearner:
    """A learner whose weights and plans are spread over ranks. The training loop uses it like any other learner."""

    def __init__(self, ranks: Ranks, cost: Cost) -> None:
        self.ranks = ranks
        self.cost = cost
        self.seconds: dict[str, float] = {}
        self.num_skipped_in_a_row = 0
        self.count()

    def count(self) -> None:
        """Copy the counters of the first rank. Ranks wait for each other, so the counters of the others are similar."""
        self.seconds, self.num_skipped_in_a_row = self.ranks.call("count")[0]

    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        dealt = deal(plans, self.ranks.size, self.cost)
        shares = self.ranks.call("score", dealt, self.for_all(num_turns), self.for_all(name))
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
        dealt, size = deal(plans, self.ranks.size, self.cost), len(credit)
        results = self.ranks.call(
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
        dealt = deal(plans, self.ranks.size, self.cost)
        shares = (shares_of(dealt, values) for values in (targets, token_weights, old))
        metrics: dict[str, float] = self.ranks.call("update_critic", dealt, self.for_all(len(targets)), *shares)[0]
        self.count()
        return metrics

    def publish(self) -> Mapping[str, Any]:
        return self.ranks.publish()

    def disturb(self, change: Change) -> int:
        counts: list[int] = self.ranks.call("disturb", self.for_all(change))
        return max(counts)

    def undisturb(self) -> None:
        self.ranks.call("undisturb")

    def gradients(self) -> Mapping[str, Any]:
        """The gradient of the last update."""
        gradients: Mapping[str, Any] = self.ranks.call("gradients")[0]
        return gradients

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """Every rank writes into the folder, so all of them must be able to reach it."""
        self.ranks.call("save", self.for_all(folder.absolute()), self.for_all(tokenizer))

    def restore(self, folder: Path) -> None:
        self.ranks.call("restore", self.for_all(folder.absolute()))
        self.count()

    def for_all(self, value: Any) -> list[Any]:
        return [value] * self.ranks.size

    def close(self) -> None:
        self.ranks.close()


def shares_of(dealt: Sequence[Sequence[Plan]], per_turn: PerTurn) -> list[Share]:
    return [share_of(plans, per_turn) for plans in dealt]


def merged(shares: Sequence[Share], num_turns: int) -> list[NDArray[Any]]:
    """One array per turn, from the rank that computed it."""
    arrays = {turn: values for share in shares for turn, values in share.items()}
    return [arrays.get(turn, NOTHING) for turn in range(num_turns)]
