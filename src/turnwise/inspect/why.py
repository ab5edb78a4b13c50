"""turnwise why: what keeps a run from learning, read from its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics
from turnwise.runs.why.check import Finding
from turnwise.runs.why.history import MetricHistory
from turnwise.runs.why.table import find_causes, is_read, without_consequences

LOOK_BACK = 20
"""Lines of metrics that are looked at one by one."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the checks found in a run so far.

    Example:
        diagnose(Path("runs/quickstart")).findings
    """

    path: Path
    step: int
    """The last step that has been logged."""
    num_steps: int
    """Steps of training that have been logged."""
    findings: tuple[Finding, ...]

    def describe(self) -> list[str]:
        """Lines for a terminal."""
        if not self.findings:
            steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
            return [f"nothing found in {steps} of {self.path}"]
        lines: list[str] = []
        for finding in self.findings:
            last = f" (last seen at step {finding.step})" if finding.step != self.step else ""
            lines += [
                f"{finding.cause}{last}",
                f"  seen   {finding.seen}",
                f"  means  {finding.meaning}",
                f"  try    {finding.remedy}",
            ]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"run": str(self.path), "step": self.step, "findings": [finding.to_json() for finding in self.findings]}


def diagnose(path: Path) -> Diagnosis:
    """What the checks find in the folder of a run, finished or under way."""
    folder = RunFolder.open(path)
    recipe = parse_recipe(folder.read_config(), str(folder.config), is_recorded=True)
    history, findings = replay(read_metrics(folder.metrics), recipe)
    return Diagnosis(path, history.step, len(history.training), findings)


def replay(lines: Sequence[Mapping[str, Any]], recipe: Recipe) -> tuple[MetricHistory, tuple[Finding, ...]]:
    """The causes that held at one of the last steps, each as it was last seen: a cause may come and go with chance."""
    history = MetricHistory.of(lines[:-LOOK_BACK], is_read)
    found: dict[str, Finding] = {}
    for line in lines[-LOOK_BACK:]:
        history.append(line)
        found |= {finding.name: finding for finding in find_causes(history, recipe)}
    return history, tuple(without_consequences(found))
