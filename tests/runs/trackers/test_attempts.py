from turnwise.messages import Message, ToolCall
from turnwise.runs.trackers.attempts import COLUMNS, GROUPS, LONGEST, SampledAttempt, cells, cut, rows_of
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn


def turn(text, heard="", calls=()):
    said = Message("assistant", text, calls=calls)
    return Turn([1, 2], [3], [-0.5], [0], StopReason.end_token, 0.0, said, (Message("user", heard),) if heard else ())


def attempt(outcome, *turns, status=Status.finished, failure=""):
    return Trajectory(tuple(turns), status, outcome, failure=failure)


def decode(tokens):
    return f"<{len(tokens)}>"


def test_the_best_and_the_worst_attempt_of_a_group():
    calls = (ToolCall("get", {"name": "amber"}),)
    middle, best = attempt(0.5, turn("b")), attempt(1.0, turn("c", "yes"), turn("d", calls=calls))
    worst = attempt(0.0, status=Status.failed, failure="OSError at open: gone")
    rows = rows_of([Group(Task("t1", "hops"), (middle, best), (worst,))], decode)
    text = '[prompt]\n<2>\n[assistant]\nc\n[user]\nyes\n[assistant]\nd\nget({"name": "amber"})'
    assert rows == [
        SampledAttempt("t1", 1, "finished", 1.0, 2, text),
        SampledAttempt("t1", 2, "failed", 0.0, 0, "[failure]\nOSError at open: gone"),
    ]
    assert cells(rows)[0] == ["t1", 1, "finished", 1.0, 2, text]
    assert COLUMNS == ("task", "attempt", "status", "reward", "turns", "text")


def test_few_groups_and_one_row_of_a_single_attempt():
    groups = [Group(Task("t0", "hops"), ())] + [
        Group(Task(f"t{number}", "hops"), (attempt(1.0, turn("a")),)) for number in range(1, 9)
    ]
    assert [row.task for row in rows_of(groups, decode)] == [f"t{number}" for number in range(1, GROUPS + 1)]


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = "a" * LONGEST + "b" * LONGEST
    short = cut(text)
    assert short.startswith("a" * (LONGEST // 4) + f"\n[... {LONGEST} characters left out ...]\n")
    assert short.endswith("\n" + "b" * (LONGEST - LONGEST // 4))
    assert cut("x" * LONGEST) == "x" * LONGEST


def test_text_that_is_no_unicode_can_be_stored():
    assert cut("a\ud800b") == "a?b"
