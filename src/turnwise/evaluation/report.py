"""The report of `turnwise eval`: evaluations of one version of the weights, as lines for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.evaluation.evaluator import Evaluation
from turnwise.evaluation.result import Result
from turnwise.evaluation.target import EvaluationTarget
from turnwise.runs.screen import table
from turnwise.runs.transcript import visible

MARK = "marks/"
FAILED = "attempts that failed have not succeeded, and have no part in the mean return"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The evaluations of a target, sampled and greedy, and the folder that has them."""

    target: EvaluationTarget
    evaluations: tuple[Evaluation, ...]
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        """Of all evaluations, by the names that metrics.jsonl has."""
        return {name: value for evaluation in self.evaluations for name, value in evaluation.metrics.items()}

    @property
    def sampled(self) -> Result:
        """What the sampled attempts found."""
        return self.evaluations[0].result

    @property
    def greedy(self) -> Result:
        """What the greedy attempts found."""
        return self.evaluations[1].result

    def __repr__(self) -> str:
        return "\n".join(self.describe())

    def describe(self) -> list[str]:
        """A row for each evaluation, and below it one for each dataset where there are several."""
        rows = [
            (name, result)
            for evaluation in self.evaluations
            for name, result in (
                (evaluation.kind, evaluation.result),
                *((f"  {dataset}", part) for dataset, part in evaluation.result.by_dataset.items()),
            )
        ]
        sizes = sorted({size for _, result in rows for size in result.pass_sizes})
        head = ("", "success", "95 % interval", *(f"pass@{k}" for k in sizes))
        lines = table(
            (*head, "return", "tasks", "attempts", "failed"), [row_of(name, result, sizes) for name, result in rows]
        )
        lines += marks_of(self.evaluations)
        if any(evaluation.result.num_failed for evaluation in self.evaluations):
            lines.append(FAILED)
        files = ", ".join(evaluation.path.stem for evaluation in self.evaluations)
        return [self.target.name, *lines, f"every attempt is in {self.folder}/: {files}, as .parquet and .jsonl"]


def marks_of(evaluations: Sequence[Evaluation]) -> list[str]:
    """A line for each mark that the environment leaves: its mean over the attempts that have it."""
    means = {
        evaluation.kind: {
            name.removeprefix(MARK): value
            for name, value in evaluation.result.metrics(evaluation.version).items()
            if name.startswith(MARK)
        }
        for evaluation in evaluations
    }
    return [
        f"{visible(name)}: " + ", ".join(f"{of[name]:.3f} {kind}" for kind, of in means.items() if name in of)
        for name in sorted({name for of in means.values() for name in of})
    ]


def row_of(name: str, result: Result, sizes: Sequence[int]) -> tuple[str, ...]:
    found = result.headline
    return (
        name,
        f"{result.success:.3f}",
        f"{found['success_low']:.3f} to {found['success_high']:.3f}",
        *(f"{found[f'pass@{k}']:.3f}" if k in result.pass_sizes else "" for k in sizes),
        f"{found['return']:.3f}",
        *(f"{count:,}" for count in (len(result.groups), result.num_attempts, result.num_failed)),
    )
