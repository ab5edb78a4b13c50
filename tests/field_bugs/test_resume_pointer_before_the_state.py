"""A resume pointer that was written before the state.

Elsewhere the file that names the latest checkpoint was written first, or while parts of the checkpoint were still
missing. A run that was killed in between, or whose disk was full, could not be resumed: the pointer named a checkpoint
that was not there, and the good one before it had no name any more.
"""

import json
import os
import shutil
import sys
from contextlib import contextmanager

import pytest

from turnwise.atomic import atomic_folder, write_atomically
from turnwise.runs.checkpoint import POINTER, latest_checkpoint, write_checkpoint

CHANGES = {"open", "write", "flush", "mkdir", "rename", "replace", "unlink", "rmdir"}
FILES = ("model.safetensors", "optimizer.pt")


def weights(content):
    def write(folder):
        for name in FILES:
            (folder / name).write_text(content)

    return write


def weights_that_fill_the_disk(folder):
    (folder / FILES[0]).write_text("half")
    raise OSError("no space left on device")


@contextmanager
def photographed(folder, album):
    """Before every call that may change the disk, a copy of the folder in the album: what a kill then would leave."""

    def photograph(frame, event, function):
        if event == "c_call" and function.__name__ in CHANGES:
            sys.setprofile(None)
            shutil.copytree(folder, album / f"{len(list(album.iterdir())):03d}")
            sys.setprofile(photograph)

    album.mkdir()
    before = sys.getprofile()
    sys.setprofile(photograph)
    try:
        yield
    finally:
        sys.setprofile(before)


def content_of_latest(folder):
    """What the latest checkpoint holds, all of one writing; anything that hinders a resume is an AssertionError."""
    try:
        latest = latest_checkpoint(folder)
        assert latest is not None, "no checkpoint has a name"
        found = {(latest.path / name).read_text() for name in FILES}
        assert found == {latest.state["content"]}, f"checkpoint {latest.step} is of several writings"
    except (OSError, ValueError) as error:
        raise AssertionError(f"the run cannot be resumed: {error}") from error
    return latest.state["content"]


def check_a_run_survives_a_failed_write(save, place):
    """Where a checkpoint cannot be written, the latest one is that before."""
    save(place, 10, {"content": "old"}, weights("old"))
    with pytest.raises(OSError, match="no space left"):
        save(place, 20, {"content": "new"}, weights_that_fill_the_disk)
    assert content_of_latest(place) == "old"


def check_a_run_survives_any_kill(save, place):
    """Whenever a run is killed while it writes a checkpoint, the latest one is whole: the new one, or that before."""
    folder = place / "checkpoints"
    save(folder, 10, {"content": "old"}, weights("old"))
    with photographed(folder, place / "album"):
        save(folder, 20, {"content": "new"}, weights("new"))
    assert content_of_latest(folder) == "new"
    seen = [content_of_latest(photograph) for photograph in sorted((place / "album").iterdir())]
    assert len(seen) > 5
    assert seen == sorted(seen, reverse=True)  # old until it is new


def pointer_first(folder, step, state, write):
    """The pointer, then what it points to."""
    folder.mkdir(exist_ok=True)
    final = folder / f"step-{step:06d}"
    write_atomically(folder / POINTER, final.name + "\n")
    with atomic_folder(final) as aside:
        write(aside)
        (aside / "state.json").write_text(json.dumps(state))


def pointer_in_between(folder, step, state, write):
    """The state of the trainer and the pointer to it, then the weights."""
    final = folder / f"step-{step:06d}"
    final.mkdir(parents=True)
    (final / "state.json").write_text(json.dumps(state))
    write_atomically(folder / POINTER, final.name + "\n")
    write(final)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """A killed process loses nothing that it has not synced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


CHECKS = [check_a_run_survives_a_failed_write, check_a_run_survives_any_kill]


@pytest.mark.parametrize("check", CHECKS)
def test_the_latest_checkpoint_is_always_whole(check, tmp_path):
    check(write_checkpoint, tmp_path)


def test_a_first_checkpoint_has_no_name_before_it_is_whole(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with photographed(tmp_path / "checkpoints", tmp_path / "album"):
        write_checkpoint(tmp_path / "checkpoints", 10, {"content": "new"}, weights("new"))
    photographs = sorted((tmp_path / "album").iterdir())
    seen = [(photograph / POINTER).exists() and content_of_latest(photograph) for photograph in photographs]
    assert set(seen) <= {False, "new"}
    assert False in seen


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("save", [pointer_first, pointer_in_between])
def test_a_pointer_before_the_state_is_caught(save, check, tmp_path):
    with pytest.raises(AssertionError, match="the run cannot be resumed"):
        check(save, tmp_path)
