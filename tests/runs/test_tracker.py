import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.runs.checksums import Damaged
from turnwise.runs.tracker import (
    JsonLines,
    Several,
    check_seal,
    cut_back,
    read_metrics,
    seal,
)


def log_steps(path, steps):
    tracker = JsonLines(path)
    for step in steps:
        tracker.log(step, {"reward": step / 10})
    tracker.close()


def test_one_object_per_line_in_the_order_given(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.log(3, {"z": 0.1, "a": np.float32(0.1), "count": 2})
    assert path.read_text() == '{"step": 3, "z": 0.1, "a": 0.10000000149011612, "count": 2.0}\n'
    tracker.log(4, {"z": math.nan, "b": 1.0, "a": -math.inf})
    assert path.read_text().splitlines()[1] == '{"step": 4, "z": null, "b": 1.0, "a": null, "nonfinite": ["z", "a"]}'
    first, second = read_metrics(path)
    assert first == {"step": 3, "z": 0.1, "a": np.float32(0.1), "count": 2}
    assert list(second) == ["step", "z", "b", "a"]
    assert math.isnan(second["z"])
    assert math.isnan(second["a"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_for_bit(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    JsonLines(path).log(1, {"x": value})
    assert read_metrics(path)[0]["x"].hex() == value.hex()


def test_names_of_the_file_itself_cannot_be_metrics(tmp_path):
    for name in ("step", "nonfinite"):
        with pytest.raises(AssertionError):
            JsonLines(tmp_path / "metrics.jsonl").log(1, {name: 1.0})


def test_lines_are_appended(tmp_path):
    log_steps(tmp_path / "m", [1, 2])
    log_steps(tmp_path / "m", [2, 3])
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2, 2, 3]


def test_nothing_yet(tmp_path):
    assert read_metrics(tmp_path / "absent") == []
    cut_back(tmp_path / "absent", 3)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").touch()
    assert read_metrics(tmp_path / "empty") == []
    log_steps(tmp_path / "empty", [1])
    assert len(read_metrics(tmp_path / "empty")) == 1


def test_cut_back_drops_later_lines_and_keeps_the_others_byte_for_byte(tmp_path):
    path = tmp_path / "m"
    log_steps(path, [1, 2, 3])
    before = path.read_bytes().splitlines(keepends=True)
    cut_back(path, 2)
    assert path.read_bytes() == b"".join(before[:2])
    cut_back(path, 0)
    assert path.read_bytes() == b""


def test_a_line_torn_anywhere_is_dropped(tmp_path):
    whole = tmp_path / "whole"
    log_steps(whole, [1, 2])
    content = whole.read_bytes()
    start = content.index(b"\n") + 1
    for end in range(start, len(content)):
        path = tmp_path / "torn"
        path.write_bytes(content[:end])
        expected = [1] if end < len(content) - 1 else [1, 2]
        assert [line["step"] for line in read_metrics(path)] == expected
        if end > start:
            with pytest.raises(ValueError, match="ends in a torn line"):
                JsonLines(path)
        cut_back(path, 9)
        JsonLines(path).log(3, {})
        assert [line["step"] for line in read_metrics(path)] == [*expected, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    for act in (read_metrics, lambda path: cut_back(path, 1)):
        with pytest.raises(ValueError, match=r"^line 2 of .* is not JSON; repair or remove that line$"):
            act(tmp_path / "m")


class Noted:
    """A tracker that notes every call."""

    def __init__(self, *arguments, **options):
        self.calls = [("init", arguments, options)]

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


def test_several_pass_everything_on_and_all_close():
    class Fails(Noted):
        def close(self):
            self.calls.append(("close", (), {}))
            raise OSError("offline")

    trackers = [Noted(), Fails(), Noted()]
    several = Several(trackers)
    several.log(1, {"a": 1.0})
    several.log_attempts(1, [])
    several.log_curve(1, Path("curve.png"))
    with pytest.raises(OSError, match="offline"):
        several.close()
    calls = ["init", "log", "log_attempts", "log_curve", "close"]
    assert all([name for name, _, _ in tracker.calls] == calls for tracker in trackers)


# ---------------------------------------------------------------- a disk that fails, and damage


def test_a_line_is_on_disk_when_log_returns(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def noted(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path.name, path.read_bytes().count(b"\n") if path.is_file() else None))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2])
    assert synced == [("metrics.jsonl", 1), (tmp_path.name, None), ("metrics.jsonl", 2)]


@pytest.mark.parametrize("stage", ["write", "fsync"])
def test_a_line_that_finds_no_room_leaves_the_file_as_it_was(tmp_path, monkeypatch, stage):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2])
    before = path.read_bytes()
    done = getattr(os, stage)

    def half(handle, data=b""):
        if stage == "write":
            done(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, stage, half)
        with pytest.raises(OSError, match="No space left"):
            log_steps(path, [3])
    assert path.read_bytes() == before
    log_steps(path, [3])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_short_writes_are_completed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    log_steps(tmp_path / "metrics.jsonl", [1, 2])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_nothing_is_written_where_nothing_is_cut(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2])
    monkeypatch.setattr("turnwise.runs.tracker.write_atomically", None)
    cut_back(path, 2)


@pytest.mark.parametrize("line", [b"3", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"stdp": 1}', b"[1]"])
def test_a_line_without_a_step_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl has no step; repair or remove that line$"):
        read_metrics(path)


def test_a_seal_knows_the_file_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    check_seal(path, seal(path))
    log_steps(path, [1, 2])
    sealed = seal(path)
    log_steps(path, [3])
    whole = path.read_bytes()
    check_seal(path, sealed)
    check_seal(path, {})
    for bit in range(0, 8 * sealed["bytes"], 13):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match=r"metrics.jsonl is damaged: it is not what it was"):
            check_seal(path, sealed)
    path.write_bytes(whole[: sealed["bytes"] - 1])
    with pytest.raises(Damaged, match=r"restore it from a copy, or move it away to go on without it$"):
        check_seal(path, sealed)
    path.unlink()
    check_seal(path, sealed)
