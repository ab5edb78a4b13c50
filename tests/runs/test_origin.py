import shutil

import pytest

from support.recorded import attempt, record
from turnwise.runs.archive import write_step
from turnwise.runs.folder import RunFolder
from turnwise.runs.origin import REPLAY, Origin
from turnwise.runs.recorded_archive import RecordedArchive


@pytest.fixture
def source(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    for step in (1, 2):
        write_step(folder.archive, step, [record("a", attempt(1.0))])
    return RecordedArchive.open(folder.path)


def test_a_folder_knows_the_run_it_was_made_of(source, tmp_path):
    origin = Origin.of(REPLAY, source)
    folder = RunFolder.create(tmp_path / "replay", {}, origin=origin.text)
    found = Origin.read(folder)
    assert found == origin
    assert found.reopen().steps == (1, 2)


def test_steps_that_came_later_are_not_part_of_it_and_changed_ones_are_refused(source):
    origin = Origin.of(REPLAY, source)
    write_step(source.folder.archive, 3, [record("b", attempt(1.0))])
    assert origin.reopen().steps == (1, 2)
    write_step(source.folder.archive, 2, [record("b", attempt(1.0))])
    with pytest.raises(ValueError, match="step 2 in the archive of .* is not what it was"):
        origin.reopen()
    shutil.rmtree(source.folder.path)
    with pytest.raises(ValueError, match="not the folder of a run"):
        origin.reopen()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "replay", "run": "x", "digests": 3}', "\0"])
def test_an_origin_that_cannot_be_read_is_one_line(tmp_path, text):
    folder = RunFolder.create(tmp_path / "replay", {}, origin="x")
    folder.origin.write_text(text)
    with pytest.raises(ValueError, match="cannot be read; restore it from a copy"):
        Origin.read(folder)


def test_a_start_that_was_killed_leaves_no_origin_to_the_next(tmp_path):
    left = tmp_path / "run"
    left.mkdir()
    (left / "origin.json").write_text("{}")
    assert not RunFolder.create(left, {}).origin.exists()
