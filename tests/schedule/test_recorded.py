"""Recorded groups as a stream draws them."""

from __future__ import annotations

import asyncio

import pytest

from support.acting import group
from support.recorded import attempt, record
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.folder import RunFolder
from turnwise.runs.recorded_archive import RecordedArchive
from turnwise.schedule.recorded import RecordedGroups, in_drawing_order, with_age
from turnwise.schedule.stopping import RunStopped


@pytest.fixture
def source(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    write_step(folder.archive, 1, [record("a", attempt(1.0)), record("b", attempt(0.0)), record("x", kept=False)])
    write_step(folder.archive, 2, [record("c", attempt(1.0))])
    return RecordedArchive.open(folder.path)


def anything(group):
    return None


def test_groups_come_in_the_order_of_the_run_and_then_no_more(source):
    groups = RecordedGroups(source, anything)

    async def work():
        draws = [groups.draw() for _ in range(4)]
        return [(draw.number, (await groups.make_group(draw)).task.id) for draw in draws]

    found = asyncio.run(work())
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert [task for _, task in found][-2:] == ["b", "c"]
    assert {task for _, task in found[:3]} == {"a", "b", "x"}
    assert not groups.drawn
    with pytest.raises(RunStopped, match="all 4 groups"):
        groups.draw()


def test_skipped_groups_are_not_drawn_again(source):
    groups = RecordedGroups(source, anything)
    groups.skip(3)
    assert groups.draw().task.id == "c"
    assert list(groups.drawn) == [3]


@pytest.mark.parametrize("dropped", [0, 1, 2, 5, 9])
def test_the_last_group_of_a_step_is_one_that_trains(dropped):
    records = [record(f"k{n}", attempt(1.0)) for n in range(3)] + [record(f"d{n}", kept=False) for n in range(dropped)]
    order = [one.task.id for one in in_drawing_order(records)]
    assert order[-1] == "k2"
    assert [name for name in order if name[0] == "k"] == ["k0", "k1", "k2"]
    assert [name for name in order if name[0] == "d"] == [f"d{n}" for n in range(dropped)]
    in_a_row = max(map(len, "".join(name[0] for name in order).split("k")))
    assert in_a_row <= -(-dropped // 3)


def test_a_step_without_a_kept_group_has_its_dropped_ones():
    assert [one.task.id for one in in_drawing_order([record("x", kept=False)])] == ["x"]


def test_versions_are_counted_from_the_first_recorded_step():
    old = group(1.0, 0.0, versions=(29, 30))
    young = with_age(old, 30)
    assert [turn.versions.tolist() for turn in young.trajectories[0].turns] == [[-1, 0]]
    assert young.trajectories[0].turns[0].logprobs.tolist() == old.trajectories[0].turns[0].logprobs.tolist()
    assert with_age(old, 0) is old


def test_a_group_that_cannot_be_computed_stops_the_run_with_its_name(source):
    def refuse(group):
        raise ValueError("too long")

    with pytest.raises(RunStopped, match="task a of .* cannot be replayed: too long"):
        RecordedGroups(source, refuse).draw()


def test_a_file_that_breaks_meanwhile_stops_the_run(source):
    groups = RecordedGroups(source, anything)
    groups.skip(3)
    step_path(source.folder.archive, 2).write_bytes(b"PAR1 sha256:" + b"0" * 64)
    with pytest.raises(RunStopped, match="damaged"):
        groups.draw()
