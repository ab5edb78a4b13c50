import pytest

from turnwise.inspect.breaks import describe_breaks, find_breaks
from turnwise.messages import Message
from turnwise.runs.archive import Record, write_step
from turnwise.runs.describe import describe
from turnwise.types import Break, Group, Status, StopReason, Task, Trajectory, Turn


def attempt(*turns, status=Status.finished):
    """Turns with the prompts given, each with action [9], that broke for the reasons given."""
    made = [
        Turn(prompt, [9], [-0.5], [0], StopReason.length, 0.0, Message("assistant", "x"), broke=cause)
        for prompt, cause in turns
    ]
    return Trajectory(tuple(made), status)


GREW = attempt(([1], "none"), ([1, 9, 2], "none"))
STRIPPED = attempt(([1, 2, 3], "none"), ([1, 2, 4, 5], "template"), ([1, 2, 4, 5, 9], "none"))
EDITED = attempt(([1, 2], "none"), ([7], "history"), ([7, 8], "template"))
FAILED = attempt(([1], "none"), ([2], "retokenised"), status=Status.failed)


@pytest.fixture
def archive(tmp_path):
    write_step(tmp_path, 3, [Record(Group(Task("a", "hops"), (GREW, STRIPPED), (FAILED,)), False)])
    write_step(tmp_path, 12, [Record(Group(Task("b", "hops"), (EDITED,)), False)])
    return tmp_path


def test_causes_with_counts_and_costs_the_most_expensive_first(archive):
    found = find_breaks(archive)
    assert (found.steps, found.later_turns) == (2, 5)
    assert [(c.cause, c.count, c.lost_tokens) for c in found.causes] == [(Break.template, 2, 3), (Break.history, 1, 3)]
    assert found.causes[0].example.place == "step 3, task a, attempt 1, turn 2"
    assert found.causes[1].example.place == "step 12, task b, attempt 0, turn 2"


def test_the_metrics_of_the_steps_add_up_to_the_same(archive):
    groups = [Group(Task("a", "hops"), (GREW, STRIPPED), (FAILED,)), Group(Task("b", "hops"), (EDITED,))]
    metrics = describe(groups, (), version=0, success_at=1.0)
    found = find_breaks(archive)
    assert metrics["prefix/lost_tokens"] == sum(cause.lost_tokens for cause in found.causes)
    assert metrics["prefix/extended"] == pytest.approx(1 - sum(c.count for c in found.causes) / found.later_turns)
    for cause in found.causes:
        assert metrics[f"prefix/breaks/{cause.cause}"] == cause.count


def test_an_example_shows_both_sides(archive):
    lines = describe_breaks(find_breaks(archive), lambda tokens: "".join(chr(96 + token) for token in tokens))
    assert lines[0] == "5 turns after a first in 2 archived steps; 40.0 % extend the turn before"
    assert [line.split() for line in lines[2:4]] == [["template", "2", "3", "1.5"], ["history", "1", "3", "3.0"]]
    assert lines[4:8] == [
        "template, for instance in step 3, task a, attempt 1, turn 2, from token 2 of 4 on",
        "  after   'ab'",
        "  was     'ci'",
        "  became  'de'",
    ]


def test_without_a_tokenizer_tokens_are_numbers(archive):
    lines = describe_breaks(find_breaks(archive), None)
    assert lines[5:8] == ["  after   1 2", "  was     3 9", "  became  4 5"]
    assert lines[9] == "  after   nothing"


def test_a_run_without_breaks(tmp_path):
    write_step(tmp_path, 1, [Record(Group(Task("a", "hops"), (GREW,)), False)])
    lines = describe_breaks(find_breaks(tmp_path), None)
    assert lines == ["1 turns after a first in 1 archived step, and all extend the turn before"]


def test_an_archive_without_steps_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="has no steps yet"):
        find_breaks(tmp_path / "archive")


def test_tokens_that_say_the_same_are_shown_one_by_one(tmp_path):
    spelled = attempt(([1], "none"), ([1, 5], "retokenised"))
    write_step(tmp_path, 1, [Record(Group(Task("a", "hops"), (spelled,)), False)])
    lines = describe_breaks(find_breaks(tmp_path), lambda tokens: "".join(chr(96 + token) for token in tokens) + "!")
    assert lines[4:] == ["  after   'a!'", "  was     'i!'", "  became  'e!'"]
    assert lines[3].startswith("retokenised, for instance")
