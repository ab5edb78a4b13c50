"""Checkpoints, and kills before every call that changes the disk while one is written or removed."""

import os
import sys

import pytest

from turnwise.runs.checkpoint import (
    check_model_folder,
    latest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from turnwise.runs.checksums import Damaged, check_checksums

CHANGES = {"open", "write", "flush", "mkdir", "rename", "replace", "unlink", "rmdir"}
FILES = ("model.safetensors", "optimizer/rank-0")


def weights(content):
    """A `write` that puts the same content in every file."""

    def write(folder):
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)

    return write


def save(folder, step, content):
    return write_checkpoint(folder, step, {"content": content}, weights(content))


def assert_whole(checkpoint):
    """Every file is there and of one writing."""
    assert {(checkpoint.path / name).read_text() for name in FILES} == {checkpoint.state["content"]}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Syncing takes most of the time, and a killed process loses nothing that it has not synced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Killed(BaseException):
    pass


def stop_at(call, stop):
    """A profile function that runs `stop` before the `call`-th call that may change the disk."""
    count = 0

    def profile(frame, event, function):
        nonlocal count
        if event == "c_call" and function.__name__ in CHANGES:
            count += 1
            if count == call:
                sys.setprofile(None)
                stop()

    return profile


def killed(action, call):
    """Run `action` in a child process that dies before its `call`-th call; False when it got through."""
    child = os.fork()
    if child == 0:
        sys.setprofile(stop_at(call, lambda: os._exit(9)))
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def interrupted(action, call):
    """Run `action` with an exception raised before its `call`-th call; False when it got through."""

    def stop():
        raise Killed

    before = sys.getprofile()
    sys.setprofile(stop_at(call, stop))
    try:
        action()
    except Killed:
        return True
    finally:
        sys.setprofile(before)
    return False


def test_write_and_read(tmp_path):
    path = write_checkpoint(tmp_path / "c", 123, {"version": 123, "rng": [1, 2]}, weights("x"))
    latest = latest_checkpoint(tmp_path / "c")
    assert path.name == "step-000123"
    assert names(tmp_path / "c") == ["latest", "step-000123"]
    assert latest == read_checkpoint(path)
    assert (latest.path, latest.step, latest.state) == (path, 123, {"version": 123, "rng": [1, 2]})


def test_none_before_the_first(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    prune_checkpoints(tmp_path, 1, None)


@pytest.mark.parametrize("death", [killed, interrupted])
@pytest.mark.parametrize(("before", "step"), [([], 10), ([10], 20), ([10, 20], 20)], ids=["first", "next", "same step"])
def test_the_pointer_never_names_something_incomplete(tmp_path, death, before, step):
    call = 0
    died = True
    seen = set()
    while died:
        call += 1
        folder = tmp_path / str(call)
        for earlier in before:
            save(folder, earlier, f"old {earlier}")
        died = death(lambda folder=folder: save(folder, step, "new"), call)
        latest = latest_checkpoint(folder) if folder.exists() else None
        seen.add(latest and latest.state["content"])
        if latest is not None:
            assert_whole(latest)
            assert latest.state["content"] in ("new", f"old {max(before, default=0)}")
        else:
            assert not before
        save(folder, step + 10, "after")
        assert latest_checkpoint(folder).step == step + 10
        assert [name for name in names(folder) if name.startswith(".")] == []
        for name in names(folder):
            if name != "latest":
                assert_whole(read_checkpoint(folder / name))
    assert call > 15
    assert seen == {"new", f"old {before[-1]}" if before else None}


def test_pruning_never_leaves_a_broken_checkpoint_under_its_name(tmp_path):
    call, died = 0, True
    while died:
        call += 1
        folder = tmp_path / str(call)
        for step in (1, 2, 3):
            save(folder, step, f"{step}")
        died = killed(lambda folder=folder: prune_checkpoints(folder, 1, best=None), call)
        for name in names(folder):
            if name.startswith("step"):
                assert_whole(read_checkpoint(folder / name))
        save(folder, 4, "4")
        prune_checkpoints(folder, 1, best=None)
        assert names(folder) == ["latest", "step-000004"]
    assert call > 10


def test_a_write_that_raises_changes_nothing(tmp_path):
    save(tmp_path, 1, "old")

    def write(folder):
        weights("half")(folder)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_checkpoint(tmp_path, 2, {}, write)
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 2, {"not json": object()}, weights("new"))
    assert names(tmp_path) == ["latest", "step-000001"]
    assert latest_checkpoint(tmp_path).step == 1


def test_a_folder_left_between_rename_and_pointer_is_replaced(tmp_path):
    save(tmp_path, 10, "old")
    save(tmp_path, 20, "lost")
    (tmp_path / "latest").write_text("step-000010\n")
    assert latest_checkpoint(tmp_path).step == 10
    save(tmp_path, 20, "new")
    assert_whole(latest_checkpoint(tmp_path))
    assert latest_checkpoint(tmp_path).state == {"content": "new"}


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(2, None, [4, 5]), (2, 1, [1, 4, 5]), (1, 5, [5]), (3, 99, [3, 4, 5]), (9, None, [1, 2, 3, 4, 5])],
)
def test_prune(tmp_path, keep, best, left):
    for step in range(1, 6):
        save(tmp_path, step, str(step))
    prune_checkpoints(tmp_path, keep, best)
    assert names(tmp_path) == ["latest", *(f"step-{step:06d}" for step in left)]


def test_prune_spares_the_checkpoint_under_evaluation(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, str(step))
    prune_checkpoints(tmp_path, 1, 1, 3)
    assert names(tmp_path) == ["latest", "step-000001", "step-000003", "step-000005"]


def test_prune_spares_the_pointed_one_and_what_comes_after_it(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, str(step))
    (tmp_path / "latest").write_text("step-000003\n")
    prune_checkpoints(tmp_path, 1, best=1)
    assert names(tmp_path) == ["latest", "step-000001", "step-000003", "step-000004", "step-000005"]


def test_prune_needs_to_keep_one(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        prune_checkpoints(tmp_path, 0, None)


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "step-000001")


POINTERS = {
    "absent": None,
    "empty": b"",
    "binary": b"\xff\x00\xfe",
    "a path": b"../../elsewhere/step-000010\n",
    "a name and more": b"step-000010\nstep-000020\n",
    "another word": b"best\n",
    "what is not there": b"step-000099\n",
}


@pytest.mark.parametrize("pointer", POINTERS.values(), ids=POINTERS.keys())
def test_without_a_pointer_the_newest_whole_one_counts(tmp_path, caplog, pointer):
    for step in (10, 20):
        save(tmp_path, step, str(step))
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    latest = latest_checkpoint(tmp_path)
    assert latest.step == 20
    assert_whole(latest)
    (record,) = caplog.records
    assert record.getMessage().endswith("; using step-000020")
    assert "latest" in record.getMessage()
    prune_checkpoints(tmp_path, 1, None)
    if pointer is None or b"99" not in pointer:
        assert {"step-000010", "step-000020"} <= set(names(tmp_path))


def test_a_pointer_that_is_a_folder_names_nothing(tmp_path):
    save(tmp_path, 10, "x")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "step-000010")
    assert latest_checkpoint(tmp_path).step == 10


def damages(path):
    """A file with a bit flipped, cut short, and gone."""
    whole = path.read_bytes()
    yield bytes([whole[0] ^ 1]) + whole[1:]
    yield whole[:-1] + bytes([whole[-1] ^ 128])
    yield whole[:-1]
    yield b""
    yield None


def spoil(path, content):
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("name", [*FILES, "state.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_counts(tmp_path, caplog, name):
    for step in (10, 20, 30):
        save(tmp_path, step, str(step))
    (tmp_path / "latest").write_text("step-000020\n")  # 30 waits to be replaced
    path = tmp_path / "step-000020" / name
    whole = path.read_bytes()
    for content in damages(path):
        if name == "SHA256SUMS" and content == whole[:-1]:  # the last line break, and no more
            continue
        spoil(path, content)
        caplog.clear()
        assert latest_checkpoint(tmp_path).step == 10
        (record,) = caplog.records
        said = record.getMessage()
        assert "step-000020 is damaged: " in said
        assert said.endswith("; using step-000010")
        assert "\n" not in said
        assert name in said or name == "SHA256SUMS"
        with pytest.raises(Damaged, match="step-000020 is damaged: "):
            read_checkpoint(tmp_path / "step-000020")
        path.write_bytes(whole)
    assert latest_checkpoint(tmp_path).step == 20


def test_where_none_before_is_whole_a_later_one_counts(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, str(step))
    (tmp_path / "latest").write_text("step-000010\n")
    (tmp_path / "step-000010" / FILES[0]).write_text("other")
    assert latest_checkpoint(tmp_path).step == 20


def test_none_that_is_whole_is_an_error_and_not_the_same_as_none(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, str(step))
        (tmp_path / f"step-{step:06d}" / FILES[0]).write_text("other")
    with pytest.raises(Damaged, match=r"has no whole checkpoint.*step-000020 is damaged.*step-000010 is dam") as error:
        latest_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def test_a_reader_follows_a_run_that_goes_on(tmp_path, monkeypatch):
    """The run writes the next checkpoint and removes this one while somebody reads it."""
    import turnwise.runs.checkpoint as checkpoint

    save(tmp_path, 10, "10")
    check = check_checksums

    def meanwhile(path):
        if path.name == "step-000010":
            save(tmp_path, 20, "20")
            prune_checkpoints(tmp_path, 1, None)
        check(path)

    monkeypatch.setattr(checkpoint, "check_checksums", meanwhile)
    assert latest_checkpoint(tmp_path).step == 20


def test_models_of_checkpoints_prove_themselves_and_others_do_not(tmp_path):
    path = save(tmp_path, 10, "x")
    check_model_folder(path)
    (path / FILES[0]).write_text("other")
    with pytest.raises(Damaged):
        check_model_folder(path)
    (path / "state.json").unlink()  # somebody else's model, with a list of somebody else's
    check_model_folder(path)
    check_model_folder(tmp_path / "nowhere")


def test_steps_beyond_six_digits(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, str(step))
    prune_checkpoints(tmp_path, 2, None)
    assert names(tmp_path) == ["latest", "step-1000000", "step-1000001"]
    assert latest_checkpoint(tmp_path).step == 1_000_001
