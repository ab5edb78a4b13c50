"""The order of work in a run, and the conditions under which a run stops by itself."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class ScheduleConfig(Section):
    """How sampling, training and evaluation interleave. Open it when `max_lag` is above 0 and the learner waits for
    slow attempts, when evaluations take long, or when many groups are paid alike."""

    in_short_list = ()

    order: Literal["started", "finished", "due"] = "started"
    """Order in which groups are trained on: started bounds lag by construction; finished favours short attempts and
    enforces the bound by `stale`; due takes them as they finish while none becomes older than max_lag, and bounds lag
    by construction too."""
    mean_lag: float = Field(0.0, ge=0)
    """Lag of an average group with order = "due", which decides how many are in flight; 0 takes half of max_lag."""
    stale: Literal["drop_group", "mask_turn"] = "drop_group"
    """What happens with order = "finished" to samples older than max_lag: drop_group replaces the group, mask_turn
    keeps it and gives stale turns no weight."""
    max_rest: int = Field(0, ge=0)
    """Rounds through the tasks for which a task rests at most: after a group whose attempts were all paid alike it is
    left out of one round, then of 2, 4, ... while that goes on. 0 meets every task in every round. Tasks that are
    sometimes solved then come more often than the others, so training success is no longer that of all tasks."""
    overlap_evaluations: bool = False
    """Whether training goes on during an evaluation, which then has an engine and a copy of the weights; the
    evaluations before and after training never overlap."""
    stall_warning_seconds: float = Field(60.0, gt=0)
    """Seconds without a new group after which a warning names what the run waits for."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.order != "finished" and "stale" in self.changed:
            raise ValueError(f'stale is ignored with order = "{self.order}": nothing is older than max_lag then')
        if self.order != "due" and "mean_lag" in self.changed:
            raise ValueError(f'mean_lag is ignored with order = "{self.order}"; set order = "due", or remove it')
        return self


class GuardsConfig(Section):
    """When a run stops by itself. Open it when a guard has stopped a run that you know to be sound."""

    in_short_list = ()

    max_nonfinite_updates: int = Field(3, ge=1)
    """Updates in a row that may be skipped for a non-finite loss or gradient."""
    max_dropped_groups: int = Field(512, ge=1)
    """Groups in a row that may be dropped."""
    max_logprob_gap: float = Field(0.0, ge=0)
    """Largest mean difference between the engine's logprobs and the learner's, on tokens of the trained version; 0
    takes 1e-3 in float32 and 0.1 in bfloat16."""
