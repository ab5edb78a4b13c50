"""What happens to the records of a run that goes on from a checkpoint."""

import json
import shutil

import pytest

from turnwise.runs import archive, tracker
from turnwise.runs.checkpoint import checkpoint_path, latest_checkpoint, write_checkpoint
from turnwise.runs.checksums import Damaged
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.runs.setback import cut_back
from turnwise.runs.tracker import JsonLines

EVERY = 2


@pytest.fixture
def folder(tmp_path):
    """A run that was killed after step 5; every second step has a checkpoint."""
    folder = RunFolder.create(tmp_path / "run", {})
    for step in range(6):
        JsonLines(folder.metrics).log(step, {"loss": step / 10})
        if step:
            archive.write_step(folder.archive, step, [])
        write_evaluation(folder.evaluations, step, "sampled", [], 1.0, str)
        if step % EVERY == 0:
            state = {"metrics": tracker.seal(folder.metrics)}
            write_checkpoint(folder.checkpoints, step, state, lambda path: (path / "weights").write_text("x"))
    folder.summary.write_text("{}")
    return folder


def steps(path, kind="metrics"):
    if kind == "metrics":
        return [line["step"] for line in tracker.read_metrics(path)]
    return archive.archived_steps(path)


def files(folder):
    return {
        str(path.relative_to(folder.path)): path.read_bytes()
        for path in folder.path.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts
    }


def go_back(folder):
    checkpoint = latest_checkpoint(folder.checkpoints)
    cut_back(folder, checkpoint, EVERY)
    return checkpoint.step


def test_after_a_kill_what_is_made_again_is_removed(folder):
    assert go_back(folder) == 4
    assert steps(folder.metrics) == [0, 1, 2, 3, 4]
    assert steps(folder.archive, "archive") == [1, 2, 3, 4]
    assert not folder.set_back.exists()
    assert folder.summary.exists()


def lose_pointer(folder):
    (folder.checkpoints / "latest").unlink()
    shutil.rmtree(checkpoint_path(folder.checkpoints, 4))


def damage_latest(folder):
    (checkpoint_path(folder.checkpoints, 4) / "weights").write_text("y")


def point_back(folder):
    (folder.checkpoints / "latest").write_text("step-000002\n")


def point_back_and_remove(folder):
    point_back(folder)
    shutil.rmtree(checkpoint_path(folder.checkpoints, 4))


@pytest.mark.parametrize("lose", [lose_pointer, damage_latest, point_back, point_back_and_remove])
def test_where_a_later_checkpoint_was_written_nothing_is_lost(folder, lose, caplog):
    before = files(folder)
    lose(folder)
    assert go_back(folder) == 2
    assert steps(folder.metrics) == [0, 1, 2]
    assert steps(folder.archive, "archive") == [1, 2]
    (aside,) = folder.set_back.iterdir()
    assert aside.name.endswith("-to-step-000002")
    assert steps(aside / "metrics.jsonl") == [3, 4, 5]
    assert steps(aside / "archive", "archive") == [3, 4, 5]
    after = files(folder)
    inside = f"set-back/{aside.name}/"
    for name, content in before.items():
        if name != "metrics.jsonl":
            assert after.get(name, after.get(inside + name)) == content
    assert after["metrics.jsonl"] + after[inside + "metrics.jsonl"] == before["metrics.jsonl"]
    assert inside + "summary.json" in after
    assert caplog.messages[-1] == f"what came after step 2 is in {aside} now"
    go_back(folder)
    assert list(folder.set_back.iterdir()) == [aside]


def test_going_back_twice_leaves_two_folders(folder):
    point_back(folder)
    go_back(folder)
    for step in (3, 4):
        JsonLines(folder.metrics).log(step, {"loss": 0.0})
    go_back(folder)
    assert len(list(folder.set_back.iterdir())) == 2


def test_a_run_that_lost_all_its_checkpoints_does_not_begin_again(folder):
    shutil.rmtree(folder.checkpoints)
    before = files(folder)
    with pytest.raises(ValueError, match=r"has records up to step 5 and no checkpoint; put one back") as error:
        cut_back(folder, None, EVERY)
    assert "\n" not in str(error.value)
    assert files(folder) == before


def test_a_run_that_never_came_to_a_checkpoint_begins_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    JsonLines(folder.metrics).log(0, {"eval": 1.0})
    write_evaluation(folder.evaluations, 0, "sampled", [], 1.0, str)
    cut_back(folder, None, EVERY)
    assert steps(folder.metrics) == []
    assert list(folder.evaluations.iterdir()) == []


def test_metrics_that_were_changed_are_named_and_left(folder):
    lines = folder.metrics.read_text().splitlines()
    lines[1] = json.dumps({"step": 1, "loss": 0.7})
    folder.metrics.write_text("\n".join(lines) + "\n")
    before = files(folder)
    with pytest.raises(Damaged, match=r"metrics.jsonl is damaged: .* restore it from a copy, or move it away"):
        go_back(folder)
    assert files(folder) == before


def test_metrics_that_are_gone_are_missed(folder, caplog):
    folder.metrics.unlink()
    assert go_back(folder) == 4
    assert caplog.messages == [f"{folder.metrics} is not there; the run goes on without what was in it"]
