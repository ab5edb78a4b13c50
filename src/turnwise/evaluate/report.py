"""What `turnwise eval` finds out about a model: exams of one version of its weights, left in a folder and described."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.assemble import environments as mixture
from turnwise.assemble import learner as learners
from turnwise.assemble import run as build
from turnwise.cli.terminal import Screen, table
from turnwise.evaluate.evaluator import Exam, Examiner, omen_of
from turnwise.evaluate.result import Result
from turnwise.evaluate.target import Subject
from turnwise.rollout.failures import Failures
from turnwise.runs.tracker import JsonLines
from turnwise.train.warm_start import warm_model
from turnwise.types import Group, Task

FAILED = "attempts that failed have not succeeded, and have no part in the mean return"


@dataclass(frozen=True, slots=True)
class Appraisal:
    """The exams of a subject, sampled and greedy, and the folder that has them."""

    subject: Subject
    exams: tuple[Exam, ...]
    folder: Path

    def describe(self) -> list[str]:
        """Lines for a person: a row for each exam, and below it for each dataset where there are several."""
        rows = [
            (name, result)
            for exam in self.exams
            for name, result in (
                (exam.kind, exam.result),
                *((f"  {dataset}", part) for dataset, part in exam.result.by_dataset.items()),
            )
        ]
        sizes = sorted({size for _, result in rows for size in result.pass_sizes})
        head = ("", "success", "95 % interval", *(f"pass@{k}" for k in sizes))
        lines = table(
            (*head, "return", "tasks", "attempts", "failed"), [row_of(name, result, sizes) for name, result in rows]
        )
        if any(exam.result.num_failed for exam in self.exams):
            lines.append(FAILED)
        files = ", ".join(exam.path.stem for exam in self.exams)
        return [self.subject.name, *lines, f"every attempt is in {self.folder}/: {files}, as .parquet and .jsonl"]


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


async def appraise(subject: Subject, tasks: Sequence[Task], folder: Path, screen: Screen) -> Appraisal:
    """Attempts at the tasks, sampled and greedily; all of them are left in the folder, and the metrics."""
    recipe = subject.recipe
    build.set_threads(recipe)
    if subject.model is None:
        model, tokenizer = await warm_model(recipe, screen, {}, asyncio.Event())
    else:
        try:
            model, tokenizer = await build.model_and_tokenizer(recipe, subject.model)
        except OSError as error:
            raise ValueError(f"cannot load the model in {subject.model}: {str(error).splitlines()[0]}") from None
    renderer = build.renderer_of(recipe, model, tokenizer)
    learners.policy_of(recipe, model)  # which refuses a model that an engine would not compute exactly
    engine = build.slot_engine(recipe, model, renderer, subject.version)
    endpoint = build.endpoint_of(recipe)
    plays = mixture.plays_of(recipe, endpoint)
    failures = Failures()
    examiner = Examiner(recipe, engine, renderer, mixture.batches_of(recipe, failures), folder, plays)
    exams = []
    try:
        for greedy in (False, True):
            screen.begin("greedy" if greedy else "sampled", len(tasks))
            seen = both(progress(screen, recipe.rollout.success_at), omen_of(recipe, tasks, greedy=greedy))
            exams.append(await examiner.exam(subject.version, tasks, greedy=greedy, seen=seen))
    finally:
        screen.end()
        await examiner.close()
        endpoint.close()
        failures.sum_up("the evaluation")
    metrics = {key: value for exam in exams for key, value in exam.metrics.items()}
    JsonLines(folder / "metrics.jsonl").log(subject.version, metrics)
    return Appraisal(subject, tuple(exams), folder)


def both(first: Callable[[Group], None], second: Callable[[Group], None]) -> Callable[[Group], None]:
    def seen(group: Group) -> None:
        first(group)
        second(group)

    return seen


def progress(screen: Screen, success_at: float) -> Callable[[Group], None]:
    """Shows how many tasks are done, and the success at them so far."""
    tasks = successes = attempts = 0

    def seen(group: Group) -> None:
        nonlocal tasks, successes, attempts
        here = Result((group,), success_at)
        tasks, successes, attempts = tasks + 1, successes + here.num_successes, attempts + here.num_attempts
        screen.show(tasks, {"success": successes / attempts})

    return seen
