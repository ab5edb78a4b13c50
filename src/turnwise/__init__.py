"""turnwise: reinforcement learning for language-model agents, one turn at a time.

The Python interface. Each name is imported when it is first asked for, so that `import turnwise` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from turnwise.api.callbacks import STOP
    from turnwise.api.evaluate import evaluate, evaluate_async
    from turnwise.api.model_source import tiny_model
    from turnwise.api.own_engine import OwnEngine as Engine
    from turnwise.api.own_learner import OwnLearner as Learner
    from turnwise.api.recipe_tree import RecipeTree as Recipe
    from turnwise.api.run_record import RunRecord, load_run
    from turnwise.api.train import train, train_async
    from turnwise.engines.base import Completion, Sampling
    from turnwise.envs.base import Environment, Reply
    from turnwise.envs.split import draw_tasks
    from turnwise.evaluation.evaluator import Evaluation
    from turnwise.evaluation.report import EvaluationReport
    from turnwise.messages import Message, ToolCall, ToolSpec
    from turnwise.rollout.render.renderer import Renderer
    from turnwise.runs.archive import Record
    from turnwise.runs.checkpoint import Checkpoint
    from turnwise.schedule.stopping import RunStopped
    from turnwise.training.moments import StepDone
    from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn

__all__ = [
    "STOP",
    "Checkpoint",
    "Completion",
    "Engine",
    "Environment",
    "Evaluation",
    "EvaluationReport",
    "Group",
    "Learner",
    "Message",
    "Recipe",
    "Record",
    "Renderer",
    "Reply",
    "RunRecord",
    "RunStopped",
    "Sampling",
    "Status",
    "StepDone",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "Turn",
    "__version__",
    "draw_tasks",
    "evaluate",
    "evaluate_async",
    "load_run",
    "tiny_model",
    "train",
    "train_async",
]

HOMES = {
    "api.callbacks": "STOP",
    "api.evaluate": "evaluate evaluate_async",
    "api.model_source": "tiny_model",
    "api.own_engine": "OwnEngine",
    "api.own_learner": "OwnLearner",
    "api.recipe_tree": "RecipeTree",
    "api.run_record": "RunRecord load_run",
    "api.train": "train train_async",
    "engines.base": "Completion Sampling",
    "envs.base": "Environment Reply",
    "envs.split": "draw_tasks",
    "evaluation.evaluator": "Evaluation",
    "evaluation.report": "EvaluationReport",
    "messages": "Message ToolCall ToolSpec",
    "rollout.render.renderer": "Renderer",
    "runs.archive": "Record",
    "runs.checkpoint": "Checkpoint",
    "schedule.stopping": "RunStopped",
    "training.moments": "StepDone",
    "types": "Group Status StopReason Task Trajectory Turn",
}
"""By module: the names that are found there."""
CALLED = {"OwnEngine": "Engine", "OwnLearner": "Learner", "RecipeTree": "Recipe"}
"""Classes that are called otherwise in public: those they are made of have the short name inside."""
PLACES = {CALLED.get(name, name): (module, name) for module, names in HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    from importlib import import_module

    module, inside = PLACES[name]
    found = globals()[name] = getattr(import_module(f"turnwise.{module}"), inside)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
