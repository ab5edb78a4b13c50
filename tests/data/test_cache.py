import os
import threading
import time

import pytest

from turnwise.data import cache
from turnwise.data.cache import cache_folder, made_once


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("TURNWISE_CACHE")
    assert cache_folder().name == "turnwise"


def test_an_existing_folder_is_not_made_again(tmp_path):
    made = []
    for _ in range(2):
        folder = made_once(tmp_path / "deep" / "x", lambda aside: (aside / "a").write_text(str(made.append(1))))
    assert made == [1]
    assert (folder / "a").is_file()


def test_a_failure_leaves_nothing(tmp_path):
    def fail(aside):
        (aside / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made_once(tmp_path / "x", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]
    assert made_once(tmp_path / "x", lambda aside: None).is_dir()


def test_those_who_want_the_same_wait_for_the_first(tmp_path):
    made = []

    def make(aside):
        made.append(1)
        time.sleep(0.2)
        (aside / "whole").write_text("x")

    found = []
    threads = [
        threading.Thread(target=lambda: found.append((made_once(tmp_path / "x", make) / "whole").read_text()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (made, found) == ([1], ["x"] * 4)


def flip(path):
    """Change one bit of a file, and neither its size nor the time of its change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(b"sh"), lambda path: path.unlink()])
def test_a_damaged_folder_is_made_again_and_reported(tmp_path, caplog, damage):
    def make(aside):
        (aside / "a").write_text("should be this")

    made_once(tmp_path / "x", make)
    damage(tmp_path / "x" / "a")
    assert (made_once(tmp_path / "x", make) / "a").read_text() == "should be this"
    [line] = caplog.messages
    assert line.startswith(f"{tmp_path / 'x'} is damaged: a ")
    assert line.endswith("; it is made again")
    assert cache.is_whole(tmp_path / "x")


def test_what_has_no_checksums_is_made_again(tmp_path):
    (tmp_path / "x").mkdir()
    assert (made_once(tmp_path / "x", lambda aside: (aside / "a").touch()) / "a").is_file()


def test_files_that_have_not_changed_are_read_once(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(cache, "check_checksums", looked.append)
    for _ in range(3):
        made_once(tmp_path / "x", lambda aside: (aside / "a").touch())
    assert looked == [tmp_path / "x"]
