"""The watcher of a run: says each cause once, while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.recipe.schema import Recipe
from turnwise.runs.trackers.attempts import SampledAttempt
from turnwise.runs.why.check import Check
from turnwise.runs.why.history import MetricHistory
from turnwise.runs.why.table import CHECKS, find_causes, is_read

log = logging.getLogger(__name__)


class Watcher:
    """A tracker that looks at the metrics of each step and warns of each cause once. It never raises.

    Example:
        Watcher(recipe, read_metrics(folder.metrics)).log(12, metrics)
    """

    def __init__(
        self, recipe: Recipe, lines: Iterable[Mapping[str, Any]] = (), checks: tuple[Check, ...] = CHECKS
    ) -> None:
        """`lines` are those that an earlier part of the run has logged."""
        self.recipe = recipe
        self.checks = checks
        self.history = MetricHistory.of(lines, is_read)
        self.said: set[str] = set()
        """Names of the checks whose cause has been said."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at one line more."""
        try:
            self.history.append({**metrics, "step": step})
            for finding in find_causes(self.history, self.recipe, self.checks):
                if finding.name not in self.said:
                    self.said.add(finding.name)
                    log.warning("step %d: %s", step, finding.line, extra={"always_shown": True, "finding": finding})
        except Exception:  # whoever watches must not stop what it watches
            log.debug("the metrics of step %d could not be checked", step, exc_info=True)

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at a step that the run stopped in, which may say why it did."""
        self.log(step, metrics)

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        """Attempts are not looked at."""

    def log_curve(self, step: int, path: Path) -> None:
        """Nor is the picture."""

    def close(self) -> None:
        """Nothing is held open."""
