import os
import time

import pytest

from turnwise.data import digests
from turnwise.data.digests import digest_of, digests_in


def test_a_digest_is_of_the_content_alone(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    os.utime(tmp_path / "b", (1, 1))
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")
    (tmp_path / "b").write_text("Same")
    assert digest_of(tmp_path / "a") != digest_of(tmp_path / "b")


@pytest.fixture
def counted(monkeypatch):
    """Every file is large, and old enough; what is read is counted."""
    read, honest = [], digests.computed
    monkeypatch.setattr(digests, "LARGE", 1)
    monkeypatch.setattr(digests, "SETTLED", -1.0)
    monkeypatch.setattr(digests, "computed", lambda path: read.append(path.name) or honest(path))
    return read


def test_a_large_file_is_read_once_and_again_when_it_changes(tmp_path, counted):
    path = tmp_path / "a"
    path.write_text("one")
    first = digest_of(path)
    assert digest_of(path) == first
    assert counted == ["a"]
    before = path.stat()
    time.sleep(0.02)  # file systems count time in steps of some milliseconds
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archive that is unpacked over it does
    assert digest_of(path) != first
    assert counted == ["a", "a"]


def test_a_file_that_may_still_be_written_is_not_remembered(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED", 3600.0)
    (tmp_path / "a").write_text("one")
    digest_of(tmp_path / "a")
    digest_of(tmp_path / "a")
    assert counted == ["a", "a"]


def test_a_damaged_memory_is_not_believed(tmp_path, counted):
    (tmp_path / "a").write_text("one")
    first = digest_of(tmp_path / "a")
    [remembered] = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_text("abc")
    assert digest_of(tmp_path / "a") == first


def test_all_files_below_a_folder_but_hidden_ones(tmp_path):
    for name in ("a", "deep/b", ".git/c", "deep/.d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(digests_in(tmp_path)) == ["a", "deep/b"]
