"""A small training run in a separate process into which a fault is injected, and an audit of the result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.testing.micro import MICRO

HERE = Path(__file__).resolve().parent
PATIENCE = 600.0

SETTINGS = (
    "steps=6",
    "env.0.name=faulty:Faulty",
    "env.0.dataset=hops",
    "env.0.tasks.count=1024",
    "rollout.limits.call_seconds=60",
    "checkpoints.every=1",
)
"""In place of those of the micro recipe."""
STEPS, GROUPS = 6, 4


class Trial:
    """One run with its folder and its cache."""

    def __init__(self, folder: Path, *settings: str, cache: Path | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.out = folder / "run"
        self.log = folder / "log"
        self.cache = cache or folder / "cache"
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(MICRO)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        return {
            **os.environ,
            "PYTHONPATH": path,
            "TURNWISE_CACHE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "turnwise.cli", *arguments]

    def start(self, *settings: str) -> subprocess.Popen[bytes]:
        """Begin the run."""
        recipe = str(self.folder / "recipe.toml")
        return self.spawn("train", recipe, f"out={self.out}", *SETTINGS, *self.settings, *settings)

    def go_on(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Resume the run."""
        return self.spawn("train", "--resume", str(self.out), *arguments)

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command(*arguments), stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def call(self, *arguments: str) -> tuple[int, str]:
        """(exit code, output) of another command."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.environment(), timeout=PATIENCE
        )
        with open(self.log, "a") as log:
            log.write(done.stdout + done.stderr)
        return done.returncode, done.stdout + done.stderr

    def finish(self) -> int:
        """Resume the run and wait for its end; the exit code."""
        return self.go_on().wait(PATIENCE)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl, without times."""
        path = self.out / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "speed/"))} for line in whole]

    def audit(self, steps: int = STEPS, groups: int = GROUPS) -> tuple[int, int]:
        """(steps or groups that are missing, groups that were trained on twice), once the run is over."""
        from turnwise.runs.archive import archived_steps, read_step

        there = [line["step"] for line in self.metrics]
        archived = archived_steps(self.out / "archive")
        records = {step: read_step(self.out / "archive" / f"step-{step:06d}.parquet") for step in archived}
        trained = Counter(
            record.group.task.id for of_step in records.values() for record in of_step if record.kept
        )  # tasks are more than draws, so that each comes once
        lost = len(set(range(steps + 1)) - set(there)) + len(set(range(1, steps + 1)) - set(archived))
        lost += sum(max(0, groups - sum(record.kept for record in of_step)) for of_step in records.values())
        twice = sum(count - 1 for count in trained.values()) + sum(c - 1 for c in Counter(there).values())
        return lost, twice


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[bytes] | None = None, patience: float = PATIENCE
) -> float:
    """Seconds until a condition holds. Raises where it does not come to hold, or the process ends first."""
    began = time.monotonic()
    while not condition():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the run ended by itself with {process.returncode}")
        if time.monotonic() - began > patience:
            raise RuntimeError("it did not come to that")
        time.sleep(0.01)
    return time.monotonic() - began


def ended(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """(seconds until a process ends, its exit code)."""
    began = time.monotonic()
    code = process.wait(PATIENCE)
    return time.monotonic() - began, code


def children(pid: int) -> list[int]:
    """All descendants of a process, oldest first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    front = [pid]
    while front:
        front = sorted(child for child, parent in parents.items() if parent in front)
        found += front
    return found


def command_of(pid: int) -> str:
    """Its name, which forks of one process do not share, and its command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return Path(f"/proc/{pid}/comm").read_text().strip() + " " + command
    except OSError:
        return ""


def left_running(folder: Path) -> list[int]:
    """Processes that still have to do with a trial's folder."""
    mine = {os.getpid(), *children(os.getpid())} - set(children(os.getpid()))
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) not in mine and str(folder) in environment_of(int(entry.name))
    ]


def environment_of(pid: int) -> str:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def flip_bit(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    """The first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
