import pytest

from support.making import make_turn
from turnwise.messages import Message
from turnwise.runs.before_after import LONGEST, WIDTH, before_and_after
from turnwise.runs.evaluations import write_evaluation
from turnwise.types import Group, Status, Task, Trajectory


def attempt(outcome, *said, question="start amber, links 2", heard="leads to cedar"):
    turns = tuple(
        make_turn([1, 2], [3], said=Message("assistant", text), heard=(Message("user", heard),)) for text in said
    )
    opening = (Message("system", "Follow the links."), Message("user", question))
    return Trajectory(turns, Status.finished, outcome, opening=opening)


def write(folder, version, **attempts):
    groups = [Group(Task(name, "hops"), (made,)) for name, made in attempts.items()]
    write_evaluation(folder, version, "greedy", groups, 1.0, str)


def test_a_task_that_was_learned_is_shown_side_by_side(tmp_path):
    write(tmp_path, 0, easy=attempt(1.0, "answer x"), hard=attempt(0.0, "get amber", "answer cedar"))
    write(tmp_path, 9, easy=attempt(1.0, "answer x"), hard=attempt(1.0, "get amber", "get cedar", "answer jade"))
    head, *rows = before_and_after(tmp_path, 9, 1.0)
    lines = [(line[2 : WIDTH + 2].rstrip(), line[WIDTH + 4 :]) for line in rows]
    assert head == "one held-out task, hard"
    assert lines == [
        ("before training, greedy", "after step 9, greedy"),
        ("", ""),
        ("  start amber, links 2", "  start amber, links 2"),
        ("> get amber", "> get amber"),
        ("  leads to cedar", "  leads to cedar"),
        ("> answer cedar", "> get cedar"),
        ("  leads to cedar", "  leads to cedar"),
        ("not solved", "> answer jade"),
        ("", "  leads to cedar"),
        ("", "solved"),
    ]


def test_where_nothing_was_learned_the_first_task_is_shown(tmp_path):
    for version in (0, 9):
        write(tmp_path, version, a=attempt(0.0, "x"), b=attempt(0.0, "y"))
    assert before_and_after(tmp_path, 9, 1.0)[0] == "one held-out task, a"


def test_without_both_evaluations_nothing_is_shown(tmp_path):
    assert before_and_after(tmp_path / "nowhere", 9, 1.0) == []
    write(tmp_path, 0, a=attempt(0.0, "x"))
    assert before_and_after(tmp_path, 9, 1.0) == before_and_after(tmp_path, 0, 1.0) == []


def test_without_a_common_task_nothing_is_shown(tmp_path):
    write(tmp_path, 0, a=attempt(0.0, "x"))
    write(tmp_path, 9, b=attempt(1.0, "x"))
    assert before_and_after(tmp_path, 9, 1.0) == []


@pytest.mark.parametrize("said", ["word " * 40, "a\nb\n" * 40, "\x1b[31mred", ""])
def test_whatever_was_said_stays_in_its_column(tmp_path, said):
    for version in (0, 9):
        write(tmp_path, version, a=attempt(0.0, *([said] * 30)))
    lines = before_and_after(tmp_path, 9, 1.0)
    assert len(lines) == LONGEST + 4
    assert all(len(line) <= 2 * WIDTH + 4 and "\x1b" not in line for line in lines)
