"""A filter that looked at turns.

Elsewhere groups in which every attempt earned the same were to be left out, since they teach nothing, and the filter
compared the rewards of rows. A row was a turn, so that an attempt paid on its way had rewards of all kinds: groups in
which everything had succeeded were kept, and trained on with advantages of zero.
"""

import pytest

from field_bugs.one_step import parts_of
from support.acting import run
from support.making import make_trajectory
from turnwise.schedule.stream import GroupStream, LagSlots
from turnwise.schedule.take import take
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, Task, turns_of


def group_of(name, *attempts):
    """A group by the rewards of its attempts' turns; the last number is the outcome."""
    made = [make_trajectory([(2, 2)] * (len(paid) - 1), rewards=paid[:-1], outcome=paid[-1]) for paid in attempts]
    return Group(Task(name, "test"), tuple(made))


WORTH = {
    group_of("all succeeded, by different roads", [0.5, 0.0, 0.5], [0.0, 0.25, 0.25, 0.5], [1.0, 0.0]): False,
    group_of("all failed, having tried alike", [0.25, -0.25, 0.0], [0.25, -0.25, 0.0]): False,
    group_of("some succeeded", [0.0, 1.0], [0.0, 0.0]): True,
    group_of("paid alike by the turn, but for longer", [0.25, 0.0], [0.25, 0.25, 0.0]): True,
}


def check_groups_that_teach_are_kept(keep):
    """Of a stream of groups, a step takes those whose attempts differ in their totals."""
    waiting = list(WORTH)

    async def make_group(draw):
        return waiting[draw.number]

    async def taken():
        draws = iter([Draw(number, group.task, 0) for number, group in enumerate(waiting)])
        async with GroupStream(lambda: next(draws), make_group, LagSlots(len(waiting)), sum(WORTH.values())) as stream:
            return await take(stream, sum(WORTH.values()), keep, limit=100)

    found = run(taken())
    useless = [group.task.id for group in found.kept if not WORTH[group]]
    assert not useless, f"kept for nothing: {'; '.join(useless)}"
    assert [group.task.id for group in found.kept] == [group.task.id for group in waiting if WORTH[group]]
    assert [group.task.id for group in found.dropped] == [group.task.id for group in waiting if not WORTH[group]]


def keep_by_turns(group):
    """Whether rewards differ, where every turn is a row and an outcome is paid with an attempt's last."""
    rows = {turn.reward for turn in turns_of([group])}
    rows |= {trajectory.turns[-1].reward + trajectory.outcome for trajectory in group.trajectories}
    return len(rows) > 1


def test_groups_are_kept_for_their_totals():
    keep = parts_of(1, "filter.name=dynamic_sampling").stages.keep
    check_groups_that_teach_are_kept(keep)


def test_a_filter_of_turns_is_caught():
    with pytest.raises(AssertionError, match="kept for nothing: all succeeded"):
        check_groups_that_teach_are_kept(keep_by_turns)


def test_what_it_kept_teaches_nothing():
    parts = parts_of(1)
    for group, worth in WORTH.items():
        credit = parts.stages.estimate([group], {})
        assert any(of_turn.any() for of_turn in credit) == worth
