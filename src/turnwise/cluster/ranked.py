"""The learner over ranks: deals plans to them, and puts together what they say."""

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
    """Processes with a `Rank` in each, wherever they run."""

    size: int

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """What a method returns on every rank; of each argument a rank gets its own entry. A rank that fails ends all
        of them, since the others would wait for it, and is LearnerLost here."""
        ...

    def publish(self) -> Mapping[str, Any]:
        """All weights, from the first rank."""
        ...

    def close(self) -> None: ...


class RankedLearner:
    """A learner whose weights and plans are spread over ranks; to the training loop it is one like any other."""

    def __init__(self, ranks: Ranks, cost: Cost) -> None:
        self.ranks = ranks
        self.cost = cost
        self.seconds: dict[str, float] = {}
        self.num_skipped_in_a_row = 0
        self.count()

    def count(self) -> None:
        """Take over the counters of the first rank: the others are no faster, since they wait for each other."""
        self.seconds, self.num_skipped_in_a_row = self.ranks.call("count")[0]

    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        dealt = deal(plans, self.ranks.size, self.cost)
        shares = self.ranks.call("score", dealt, self.same(num_turns), self.same(name))
        self.count()
        return together(shares, num_turns)

    def update(
        self,
        plans: Sequence[Plan],
        credit: PerTurn,
        weights: PerTurn,
        scores: Mapping[str, PerTurn],
        objective: Objective,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        dealt, size = deal(plans, self.ranks.size, self.cost), len(credit)
        found = self.ranks.call(
            "update",
            dealt,
            self.same(size),
            shares_of(dealt, credit),
            shares_of(dealt, weights),
            [{name: share_of(own, values) for name, values in scores.items()} for own in dealt],
            self.same(objective),
        )
        self.count()
        return found[0][0], together([share for _, share in found], size)

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, weights: PerTurn, old: PerTurn
    ) -> dict[str, float]:
        dealt = deal(plans, self.ranks.size, self.cost)
        shares = (shares_of(dealt, values) for values in (targets, weights, old))
        metrics: dict[str, float] = self.ranks.call("update_critic", dealt, self.same(len(targets)), *shares)[0]
        self.count()
        return metrics

    def publish(self) -> Mapping[str, Any]:
        return self.ranks.publish()

    def disturb(self, change: Change) -> int:
        found: list[int] = self.ranks.call("disturb", self.same(change))
        return max(found)

    def undisturb(self) -> None:
        self.ranks.call("undisturb")

    def gradients(self) -> Mapping[str, Any]:
        """The gradient of the last update, as it was applied."""
        found: Mapping[str, Any] = self.ranks.call("gradients")[0]
        return found

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """Every rank writes to the folder, which all of them must see."""
        self.ranks.call("save", self.same(folder.absolute()), self.same(tokenizer))

    def restore(self, folder: Path) -> None:
        self.ranks.call("restore", self.same(folder.absolute()))
        self.count()

    def same(self, value: Any) -> list[Any]:
        return [value] * self.ranks.size

    def close(self) -> None:
        self.ranks.close()


def shares_of(dealt: Sequence[Sequence[Plan]], per_turn: PerTurn) -> list[Share]:
    return [share_of(plans, per_turn) for plans in dealt]


def together(shares: Sequence[Share], num_turns: int) -> list[NDArray[Any]]:
    """One array per turn, from whichever rank has it."""
    found = {turn: values for share in shares for turn, values in share.items()}
    return [found.get(turn, NOTHING) for turn in range(num_turns)]
