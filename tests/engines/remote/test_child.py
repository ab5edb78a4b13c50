"""Processes that we start: they hear no key of the terminal, are told what to do after they have started, and end with
the one that started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from support.paths import TESTS
from turnwise.engines.remote import fork_server
from turnwise.engines.remote.child import Child
from turnwise.engines.remote.fork_server import forked_children

PATIENCE = 60.0
LARGE = bytes(8 << 20)
"""More than any pipe or socket holds."""


@pytest.fixture(params=["forked", "interpreter"], autouse=True)
def how(request, monkeypatch):
    """Each way to start a child."""
    monkeypatch.setattr(fork_server, "ACTIVE", [])
    with forked_children(["json"]) if request.param == "forked" else nullcontext():
        yield request.param


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def echo(line, *arguments):
    line.sendall(len(arguments[0]).to_bytes(8, "little"))
    line.recv(1)


def test_a_child_is_in_another_session_and_gets_no_signals_of_the_run():
    child = Child("one")
    assert os.getsid(child.pid) != os.getsid(0)
    assert until(lambda: os.getsid(child.pid) == child.pid)
    child.work(echo, LARGE)
    child.line.settimeout(PATIENCE)
    assert int.from_bytes(child.line.recv(8), "little") == len(LARGE)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    with pytest.raises(TimeoutError):
        child.line.settimeout(0.3)
        child.line.recv(1)
    child.line.close()
    child.end(PATIENCE)
    assert child.code == 0


def test_sending_to_a_dead_child_fails_and_blocks_nothing():
    child = Child("one")
    child.process.kill()
    with pytest.raises(OSError):
        child.work(echo, LARGE)
    child.line.close()
    child.end(PATIENCE)
    assert child.code == -signal.SIGKILL


PARENT = """
import sys, time; sys.path[:0] = {path!r}
from engines.remote.test_child import echo
from turnwise.engines.remote.child import Child
from turnwise.engines.remote.fork_server import forked_children
from contextlib import nullcontext
with forked_children([]) if {how!r} == "forked" else nullcontext():
    child = Child("one")
    print(child.pid, flush=True)
    if {told!r}:
        child.work(echo, b"")
    time.sleep(600)
"""


@pytest.mark.parametrize("told", [False, True])
def test_a_child_ends_with_the_one_that_started_it(told, how):
    script = PARENT.format(path=[str(TESTS), *sys.path], told=told, how=how)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_alive(child))


def test_no_other_process_has_the_socket_of_a_child():
    one, other = Child("one"), Child("other")
    one.line.close()  # which the other would hold open, if it had inherited it
    one.end(PATIENCE)
    assert one.code == 1
    assert isinstance(other.line, socket.socket)
    other.line.close()
    other.end(PATIENCE)
