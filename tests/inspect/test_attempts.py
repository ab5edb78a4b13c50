import pytest

from support.making import make_trajectory
from support.recorded import attempt, record
from turnwise.inspect.attempts import TRAINING, AttemptKey, Attempts, Query
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.types import Status, Trajectory


@pytest.fixture
def folder(tmp_path):
    """Two steps and an evaluation."""
    folder = RunFolder(tmp_path)
    lost = Trajectory((), Status.failed, failure="RuntimeError in step: gone")
    write_step(
        folder.archive, 1, [record("a", attempt(0.0), attempt(1.0, 3)), record("b", attempt(0.5), failed=[lost])]
    )
    write_step(folder.archive, 2, [record("c", attempt(2.0), kept=False, dataset="sql"), record("d", kept=False)])
    write_evaluation(folder.evaluations, 2, "greedy", [record("e", attempt(0.25), kept=False).group], 1.0, str)
    return folder


def keys(page):
    return [str(row.key) for row in page.rows]


def test_a_table_has_every_attempt_with_what_it_was_paid(folder):
    attempts = Attempts(folder)
    assert attempts.refresh()
    page = attempts.select(Query(kind=TRAINING, order="step", descending=False))
    assert page.total == len(page.rows) == 5  # a group without attempts has none
    first = {str(row.key): row for row in page.rows}["train/1/0/1"]
    assert (first.task, first.dataset, first.status, first.reward, first.trained) == (
        "a",
        "hops",
        "finished",
        1.0,
        True,
    )
    assert (first.turns, first.action_tokens, first.context_tokens, first.breaks) == (3, 6, 15, 0)
    gone = {str(row.key): row for row in page.rows}["train/1/1/1"]
    assert (gone.turns, gone.context_tokens, gone.failure) == (0, 0, "RuntimeError in step: gone")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            Query(order="reward"),
            ["train/2/0/0", "train/1/0/1", "train/1/1/0", "greedy/2/0/0", "train/1/0/0", "train/1/1/1"],
        ),
        (
            Query(order="turns", kind="train", last_step=1, trained=True, statuses=("finished",)),
            ["train/1/0/1", "train/1/0/0", "train/1/1/0"],
        ),
        (Query(statuses=("failed",)), ["train/1/1/1"]),
        (Query(dataset="sql"), ["train/2/0/0"]),
        (Query(task="a"), ["train/1/0/0", "train/1/0/1"]),
        (Query(min_reward=0.2, max_reward=0.6, order="reward", descending=False), ["greedy/2/0/0", "train/1/1/0"]),
        (Query(kind="greedy"), ["greedy/2/0/0"]),
        (Query(first_step=2, kind="train"), ["train/2/0/0"]),
        (Query(task="nobody"), []),
    ],
)
def test_queries(folder, query, expected):
    attempts = Attempts(folder)
    attempts.refresh()
    page = attempts.select(query)
    assert keys(page) == expected
    assert page.total == len(expected)
    assert [key for place in range(0, 8, 2) for key in keys(attempts.select(query, place, 2))] == expected


def test_groups_and_counts(folder):
    attempts = Attempts(folder)
    attempts.refresh()
    total, groups = attempts.groups(Query(kind="train", order="reward"))
    assert total == 3
    assert [(group["task"], group["attempt_count"], group["reward_mean"]) for group in groups] == [
        ("c", 1, 2.0),
        ("a", 2, 0.5),
        ("b", 2, 0.25),
    ]
    assert attempts.counts(Query(first_step=2)) == {
        "kind": {"train": 1, "greedy": 1},
        "status": {"finished": 2},
        "dataset": {"sql": 1, "hops": 1},
    }


def test_a_run_that_goes_on_is_followed(folder):
    attempts = Attempts(folder)
    attempts.refresh()
    assert not attempts.refresh()
    write_step(folder.archive, 3, [record("f", attempt(1.0))])
    step_path(folder.archive, 1).unlink()
    assert attempts.refresh()
    assert keys(attempts.select(Query(kind="train"))) == ["train/3/0/0", "train/2/0/0"]


def test_a_damaged_file_is_named_and_the_others_are_shown(folder):
    path = step_path(folder.archive, 2)
    data = path.read_bytes()
    for spoilt in (b"", b"PAR1", data[:-100], data[: len(data) // 2] + data[-20:]):
        path.write_bytes(spoilt)
        attempts = Attempts(folder)
        attempts.refresh()
        assert str(path) in attempts.unreadable[path]
        assert attempts.select(Query(kind="train")).total == 4
    path.write_bytes(data)
    attempts.refresh()
    assert attempts.unreadable == {}
    assert attempts.select(Query(kind="train")).total == 5


def test_text_that_has_no_utf8_is_shown(tmp_path):
    folder = RunFolder(tmp_path)
    lost = Trajectory((), Status.failed, failure="\ud800 gone")
    write_step(folder.archive, 1, [record("t\udcff", attempt(1.0), failed=[lost])])
    attempts = Attempts(folder)
    attempts.refresh()
    rows = attempts.select(Query()).rows
    assert [(row.task, row.failure) for row in rows] == [("t?", ""), ("t?", "? gone")]


def test_an_empty_run_has_no_attempts(tmp_path):
    attempts = Attempts(RunFolder(tmp_path))
    attempts.refresh()
    assert attempts.select(Query()).total == len(attempts) == 0
    assert attempts.groups(Query()) == (0, [])
    assert attempts.counts(Query()) == {"kind": {}, "status": {}, "dataset": {}}


def test_rewards_of_one_attempt_do_not_blur_those_of_another(tmp_path):
    folder = RunFolder(tmp_path)
    paid = [1e16, *[0.1] * 10]
    write_step(folder.archive, 1, [record("a", *(make_trajectory([(2, 1)], rewards=[one]) for one in paid))])
    attempts = Attempts(folder)
    attempts.refresh()
    assert sorted(row.reward for row in attempts.select(Query()).rows) == sorted(paid)


def test_keys_are_read_back_and_others_refused():
    key = AttemptKey("sampled", 10, 2, 3)
    assert AttemptKey.parse(str(key)) == key
    for text in ("", "train/1/2", "train/1/2/-3", "train/1/2/x", "../../../etc/passwd", "train/١/2/3"):
        with pytest.raises(ValueError, match="names no attempt"):
            AttemptKey.parse(text)
    with pytest.raises(ValueError, match="sorted by"):
        Query(order="size")


def test_many_files_are_read_in_parts_the_newest_first(folder):
    attempts = Attempts(folder)
    assert attempts.refresh(limit=2)
    assert keys(attempts.select(Query())) == ["greedy/2/0/0", "train/2/0/0"]
    assert attempts.num_waiting == 1
    assert attempts.refresh(limit=2)
    assert attempts.num_waiting == 0
    assert attempts.select(Query()).total == 6
    assert not attempts.refresh(limit=2)


def test_attempts_are_chosen_by_turns_and_sampled_tokens(folder):
    attempts = Attempts(folder)
    attempts.refresh()
    assert keys(attempts.select(Query(min_turns=3))) == ["train/1/0/1"]
    assert keys(attempts.select(Query(max_turns=0))) == ["train/1/1/1"]
    assert keys(attempts.select(Query(min_tokens=5, max_tokens=6))) == ["train/1/0/1"]
