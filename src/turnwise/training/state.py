"""What a checkpoint keeps beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turnwise.schedule.resting import Heard
from turnwise.schedule.stream import Used
from turnwise.training.loop import Progress


@dataclass(slots=True)
class State:
    """Where a run is, as JSON in its checkpoints."""

    progress: Progress = field(default_factory=Progress)
    before: dict[str, float] = field(default_factory=dict)
    """Held-out success before training: sampled and greedy."""
    best_step: int | None = None
    best_success: float = -1.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by stage, over all parts of the run."""
    waiting: list[int] = field(default_factory=list)
    """Draws whose groups were made and not trained on yet; the groups are in the checkpoint too."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What metrics.jsonl was when this was written, see `tracker.seal`."""
    evaluating: int | None = None
    """Version whose evaluation has begun and has not ended; its checkpoint stays until it has."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        renamed = {"examined": "evaluating"}  # as checkpoints of earlier versions have it
        named = {renamed.get(key, key): value for key, value in data.items()}
        known = named["progress"]
        heard = [Heard(**one) for one in known.get("heard", ())]  # earlier versions had no tasks that rest
        progress = {**known, "used": Used(**known["used"]), "heard": heard}
        return cls(**{**named, "progress": Progress(**progress)})
