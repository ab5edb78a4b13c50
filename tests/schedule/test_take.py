import asyncio
import logging

import pytest

from support.acting import group, run, trajectory
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.stream import GroupStream, LagSlots
from turnwise.schedule.take import Taken, take, why_dropped
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, Status, Task


class Source:
    """Draws whose groups are paid what a list says; 0 and 1 for the rest."""

    def __init__(self, *outcomes, slots=2, wanted=1000):
        self.outcomes = outcomes
        self.started = 0
        self.slots, self.wanted = slots, wanted

    def draw(self):
        self.started += 1
        return Draw(self.started - 1, Task(f"t-{self.started - 1}", "hops"), 0)

    async def make_group(self, draw):
        await asyncio.sleep(0)
        paid = self.outcomes[draw.number] if draw.number < len(self.outcomes) else (0.0, 1.0)
        return paid(draw.task) if callable(paid) else group(*paid, task=draw.task)

    def taken(self, *counts, limit=100):
        async def scene():
            slots = LagSlots(self.slots)
            async with GroupStream(self.draw, self.make_group, slots, self.wanted) as stream:
                result = []
                for number in counts:
                    result.append(
                        await take(stream, number, lambda made: len({t.total for t in made.trajectories}) > 1, limit)
                    )
                    slots.release(len(result[-1].kept))
                return result

        return run(scene(), seconds=5)


def names(groups):
    return [made.task.id for made in groups]


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_groups_are_taken_in_order_and_dropped_ones_replaced():
    (first, second) = Source(MIXED, SAME, SAME, MIXED, SAME, MIXED, MIXED).taken(2, 2)
    assert names(first.kept) == ["t-0", "t-3"]
    assert names(first.dropped) == ["t-1", "t-2"]
    assert first.count == 4
    assert names(second.kept) == ["t-5", "t-6"]
    assert names(second.dropped) == ["t-4"]
    assert second.count == 3


def test_nothing_dropped():
    (taken,) = Source().taken(2)
    assert taken == Taken(taken.kept, ())
    assert taken.count == 2


def test_a_dropped_group_frees_its_slot_so_that_one_slot_is_enough():
    source = Source(*[SAME] * 30, slots=1, wanted=1)
    (taken,) = source.taken(1)
    assert names(taken.kept) == ["t-30"]
    assert len(taken.dropped) == 30
    assert source.started == 31


def test_too_many_dropped_in_a_row_stop_the_run_with_a_reason():
    with pytest.raises(RunStopped) as raised:
        Source(*[SAME] * 50).taken(1, limit=8)
    said = str(raised.value)
    assert said.startswith("8 groups in a row were dropped")
    assert "task t-7" in said
    assert "paid 1" in said
    assert "\n" not in said


def test_only_drops_in_a_row_count():
    outcomes = [SAME, SAME, SAME, MIXED] * 5
    taken = Source(*outcomes, slots=5).taken(5, limit=4)[0]
    assert len(taken.kept) == 5
    assert len(taken.dropped) == 15
    with pytest.raises(RunStopped):
        Source(*outcomes, slots=5).taken(5, limit=3)


def test_a_warning_comes_before_the_stop(caplog):
    with caplog.at_level(logging.WARNING, "turnwise"):
        Source(*[SAME] * 6).taken(1, limit=20)
    (record,) = caplog.records
    assert record.getMessage().startswith("5 groups in a row were dropped")
    assert "task t-4" in record.getMessage()


def test_why_a_group_was_dropped():
    task = Task("t-1", "hops")
    failed = (trajectory(status=Status.failed), trajectory(status=Status.timed_out), trajectory(status=Status.failed))
    reason = why_dropped(Group(task, (trajectory(),), failed))
    assert "task t-1 had 1 attempts that count and 3 that ended as failed, timed_out" in reason
    assert "events.log" in reason
    for dropped, paid in ((group(0.5, 0.5, task=task), "paid 0.5"), (Group(task, ()), "paid nothing")):
        assert "task t-1" in why_dropped(dropped)
        assert paid in why_dropped(dropped)


def test_a_run_whose_environment_is_down_stops_and_says_so():
    def down(task):
        return Group(task, (), (trajectory(status=Status.failed),) * 2)

    with pytest.raises(RunStopped, match=r"12 groups in a row.*0 attempts that count and 2 that ended as failed"):
        Source(*[down] * 50).taken(1, limit=12)
