"""Attempts that all fail for the same reason: the run stops, because only a person can fix that.

A run stops if the first `MIN_ATTEMPTS` attempts at the tasks of a dataset (or all of them, if there are fewer) have
failed for one reason. That is checked in an evaluation, in the demonstrations of a warm start and in training. In
training it takes as many groups in a row as a step has, and only attempts that raised count: a service that hangs may
be back by the next step. "First" means started first: attempts that fail often end before those that do not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from turnwise.schedule.stopping import RunStopped
from turnwise.types import Group, Status, Task, Trajectory

MIN_ATTEMPTS = 16
"""Attempts that must fail for one reason before the run stops. If half of all attempts failed for that reason, this
would happen once in 65,536 times."""

BROKEN = (Status.failed, Status.timed_out)


def attempts_of(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in (*group.trajectories, *group.failed)]


def shared_failure(groups: Sequence[Group], among: Collection[Status] = BROKEN) -> str:
    """How all attempts failed or timed out, if they did so for one reason; empty if one did not, or the reason is not
    known. A first prompt that does not fit is no failure: its task may be long, and the limit intended."""
    attempts = attempts_of(groups)
    reasons = {trajectory.reason if trajectory.status in among else "" for trajectory in attempts}
    return attempts[0].failure if len(reasons) == 1 and "" not in reasons else ""


def shared_failure_message(count: int, what: str, failure: str) -> str:
    """One line for the person who can fix it."""
    return f"all of the first {count} attempts {what} failed, for one reason: {failure}; mend that and start again"


class SharedFailureCheck:
    """Gets the groups of an evaluation as they finish, and raises RunStopped if the rest would fail too.

    Example:
        await evaluate(attempt_maker, tasks, success_at, SharedFailureCheck(tasks, attempts=4))
    """

    def __init__(self, tasks: Sequence[Task], attempts: int) -> None:
        num_tasks = -(-MIN_ATTEMPTS // attempts)
        datasets = dict.fromkeys(task.dataset for task in tasks)
        self.first = {name: [task for task in tasks if task.dataset == name][:num_tasks] for name in datasets}
        self.groups: dict[Task, Group] = {}

    def __call__(self, group: Group) -> None:
        dataset = group.task.dataset
        first = self.first[dataset]
        if group.task in first:
            self.groups[group.task] = group
            if all(task in self.groups for task in first):
                self.check(dataset, [self.groups[task] for task in first])

    def check(self, dataset: str, groups: Sequence[Group]) -> None:
        if failure := shared_failure(groups):
            count = len(attempts_of(groups))
            raise RunStopped(shared_failure_message(count, f"at held-out tasks of {dataset}", failure))
