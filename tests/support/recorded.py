"""Attempts and groups as an archive records them."""

import numpy as np

from support.making import make_trajectory
from turnwise.runs.archive import Record
from turnwise.types import Group, Status, Task, turns_of


def attempt(outcome, num_turns=2, status=Status.finished):
    return make_trajectory([(3, 2)] * num_turns, outcome=outcome, status=status)


def record(task, *attempts, failed=(), kept=True, dataset="hops"):
    group = Group(Task(task, dataset), attempts, tuple(failed))
    ones = tuple(np.ones(len(turn.action), np.float32) for turn in turns_of([group])) if kept else ()
    return Record(group, kept, ones, ones)
