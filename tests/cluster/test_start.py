"""A signal while the processes of a run start: all of it ends, whoever gets the signal, and nothing is left."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.paths import TESTS
from support.running import micro_toml
from turnwise.weights import publisher
from turnwise.weights.shared_memory import SHARED_MEMORY

PATIENCE = 90.0

RANKS = """
import signal, sys; sys.path[:0] = {path!r}
from cluster.test_start import Large
from turnwise.cluster.processes import ProcessRanks
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: None)  # as in a run, which means to stop when it can
    ProcessRanks(2, Large())
"""


class Large:
    """What makes no learner, and does not fit into a pipe."""

    def __init__(self):
        self.model = bytes(64 << 20)

    def __call__(self, prepare, reduce):
        raise RuntimeError(f"was told {len(self.model)} bytes")


def processes():
    """(pid, parent, session) of all that run."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if words[0] != "Z":
            yield int(stat.parent.name), int(words[1]), int(words[3])


def descendants(pid):
    found = {pid}
    while more := {child for child, parent, _ in processes() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids):
    return {pid for pid, _, _ in processes()} & set(pids)


def wait_until(condition, process=None):
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        assert process is None or process.poll() is None, "it ended too early"
        time.sleep(0.02)
    assert condition()


def ended(process):
    """The code of a process that has to end, and what it said."""
    try:
        said, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        for pid in descendants(process.pid) | {process.pid}:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        raise AssertionError("it hangs") from None
    return process.returncode, said, errors


@pytest.mark.slow
def test_ctrl_c_while_ranks_start_does_not_reach_them(tmp_path):
    """Killed in the middle of their start, they would leave the run writing to a pipe that nobody reads, for good."""
    script = tmp_path / "start.py"
    script.write_text(RANKS.format(path=[str(TESTS), *sys.path]))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: descendants(process.pid), process)
    children = descendants(process.pid)
    for _ in range(10):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        time.sleep(0.1)
        children |= descendants(process.pid)
    code, _, errors = ended(process)
    assert code in (1, -signal.SIGINT)  # the last signals may come while the interpreter ends
    assert f"was told {64 << 20} bytes" in errors
    wait_until(lambda: not alive(children))


def left_in_memory():
    """Published weights whose owner has ended."""
    found = set()
    for lock in SHARED_MEMORY.glob(f"{publisher.PREFIX}*/{publisher.LOCK}"):
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.add(lock.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("whom", ["group", "parent"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [0.0, 0.5, 1.5, 4.0, 10.0])
def test_a_signal_at_any_moment_of_the_start_of_ranks_and_engines_ends_the_run(tmp_path, whom, number, moment):
    before = left_in_memory()
    asked = ["cluster.fsdp=2", "engine.processes=2", "max_lag=1", "sft.updates=0", "steps=2000"]
    command = [
        sys.executable,
        "-m",
        "turnwise.cli",
        "train",
        str(micro_toml(tmp_path)),
        f"out={tmp_path / 'run'}",
    ]
    process = subprocess.Popen(
        [*command, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: descendants(process.pid), process)
    time.sleep(moment)
    children = descendants(process.pid)
    (os.killpg if whom == "group" else os.kill)(process.pid, number)
    code, said, errors = ended(process)
    assert code == 130, errors
    assert "stop" in said
    assert "Traceback" not in errors
    wait_until(lambda: not alive(children))
    assert left_in_memory() <= before
