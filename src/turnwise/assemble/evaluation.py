"""From an evaluation target to a model that samples, and to the report of `turnwise eval`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnwise.assemble.attempts import evaluation_attempts
from turnwise.assemble.engines import slot_engine, without_replay
from turnwise.assemble.learner import policy_of
from turnwise.assemble.model import model_and_tokenizer, renderer_of, set_threads
from turnwise.assemble.run import open_environments, opened
from turnwise.assemble.warm_start import starting_model
from turnwise.credit.failure import ON_FAILURE
from turnwise.engines.base import Engine
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.report import EvaluationReport
from turnwise.evaluation.result import Result
from turnwise.evaluation.target import EvaluationTarget
from turnwise.rollout.environments import Environments
from turnwise.rollout.render.renderer import Renderer
from turnwise.runs.screen import Screen
from turnwise.runs.tracker import JsonLines
from turnwise.types import Group, Task


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that samples in this process, with the environments of its recipe."""

    engine: Engine
    renderer: Renderer
    environments: Environments


@asynccontextmanager
async def open_model(target: EvaluationTarget, screen: Screen) -> AsyncIterator[OpenModel]:
    """The model of a target: of its folder, or, where it has none, the one that its recipe would train from."""
    recipe = target.recipe
    set_threads(recipe)
    with open_environments(recipe) as environments:
        if target.model is None:
            model, tokenizer = await starting_model(recipe, environments, screen, {}, asyncio.Event())
        else:
            model, tokenizer = await model_and_tokenizer(recipe, environments, target.model)
        renderer = renderer_of(recipe, model, tokenizer)
        policy_of(recipe, model, replay=False)  # which refuses a model that an engine would not compute exactly
        async with opened(slot_engine(without_replay(recipe), model, renderer, target.version)) as engine:
            yield OpenModel(engine, renderer, environments)


async def evaluate_target(
    target: EvaluationTarget, tasks: Sequence[Task], folder: Path, screen: Screen
) -> EvaluationReport:
    """Attempts at the tasks, sampled and greedily; all of them are left in the folder, and the metrics."""
    recipe = target.recipe
    async with open_model(target, screen) as model:
        evaluator = Evaluator(
            model.engine,
            partial(evaluation_attempts, recipe, model.environments, model.engine, model.renderer),
            folder,
            success_at=recipe.rollout.success_threshold,
            decode=model.renderer.decode,
            stops_when_hopeless=not ON_FAILURE[recipe.rollout.failures.on_failure.name].counts_failures,
        )
        try:
            screen.begin("attempts, sampled and greedy", 2 * len(tasks))
            seen = progress(screen, recipe.rollout.success_threshold)
            evaluations = await evaluator.evaluate_together(target.version, tasks, (False, True), seen=seen)
        finally:
            screen.end()
            model.environments.failures.sum_up("the evaluation")
    metrics = {key: value for evaluation in evaluations for key, value in evaluation.metrics.items()}
    JsonLines(folder / "metrics.jsonl").log(target.version, metrics)
    return EvaluationReport(target, tuple(evaluations), folder)


def progress(screen: Screen, success_at: float) -> Callable[[Group], None]:
    """Shows how many tasks are done, and the success at them so far."""
    tasks = successes = attempts = 0

    def seen(group: Group) -> None:
        nonlocal tasks, successes, attempts
        result = Result((group,), success_at)
        tasks, successes, attempts = tasks + 1, successes + result.num_successes, attempts + result.num_attempts
        screen.show(tasks, {"success": successes / attempts})

    return seen
