"""The border to learners: what the training loop and a run ask of one, in this process or spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from turnwise.credit.scope import PerTurn
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer


class AnyStaged(Protocol):
    """A checkpoint of a learner, staged in host memory."""

    def write(self, folder: Path) -> None:
        """Write it, in any thread, while the learner goes on; a learner writes one at a time."""
        ...


class AnyLearner(Protocol):
    """Scores recorded tokens and takes optimizer steps on plans."""

    seconds: dict[str, float]
    """Wall-clock seconds by stage so far."""

    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]: ...

    def update(
        self,
        plans: Sequence[Plan],
        credit: PerTurn,
        token_weights: PerTurn,
        scores: Mapping[str, PerTurn],
        objective: Objective,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]: ...

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, token_weights: PerTurn, old: PerTurn
    ) -> dict[str, float]: ...

    @property
    def num_skipped_in_a_row(self) -> int: ...

    def publish(self) -> Mapping[str, Any]: ...

    def disturb(self, change: Change) -> int:
        """Change weights of the policy until `undisturb`. Returns how many changed tensors no spared mirror has."""
        ...

    def undisturb(self) -> None:
        """Restore all weights, bit for bit."""
        ...

    def release(self) -> None:
        """Give memory back to the GPU that is kept for the next pass and not in use."""
        ...

    def stage(self, tokenizer: ChatTokenizer) -> AnyStaged:
        """Copy all that a checkpoint keeps to host memory. The learner may go on once this returns."""
        ...

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """Stage a checkpoint and write it."""
        ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None:
        """End processes of its own."""
        ...
