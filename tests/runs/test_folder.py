import errno
import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from turnwise.atomic import write_atomically
from turnwise.runs import folder as folder_module
from turnwise.runs.checksums import Damaged
from turnwise.runs.folder import RunFolder


def one_line(error):
    return "\n" not in str(error.value)


def test_places():
    folder = RunFolder(Path("runs/hops-0"))
    places = [
        folder.config,
        folder.machine,
        folder.metrics,
        folder.events,
        folder.archive,
        folder.evaluations,
        folder.checkpoints,
        folder.summary,
        folder.curve,
        folder.report,
    ]
    assert [str(place.relative_to("runs/hops-0")) for place in places] == [
        "config.json",
        "machine.json",
        "metrics.jsonl",
        "events.log",
        "archive",
        "evaluations",
        "checkpoints",
        "summary.json",
        "curve.png",
        "report.html",
    ]


@pytest.mark.parametrize("kind", [str, Path])
def test_create_and_open(tmp_path, kind):
    path = tmp_path / "runs" / "hops-0"
    created = RunFolder.create(kind(path), {"seed": 0, "note": "ü"})
    assert RunFolder.open(kind(path)) == created == RunFolder(path)
    assert json.loads(created.config.read_text()) == {"seed": 0, "note": "ü"}


def test_an_empty_folder_may_become_a_run(tmp_path):
    assert RunFolder.create(tmp_path, {}).config.exists()


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    RunFolder.create(tmp_path, {"seed": 0})
    with pytest.raises(ValueError) as error:
        RunFolder.create(tmp_path, {"seed": 1})
    assert str(error.value) == (
        f'{tmp_path} exists already; resume it with "turnwise train --resume {tmp_path}" '
        "or choose another folder with out=..."
    )
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 0}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way(tmp_path, below):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ValueError, match=r"a file is in the way; move it or choose another folder with out=") as error:
        RunFolder.create(tmp_path / "run" / below, {})
    assert one_line(error)


@pytest.mark.parametrize("stage", ["mkdir", "iterdir"])
def test_an_unwritable_place(tmp_path, monkeypatch, stage):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, stage, refuse)
    with pytest.raises(ValueError, match=r"cannot write to .*run \(Permission denied\); make it writable or") as error:
        RunFolder.create(tmp_path / "run", {})
    assert one_line(error)


def test_open_needs_a_config(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="it has no config.json") as error:
            RunFolder.open(path)
        assert one_line(error)


# ---------------------------------------------------------------- a config that proves itself


def test_a_flipped_bit_in_the_config_is_found(tmp_path):
    folder = RunFolder.create(tmp_path, {"seed": 0, "steps": 50, "note": "ü"})
    assert folder.read_config() == {"seed": 0, "steps": 50, "note": "ü"}
    whole = folder.config.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        folder.config.write_bytes(flipped)
        with pytest.raises(Damaged, match=r"config.json does not match its checksum; restore it") as error:
            folder.read_config()
        assert one_line(error)


def test_a_config_that_was_changed_on_purpose_is_read_without_its_checksum(tmp_path):
    folder = RunFolder.create(tmp_path, {"steps": 50})
    folder.config.write_text('{"steps": 60}')
    (tmp_path / "SHA256SUMS").unlink()
    assert folder.read_config() == {"steps": 60}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_config_without_a_checksum_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json") as error:
        RunFolder.open(tmp_path).read_config()
    assert one_line(error)


@pytest.mark.parametrize("content", [b"\xff", b"nonsense\n"])
def test_checksums_that_are_none_are_one_line(tmp_path, content):
    folder = RunFolder.create(tmp_path, {})
    (tmp_path / "SHA256SUMS").write_bytes(content)
    with pytest.raises(Damaged, match="SHA256SUMS") as error:
        folder.read_config()
    assert one_line(error)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not installed")
def test_the_usual_tool_reads_the_checksum_of_the_config(tmp_path):
    RunFolder.create(tmp_path, {"note": "ü"})
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)


# ---------------------------------------------------------------- starts that fail


@pytest.mark.parametrize("left", [["events.log"], ["lock"], ["lock", "events.log", ".config.json.0f3c.partial"]])
def test_what_a_failed_start_leaves_does_not_block_the_next(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("x")
    RunFolder.create(tmp_path, {})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "SHA256SUMS", *left} - {".config.json.0f3c.partial"}


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_disk_that_is_full_at_the_start_leaves_nothing(tmp_path, monkeypatch, call):
    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.create(tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
    RunFolder.create(tmp_path / "run", {})


def test_clear_leaves_what_is_not_a_runs(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    for place in (folder.archive, folder.evaluations, folder.checkpoints, folder.reference):
        (place / "deep").mkdir(parents=True)
    for place in (folder.metrics, folder.events, *(folder.path / name for name in ("lock", "trust", "notes.txt"))):
        place.write_text("x")
    folder.clear()
    assert {path.name for path in folder.path.iterdir()} == {"events.log", "lock", "notes.txt"}
    folder.events.unlink()
    (folder.path / "notes.txt").unlink()
    folder.clear()
    assert not folder.path.exists()


def test_a_kill_while_a_run_is_made_leaves_a_whole_run_or_none(tmp_path, monkeypatch):
    """Whichever file was the last to be written: there is no config without its stamp and checksum, and a folder
    without a config does not block the next start."""
    real, count = write_atomically, iter(range(10))

    def until_killed(path, data, after):
        if next(count) == after:
            raise KeyboardInterrupt
        real(path, data)

    for after in range(3):
        count = iter(range(10))
        path = tmp_path / str(after)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(folder_module, "write_atomically", partial(until_killed, after=after))
            RunFolder.create(path, {"steps": 1}, lambda config: "mine")
        assert not (path / "config.json").exists()
        made = RunFolder.create(path, {"steps": 2}, lambda config: "mine")
        assert made.read_config() == {"steps": 2}
        assert made.stamp.read_text() == "mine\n"
