import os

import pytest

from turnwise.atomic import (
    atomic_folder,
    clear_leftovers,
    remove_folder,
    replaced,
    write_atomically,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", [b"\x00\xff", "ünï\n", memoryview(b"view")])
def test_a_file_is_written_whole(tmp_path, data):
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else bytes(data))
    assert names(tmp_path) == ["file"]


def test_a_file_keeps_the_permissions_of_the_umask(tmp_path):
    write_atomically(tmp_path / "file", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, stage):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, stage, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_two_writers_of_one_name_do_not_meet(tmp_path):
    final = tmp_path / "folder"
    with atomic_folder(final) as first:
        (first / "file").write_text("first")
        with atomic_folder(final) as second:
            (second / "file").write_text("second")
        assert (final / "file").read_text() == "second"
    assert (final / "file").read_text() == "first"
    assert names(tmp_path) == ["folder"]


def test_a_folder_appears_whole_at_the_end_of_the_block(tmp_path):
    final = tmp_path / "deep" / "folder"
    with atomic_folder(final) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("x")
        assert not final.exists()
    assert (final / "inner" / "file").read_text() == "x"
    assert names(tmp_path / "deep") == ["folder"]


def test_every_file_and_folder_is_synced_before_the_rename(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, os.rename

    def noted_sync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def noted_rename(source, target):
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    final = tmp_path / "folder"
    with atomic_folder(final) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("x")
        (aside / "top").write_text("x")
    places = {aside, aside / "top", aside / "inner", aside / "inner" / "file"}
    assert set(events[: events.index("rename")]) == {str(place) for place in places}
    assert events[-1] == str(tmp_path)


def test_a_block_that_raises_leaves_the_old_folder_and_nothing_else(tmp_path):
    final = tmp_path / "folder"
    with atomic_folder(final) as aside:
        (aside / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(final) as aside:
        (aside / "file").write_text("new")
        raise KeyboardInterrupt
    assert (final / "file").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_a_folder_is_replaced_also_after_a_kill_during_the_replacement(tmp_path):
    final = tmp_path / "folder"
    for leftover in (replaced(final), final):
        leftover.mkdir()
        (leftover / "file").write_text("old")
    with atomic_folder(final) as aside:
        (aside / "other").write_text("new")
    assert names(final) == ["other"]
    assert names(tmp_path) == ["folder"]


def test_leftovers_are_cleared_and_a_half_replaced_folder_is_put_back(tmp_path):
    for name in (".a.0f3c.partial", ".b.replaced", ".c.replaced", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.77ab.partial").write_text("x")
    (tmp_path / "other").write_text("x")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["b", "c", "other"]
    clear_leftovers(tmp_path / "absent")


def test_a_folder_leaves_its_name_before_its_files_go(tmp_path, monkeypatch):
    final = tmp_path / "folder"
    final.mkdir()
    (final / "file").write_text("x")
    monkeypatch.setattr("shutil.rmtree", lambda *arguments, **options: None)
    remove_folder(final)
    assert not final.exists()
    (left,) = names(tmp_path)
    assert left.startswith(".folder.")
    assert left.endswith(".partial")
