"""When attempts fail one like the other, and nothing but a person can help.

A run stops where the first `ENOUGH` attempts at the tasks of a dataset (or all, where there are fewer) have failed for
one reason: in an evaluation, in the demonstrations of a warm start and, for as many groups in a row as a step has, in
training, where only what raised counts: a service that hangs may be back by the next step. First means begun first:
attempts that fail are often done before those that do not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from turnwise.types import Group, Status, Task, Trajectory

ENOUGH = 16
"""Attempts that fail for one reason before that is taken for all there is. Where half of the attempts fail for it, this
happens once in 65,536 times."""

BROKEN = (Status.failed, Status.timed_out)


class RunStopped(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


def attempts_of(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in (*group.trajectories, *group.failed)]


def one_failure(groups: Sequence[Group], among: Collection[Status] = BROKEN) -> str:
    """How all attempts failed or timed out, where they did for one reason; empty where one did not, or nobody knows
    why. A first prompt that does not fit is no failure: its task may be long, and the limit meant."""
    attempts = attempts_of(groups)
    reasons = {trajectory.reason if trajectory.status in among else "" for trajectory in attempts}
    return attempts[0].failure if len(reasons) == 1 and "" not in reasons else ""


def why_hopeless(count: int, what: str, failure: str) -> str:
    """A line for the person who can help."""
    return f"all of the first {count} attempts {what} failed, for one reason: {failure}; mend that and start again"


class Omen:
    """Sees the groups of an evaluation as they are made, and raises RunStopped where there is no use in the rest.

    Example:
        await evaluate(practice, tasks, success_at, Omen(tasks, attempts=4))
    """

    def __init__(self, tasks: Sequence[Task], attempts: int) -> None:
        wanted = -(-ENOUGH // attempts)
        datasets = dict.fromkeys(task.dataset for task in tasks)
        self.first = {name: [task for task in tasks if task.dataset == name][:wanted] for name in datasets}
        self.made: dict[Task, Group] = {}

    def __call__(self, group: Group) -> None:
        dataset = group.task.dataset
        first = self.first[dataset]
        if group.task in first:
            self.made[group.task] = group
            if all(task in self.made for task in first):
                self.judge(dataset, [self.made[task] for task in first])

    def judge(self, dataset: str, groups: Sequence[Group]) -> None:
        if failure := one_failure(groups):
            raise RunStopped(why_hopeless(len(attempts_of(groups)), f"at held-out tasks of {dataset}", failure))
