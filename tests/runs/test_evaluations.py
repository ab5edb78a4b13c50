import json

import pytest

from support.making import make_turn, make_turns
from turnwise.messages import Message
from turnwise.runs.archive import read_step
from turnwise.runs.evaluations import cut_back, evaluated, prune, write_evaluation
from turnwise.types import Group, Status, Task, Trajectory


def spelled(tokens):
    return " ".join(map(str, tokens))


def some_groups():
    """Attempts of one and of several turns, one that failed half way, one without a turn, and a history cut short."""
    grown = Trajectory(tuple(make_turns([(3, 2), (1, 2), (2, 1)])), Status.finished, 1.0, {"links": 2.0})
    short = Trajectory((make_turn([5], [7], reward=0.25),), Status.too_many_turns, 0.5)
    window = Trajectory((make_turn([1, 2], [3]), make_turn([9, 9], [4])), Status.finished)
    broken = Trajectory((make_turn([5], [7]),), Status.failed)
    nothing = Trajectory((), Status.prompt_too_long)
    return [
        Group(Task("a", "hops", {"links": 2}), (grown, short), (broken,)),
        Group(Task("a", "guess"), (window,), (nothing, nothing)),
    ]


def write(folder, version=10, kind="sampled", groups=(), success_at=1.0):
    return write_evaluation(folder, version, kind, groups, success_at, spelled)


def lines_of(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_the_reader_of_the_archive_reads_an_evaluation(tmp_path):
    path = write(tmp_path, groups=some_groups())
    assert path.name == "step-000010-sampled.parquet"
    for written, read in zip(some_groups(), read_step(path), strict=True):
        assert read.group.task == written.task
        assert dict(read.group.task.data) == dict(written.task.data)
        assert not read.kept
        for old, new in zip(
            (*written.trajectories, *written.failed), (*read.group.trajectories, *read.group.failed), strict=True
        ):
            assert (old.status, old.total, dict(old.marks)) == (new.status, new.total, dict(new.marks))
            assert [t.action.tolist() for t in old.turns] == [t.action.tolist() for t in new.turns]
            assert [t.prompt.tolist() for t in old.turns] == [t.prompt.tolist() for t in new.turns]


def test_every_line_has_all_ids_and_no_two_have_the_same(tmp_path):
    lines = lines_of(write(tmp_path, groups=some_groups()))
    ids = [(line["version"], line["dataset"], line["task"], line["attempt"], line["turn"]) for line in lines]
    wanted = [("hops", 0, 0), ("hops", 0, 1), ("hops", 0, 2), ("hops", 1, 0), ("hops", 2, 0)]
    wanted += [("guess", 0, 0), ("guess", 0, 1), ("guess", 1, None), ("guess", 2, None)]
    assert ids == [(10, dataset, "a", attempt, turn) for dataset, attempt, turn in wanted]
    assert len(set(ids)) == len(ids)
    assert {line["kind"] for line in lines} == {"sampled"}


def test_both_files_number_attempts_and_turns_alike(tmp_path):
    path = write(tmp_path, groups=some_groups())
    found = [
        (record.group.task.dataset, number, place, trajectory.status)
        for record in read_step(path)
        for number, trajectory in enumerate((*record.group.trajectories, *record.group.failed))
        for place in (range(len(trajectory.turns)) or [None])
    ]
    assert found == [(line["dataset"], line["attempt"], line["turn"], line["status"]) for line in lines_of(path)]


def test_lines_say_how_the_attempt_ended_and_what_was_said(tmp_path):
    lines = lines_of(write(tmp_path, groups=some_groups(), success_at=0.75))
    assert [line["success"] for line in lines] == [True, True, True, True, False, False, False, False, False]
    assert lines[3]["total"] == 0.75
    assert lines[3]["reward"] == 0.25
    assert lines[0]["marks"] == {"links": 2.0}
    assert (lines[3]["prompt"], lines[3]["action"], lines[3]["stop"]) == ("5", "7", "end_token")
    assert "prompt" not in lines[7]


def test_texts_in_their_order_are_the_conversation(tmp_path):
    """A history that grew is shown once; one that was rewritten is shown again."""
    (grown, *_), (window, *_) = (group.trajectories for group in some_groups())
    lines = lines_of(write(tmp_path, groups=some_groups()))
    last = grown.turns[-1]
    shown = " ".join(f"{line['prompt']} {line['action']}" for line in lines[:3])
    assert shown == spelled([*last.prompt.tolist(), *last.action.tolist()])
    assert [line["prompt"] for line in lines[5:7]] == [spelled(turn.prompt.tolist()) for turn in window.turns]


def test_what_models_and_environments_say_does_not_break_lines(tmp_path):
    heard = (Message("user", "two\nlines\u2028and \udce4 half a character"),)
    group = Group(Task("a", "hops"), (Trajectory((make_turn([1], [2], heard=heard),), Status.finished),))
    path = write_evaluation(tmp_path, 1, "greedy", [group], 1.0, lambda tokens: 'a "quote"\r\n\x00')
    raw = path.with_suffix(".jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    line = json.loads(raw)
    assert line["heard"] == [heard[0].content]
    assert line["action"] == 'a "quote"\r\n\x00'


def fill(folder, *evaluations):
    for version, kind in evaluations:
        write(folder, version, kind)


def test_what_is_there(tmp_path):
    assert evaluated(tmp_path / "nowhere") == []
    fill(tmp_path, (20, "sampled"), (0, "sampled"), (0, "greedy"), (1_000_000, "sampled"))
    (tmp_path / "eval-001").mkdir()
    (tmp_path / "notes.txt").touch()
    assert evaluated(tmp_path) == [(0, "greedy"), (0, "sampled"), (20, "sampled"), (1_000_000, "sampled")]


def test_cutting_back_removes_later_ones_those_made_again_and_what_is_half_written(tmp_path):
    fill(tmp_path, (0, "greedy"), (5, "sampled"), (10, "sampled"), (15, "sampled"))
    own = tmp_path / "eval-001" / "step-000015-sampled.parquet"
    own.parent.mkdir()
    own.touch()
    (tmp_path / ".step-000005-sampled.jsonl.0011aabb.partial").touch()
    cut_back(tmp_path, 12)
    assert evaluated(tmp_path) == [(0, "greedy"), (5, "sampled"), (10, "sampled")]
    cut_back(tmp_path, 12, again=10)
    assert evaluated(tmp_path) == [(0, "greedy"), (5, "sampled")]
    assert len(list(tmp_path.iterdir())) == 5  # two files each, and the folder of a person's own evaluation
    assert own.exists()
    cut_back(tmp_path, -1)
    assert evaluated(tmp_path) == []
    cut_back(tmp_path / "nowhere", 3)


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(1, None, [9]), (2, 3, [3, 6, 9]), (2, 9, [6, 9]), (9, None, [0, 3, 6, 9])]
)
def test_the_newest_and_the_best_stay(tmp_path, keep, best, left):
    fill(tmp_path, (0, "sampled"), (0, "greedy"), (3, "sampled"), (6, "sampled"), (9, "sampled"), (9, "greedy"))
    prune(tmp_path, keep, best)
    assert sorted({version for version, _ in evaluated(tmp_path)}) == left
    assert ((9, "greedy") in evaluated(tmp_path)) is True


def test_at_least_one_has_to_stay(tmp_path):
    with pytest.raises(ValueError, match="at least 1 evaluation"):
        prune(tmp_path, 0, None)


def test_a_kill_while_writing_leaves_the_old_one_whole(tmp_path, monkeypatch):
    write(tmp_path, groups=some_groups())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, groups=some_groups()[:1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
