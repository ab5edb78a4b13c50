import pytest

from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.rescore_report import RescoredAttempt, RescoreReport
from turnwise.types import Status


def attempt(number, before, after, *, was=Status.finished, status=Status.finished, difference="", failure=""):
    key = AttemptKey("train", 1, 0, number)
    return RescoredAttempt(key, f"task-{number}", before, after, was, status, difference, failure)


def report(*attempts, **fields):
    return RescoreReport("title", attempts, 1.0, **fields)


def test_means_successes_and_the_correlation_are_over_attempts_that_count_twice():
    found = report(
        attempt(0, 1.0, 1.0),
        attempt(1, 1.0, 0.0),
        attempt(2, 0.0, 1.0),
        attempt(3, 0.0, 0.5),
        attempt(4, 9.0, 0.0, status=Status.failed, failure="RuntimeError: gone\x1b[2J"),
        attempt(5, 0.0, 9.0, was=Status.failed),
    )
    lines = found.describe()
    assert lines[:3] == [
        "title",
        "1 attempts have no reward now, of which 1 had one",
        "  1 x failed: RuntimeError: gone␛[2J",
    ]
    rows = {line.strip().partition("  ")[0]: line.strip().partition("  ")[2].split() for line in lines}
    assert rows["mean reward"] == ["0.5000", "0.6250"]
    assert rows["success (reward of 1)"] == ["0.5000", "0.5000"]
    assert rows["succeeded before"] == ["1", "of", "2"]
    assert rows["did not"] == ["1", "of", "2"]
    assert "3 rewards changed; correlation of before and after -0.3015" in lines


def test_the_largest_changes_come_first_with_their_keys():
    lines = report(*(attempt(n, 0.0, n / 10 * (-1) ** n) for n in range(15))).describe()
    rows = [line.split()[:5] for line in lines if line.startswith("train/")]
    assert len(rows) == 10
    assert rows[0] == ["train/1/0/14", "task-14", "0", "1.4", "+1.4"]
    assert rows[1] == ["train/1/0/13", "task-13", "0", "-1.3", "-1.3"]


def test_conversations_that_would_have_differed_are_counted_with_the_reasons():
    lines = report(
        attempt(0, 0.0, 1.0, difference="turn 1 was answered otherwise"),
        attempt(1, 0.0, 0.0, difference="turn 1 was answered otherwise"),
        attempt(2, 0.0, 1.0),
    ).describe()
    place = next(n for n, line in enumerate(lines) if "would have differed" in line)
    assert lines[place].startswith("in 2 of 3 attempts")
    assert lines[place + 1] == "  2 x turn 1 was answered otherwise"


def test_a_constant_has_no_correlation_and_no_changes_no_table():
    lines = report(attempt(0, 1.0, 1.0), attempt(1, 1.0, 1.0), notes=("left out",)).describe()
    assert lines[1] == "left out"
    assert "0 rewards changed; correlation of before and after unknown" in lines[-1]


@pytest.mark.parametrize("status", [Status.failed, Status.timed_out])
def test_a_report_without_rewards_says_so(status):
    assert report(attempt(0, 1.0, 0.0, status=status)).describe()[-1] == "no attempt has a reward before and after"
