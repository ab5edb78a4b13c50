"""Processes that run other people's code: how they start, and how they end for certain."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def start_child(command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """A process with these environment variables and no others. Its input and output go nowhere, unless `options` of
    Popen say otherwise.

    It gets its own session: a person who presses Ctrl-C stops the run, which then ends this process."""
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=env, start_new_session=True, **{**nowhere, **options})


def end_child(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait that long for a process that should end by itself, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_child(process)


def kill_child(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and reap it."""
    process.kill()
    process.wait()
