import pytest

from support.recorded import attempt, record
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.checksums import Damaged
from turnwise.runs.folder import RunFolder
from turnwise.runs.recorded_archive import RecordedArchive, names_of_steps


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    for step in (2, 3, 6):
        write_step(folder.archive, step, [record(f"task {step}", attempt(1.0))])
    return folder


def test_steps_come_in_order_with_the_content_of_their_files(folder):
    source = RecordedArchive.open(folder.path)
    assert source.steps == (2, 3, 6)
    assert source.missing == (4, 5)
    assert [one.group.task.id for one in source.read(3)] == ["task 3"]
    assert len(set(source.digests.values())) == 3
    before = source.digests[3]
    write_step(folder.archive, 3, [record("task 3", attempt(0.5))])
    assert RecordedArchive.open(folder.path).digests[3] != before


def test_one_step_can_be_chosen(folder):
    assert RecordedArchive.open(folder.path, 3).steps == (3,)
    with pytest.raises(ValueError, match="no step 4 in its archive; choose one from 2 to 6"):
        RecordedArchive.open(folder.path, 4)


def test_a_damaged_file_is_refused_before_anything_begins(folder):
    path = step_path(folder.archive, 3)
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match=r"step-000003.parquet is damaged"):
        RecordedArchive.open(folder.path)
    assert RecordedArchive.open(folder.path, 2).steps == (2,)


def test_a_folder_without_an_archive_is_refused(tmp_path):
    RunFolder.create(tmp_path / "new", {})
    with pytest.raises(ValueError, match="no step in its archive"):
        RecordedArchive.open(tmp_path / "new")
    with pytest.raises(ValueError, match="not the folder of a run"):
        RecordedArchive.open(tmp_path / "nowhere")


def test_steps_have_a_phrase():
    assert names_of_steps([3]) == "step 3"
    assert names_of_steps([3, 4, 9]) == "steps 3 to 9"
