"""Runs whose disk fails: one line, an exit code of its own, and a run that goes on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import TESTS
from support.running import micro_toml, unadvised, untimed
from turnwise.cli.commands import main
from turnwise.disk import EXIT_CODE
from turnwise.runs.checkpoint import read_checkpoint

SMALL = [
    "steps=3",
    "sft.updates=0",
    "evaluation.final_tasks=2",
    "evaluation.tasks=2",
    "evaluation.every=2",
    "checkpoints.every=1",
]


class Disk:
    """Counts what is forced to disk, and refuses it from some number on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.room, self.number = 0, 10**9, errno.ENOSPC
        self.weight_check = os.fsync
        patch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        self.count += 1
        if self.count > self.room:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """(a run that found room for everything, how often it forced something to disk)."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        assert main(["train", str(micro_toml(folder)), f"out={folder / 'run'}", *SMALL]) == 0
    return folder / "run", disk.count


def start(whole: Path, out: Path) -> int:
    return main(["train", str(whole.parent / "micro.toml"), f"out={out}", *SMALL])


def check_the_disk_ended_it(code: int, printed: str, reason: str) -> None:
    assert code == EXIT_CODE
    [line] = unadvised(printed)
    assert line.startswith("turnwise: cannot write")
    assert reason in line


SHARES = [0.0, 0.3, 0.6, 0.85, 0.97]
QUICK = (0.3, 0.85)


@pytest.mark.parametrize(
    "share", [share if share in QUICK else pytest.param(share, marks=pytest.mark.slow) for share in SHARES]
)
def test_a_run_whose_disk_fills_goes_on_once_there_is_room(
    whole: tuple[Path, int],
    tmp_path: Path,
    disk: Disk,
    capsys: pytest.CaptureFixture[str],
    share: float,
) -> None:
    run, count = whole
    out = tmp_path / "run"
    disk.room = round(share * count)
    code = start(run, out)
    check_the_disk_ended_it(code, capsys.readouterr().err, "No space left on device")
    disk.room = 10**9
    for path in (out / "checkpoints").glob("step-*"):
        read_checkpoint(path)
    if out.exists():
        assert main(["train", "--resume", str(out)]) == 0
    else:
        assert start(run, out) == 0
    assert untimed(out / "metrics.jsonl") == untimed(run / "metrics.jsonl")


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS])
def test_a_start_that_finds_no_room_leaves_no_folder(
    whole: tuple[Path, int],
    tmp_path: Path,
    disk: Disk,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    for room in (0, 3, 6):
        disk.count, disk.room, disk.number = 0, room, number
        code = start(whole[0], tmp_path / "run")
        check_the_disk_ended_it(code, capsys.readouterr().err, os.strerror(number))
        assert not (tmp_path / "run").exists()


@pytest.fixture
def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files_is_named(
    whole: tuple[Path, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limited: None,
) -> None:
    """The weights do not fit, which safetensors says in words of its own."""
    code = start(whole[0], tmp_path / "run")
    check_the_disk_ended_it(code, capsys.readouterr().err, "File too large")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_holds_the_output_too_still_gives_its_exit_code(whole: tuple[Path, int], tmp_path: Path) -> None:
    """What is printed goes to a file that may not grow either."""
    arguments = ["train", str(whole[0].parent / "micro.toml"), f"out={tmp_path / 'run'}", *SMALL]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))"
    work = f"{limit}; from turnwise.cli.commands import program; program()"
    (tmp_path / "log").write_bytes(bytes(100))
    with open(tmp_path / "log", "ab") as log:
        code = subprocess.run([sys.executable, "-c", work, *arguments], stdout=log, stderr=log, timeout=300).returncode
    assert code == EXIT_CODE
    assert (tmp_path / "log").read_bytes() == bytes(100)


@pytest.mark.parametrize("mistake", [ValueError, RuntimeError, OSError])
def test_a_start_that_fails_does_not_block_the_next(
    whole: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: type[Exception]
) -> None:
    from turnwise.assemble import run

    def fail(*arguments: object, **options: object) -> None:
        raise mistake("something that is found out late")

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_parts", fail)
        try:
            assert start(whole[0], tmp_path / "run") == 2
        except mistake:
            assert mistake is not ValueError
    assert not (tmp_path / "run").exists()


REAL = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.running import micro_toml, unadvised, untimed
from turnwise.cli.commands import main

place = Path({place!r})
def mount(*options):
    subprocess.run(["mount", *options, str(place)], check=True)

def start():
    return main(["train", {recipe!r}, "out=" + str(place / "run"), *{small!r}])

mount("-t", "tmpfs", "-o", "size={small_size}", "none")
print("START", start(), (place / "run").exists(), flush=True)
mount("-o", "remount,size={large_size}")
print("ROOM", start(), flush=True)
steps = len(untimed(place / "run" / "metrics.jsonl"))
assert (place / "run" / "checkpoints" / "latest").is_file()
mount("-o", "remount,size=100m")
mount("-o", "remount,ro")
print("READ ONLY", main(["train", "--resume", str(place / "run")]), flush=True)
mount("-o", "remount,rw")
print("RESUMED", main(["train", "--resume", str(place / "run")]), steps < 4, flush=True)
assert untimed(place / "run" / "metrics.jsonl") == untimed(Path({whole!r}) / "metrics.jsonl")
print("SAME", flush=True)
"""


def has_namespaces() -> bool:
    program = shutil.which("unshare")
    return program is not None and subprocess.run([program, "-rm", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="user namespaces are off here")
def test_a_real_disk_that_is_full_and_then_read_only(whole: tuple[Path, int], tmp_path: Path) -> None:
    run, _ = whole
    size = sum(path.stat().st_size + 4096 for path in run.rglob("*"))
    (tmp_path / "disk").mkdir()
    code = REAL.format(
        tests=str(TESTS),
        place=str(tmp_path / "disk"),
        recipe=str(run.parent / "micro.toml"),
        small=SMALL,
        small_size=200_000,
        large_size=int(size * 0.9),
        whole=str(run),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stdout.splitlines() if line.isupper() or line.split()[0].isupper()]
    assert said == ["START 3 False", "ROOM 3", "READ ONLY 3", "RESUMED 0 True", "SAME"], (said, done.stderr)
    lines = done.stderr.splitlines()
    assert ["No space left" in line for line in lines[:2]] == [True, True]
    assert "Read-only file system" in lines[2]
