"""`turnwise.Learner`: the prefix-tree learner by itself, for a loop of one's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.api.model_source import GivenModel, opened_model, settings_for
from turnwise.api.recipe_tree import RecipeTree
from turnwise.assemble import objective
from turnwise.assemble.learner import layout_of, rl_learner, tokens_per_pass
from turnwise.assemble.model import check_turns
from turnwise.assemble.run import settings_of, stages_of
from turnwise.atomic import atomic_folder
from turnwise.credit.returns import Credit
from turnwise.engines.base import vocabulary_of
from turnwise.learn.losses import LossFunction
from turnwise.pretrained import ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.take import Taken
from turnwise.schedule.tasks import Draw
from turnwise.schedule.workers import inline
from turnwise.training.loop import Settings, Stages, train_step
from turnwise.types import Group, turns_of

ESTIMATE = Callable[[Sequence[Group], Mapping[str, Any]], Credit]
GivenCredit = str | Mapping[str, Any] | Sequence[NDArray[Any]] | ESTIMATE
"""An estimator by name, one with settings, advantages (one array per turn, one number per action token), or a function
of groups and scores that returns them."""
GivenLoss = str | Mapping[str, Any] | LossFunction
"""A loss by name, one with settings, or a function (logprobs, old, advantages) -> (terms, measurements)."""
STATE = "learner.json"


class OwnLearner:
    """A model with its optimizer. An update is what a step of `train` does, by the same functions: shared prefixes are
    computed once, credit and token weights come from groups, and the loss is a plain weighted sum.

    The keywords are the keys of a recipe: credit, loss, weighting, kl, optimizer, lora, layout, and so on. A model that
    is given as an object is trained in place.

    Example:
        learner = Learner("tiny", credit={"name": "rloo"}, optimizer={"learning_rate": 1e-3})
        metrics = learner.update(groups)
    """

    def __init__(
        self,
        model: GivenModel,
        tokenizer: ChatTokenizer | None = None,
        /,
        *,
        recipe: RecipeTree | None = None,
        **keys: Any,
    ) -> None:
        given = settings_for(recipe, keys, None)
        self.model, self.tokenizer = opened_model(model, tokenizer, given)
        self.recipe = settings_for(recipe, keys, self.model)
        objective.check(self.recipe)
        if self.tokenizer is None and ({self.recipe.kl.reference, self.recipe.teacher} - {"start", ""}):
            raise ValueError("a reference or a teacher must have the policy's tokens; give Learner the tokenizer too")
        self.learner = rl_learner(self.recipe, self.model, self.tokenizer)  # type: ignore[arg-type]
        self.version = 0
        """Updates so far: the version of the weights."""
        self.lay_out = layout_of(self.recipe, self.model)

    def score(self, groups: Sequence[Group], name: str = "old") -> list[NDArray[Any]]:
        """Scores of every action token, one array per turn in the order of groups, trajectories and turns: logprobs of
        the current weights ("old"), of the reference or the teacher, or the critic's values."""
        groups = self.checked(groups)
        if name not in self.learner.models:
            known = ", ".join(sorted(self.learner.models))
            raise ValueError(f"this learner has no scores {name}; it has {known}")
        turns = list(turns_of(groups))
        return self.learner.score(self.plan(turns), len(turns), name)

    def update(
        self, groups: Sequence[Group], *, credit: GivenCredit | None = None, loss: GivenLoss | None = None
    ) -> dict[str, float]:
        """Train on groups: their metrics. That is one optimizer step, or those of `groups_per_update` and `epochs`.

        Attempts in `Group.failed` are not trained on. An engine samples with these weights after `engine.load`.
        """
        groups = self.checked(groups)
        if not groups:
            raise ValueError("there is nothing to train on; give at least one group")
        recipe = changed(self.recipe, credit, loss)
        if missing := objective.needs(recipe) - self.learner.models.keys():
            raise ValueError(
                f"credit {recipe.credit.name} needs {', '.join(sorted(missing))}, which this learner has not; give "
                "credit when you make the Learner"
            )
        stages = self.stages(recipe, groups, credit, loss)
        settings = self.loop_settings(recipe, groups)
        try:
            metrics, _ = train_step(settings, stages, self.learner, Taken(groups, ()), self.version)
        except RunStopped as error:
            raise ValueError(str(error)) from None
        self.version += 1
        return metrics

    def weights(self) -> Mapping[str, Any]:
        """The current weights by name, with merged adapters; valid until the next update."""
        return self.learner.publish()

    def save(self, folder: str | Path) -> Path:
        """Write weights, tokenizer and the state of the optimizer to a new folder, which transformers can load too."""
        path, tokenizer = Path(folder), self.tokenizer
        if tokenizer is None:
            raise ValueError("a saved model needs its tokenizer; give Learner the tokenizer too")
        if self.recipe.lora.rank:
            raise ValueError("adapters are saved beside the model they are for, by a run; save merged weights instead")
        if path.exists():
            raise ValueError(f"{path} exists already; choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(path) as aside:
            self.learner.save(aside, tokenizer)
            (aside / STATE).write_text(json.dumps({"version": self.version}) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path, /, *, recipe: RecipeTree | None = None, **keys: Any) -> OwnLearner:
        """What `save` wrote, to go on with: settings are given again."""
        try:
            version = int(json.loads((Path(folder) / STATE).read_text())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(
                f"{folder} is no folder that Learner.save wrote; for a model use Learner(folder)"
            ) from None
        learner = cls(folder, recipe=recipe, **keys)
        learner.learner.restore(Path(folder))
        learner.version = version
        return learner

    # ------------------------------------------------------------ its parts

    def plan(self, turns: Sequence[Any]) -> list[Any]:
        return self.lay_out(turns, tokens_per_pass(self.recipe))

    def checked(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups, once it is known that the model can compute them."""
        if isinstance(groups, Group) or not all(isinstance(group, Group) for group in groups):
            raise ValueError("groups are a sequence of Group values")
        check_turns(self.recipe, vocabulary_of(self.model), list(turns_of(groups)))
        return tuple(groups)

    def stages(
        self, recipe: Recipe, groups: Sequence[Group], credit: GivenCredit | None, loss: GivenLoss | None
    ) -> Stages:
        stages = stages_of(recipe, no_sampling, self.plan, inline)
        if stages.objective is not None and callable(loss):
            stages = replace(stages, objective=replace(stages.objective, policy=loss))
        if credit is None or isinstance(credit, (str, Mapping)):
            return stages
        given: ESTIMATE = credit if callable(credit) else lambda groups, scores: list(credit)
        return replace(stages, estimate=lambda groups, scores: checked_credit(groups, given(groups, scores)))

    def loop_settings(self, recipe: Recipe, groups: Sequence[Group]) -> Settings:
        settings = settings_of(recipe)
        if settings.anchor == "engine" and any(np.isnan(turn.logprobs).any() for turn in turns_of(groups)):
            raise ValueError(
                'a turn has logprobs that nobody knows, and loss.anchor = "engine" compares with them; give '
                'loss={"name": ..., "anchor": "learner"}, or logprobs from score'
            )
        return replace(settings, groups_per_update=recipe.groups_per_update or len(groups))


def changed(recipe: Recipe, credit: GivenCredit | None, loss: GivenLoss | None) -> Recipe:
    """The recipe with another estimator or loss, checked."""
    given = {"credit": credit, "loss": loss}
    named = {key: Choice(name=value) for key, value in given.items() if isinstance(value, str)}
    named |= {key: Choice(**value) for key, value in given.items() if isinstance(value, Mapping)}
    if not named:
        return recipe
    recipe = recipe.model_copy(update=named)
    objective.check(recipe)
    return recipe


def checked_credit(groups: Sequence[Group], credit: Sequence[Any]) -> Credit:
    """Advantages that somebody gave, once there is one finite number per action token."""
    turns = list(turns_of(groups))
    if len(credit) != len(turns):
        raise ValueError(f"credit has one array per turn: there are {len(turns)} turns and {len(credit)} arrays")
    arrays = [np.asarray(values, np.float64) for values in credit]
    for place, (turn, values) in enumerate(zip(turns, arrays, strict=True)):
        if values.shape != turn.action.shape or not math.isfinite(float(np.abs(values).sum())):
            raise ValueError(
                f"credit of turn {place} has one finite number per action token: {len(turn.action)}, got an array of "
                f"shape {values.shape}"
            )
    return arrays


async def no_sampling(draw: Draw) -> Group:
    raise AssertionError("a learner by itself samples nothing")
