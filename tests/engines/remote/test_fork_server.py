"""Children that are forked from a process that has imported what they need."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.engines.remote import fork_server
from turnwise.engines.remote.child import Child
from turnwise.engines.remote.fork_server import ForkedProcess, forked_children

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def server(monkeypatch):
    monkeypatch.setattr(fork_server, "ACTIVE", [])
    with forked_children(["json.tool"]):
        yield fork_server.ACTIVE[0]


def tell(line, look):
    line.sendall(repr(look()).encode())
    line.recv(1)


def told(look):
    """What a child finds."""
    child = Child("one")
    child.line.settimeout(PATIENCE)
    child.work(tell, look)
    found = child.line.recv(1 << 16).decode()
    child.line.close()
    child.end(PATIENCE)
    assert child.code == 0
    return found


def imported():
    return "json.tool" in sys.modules, os.getppid(), Path("/proc/self/comm").read_text()


def surroundings():
    return os.getcwd(), os.environ.get("ONE"), os.environ.get("GONE"), len(os.listdir("/proc/self/fd"))


def test_a_child_has_the_modules_of_the_server_and_a_name_of_its_own(server):
    assert told(imported) == repr((True, server.process.pid, "one\n"))


def test_a_child_has_the_folder_and_the_variables_of_the_moment_and_nobodys_descriptors(tmp_path, monkeypatch):
    monkeypatch.setenv("GONE", "1")
    first = told(surroundings)
    others = [Child(f"other {number}") for number in range(3)]
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("ONE", "a=b\nc")
    monkeypatch.chdir(tmp_path)
    count = first.rpartition(", ")[2]
    assert told(surroundings) == f"({str(tmp_path)!r}, 'a=b\\nc', None, {count}"
    for other in others:
        other.line.close()
        other.end(PATIENCE)


def test_a_child_prints_where_the_run_prints(capfd):
    told(lambda_that_prints)
    assert "from the child" in capfd.readouterr().out


def lambda_that_prints():
    print("from the child", flush=True)


def test_variables_that_libraries_read_at_import_need_an_interpreter_of_ones_own(monkeypatch, server):
    told(imported)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    child = Child("one")
    assert not isinstance(child.process, ForkedProcess)
    child.line.close()
    child.end(PATIENCE)


def fail():
    raise RuntimeError("as it must")


def test_an_error_in_a_child_is_printed_and_ends_it(capfd):
    child = Child("one")
    child.work(tell, fail)
    assert child.process.wait(PATIENCE) == 1
    child.line.close()
    child.end(PATIENCE)
    assert "RuntimeError: as it must" in capfd.readouterr().err


def test_children_of_a_server_that_was_killed_are_dead_and_the_next_is_an_interpreter_of_its_own(server):
    child = Child("one")
    server.process.send_signal(signal.SIGKILL)
    assert child.process.wait(PATIENCE) == -signal.SIGKILL
    server.process.wait(PATIENCE)
    other = Child("other")
    assert isinstance(other.process, subprocess.Popen)
    for one in (child, other):
        one.line.close()
        one.end(PATIENCE)


def test_nothing_starts_before_it_is_needed(server):
    assert server.process is None


def test_the_server_ends_with_its_context(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(fork_server, "ACTIVE", [])
        with forked_children([]):
            child = Child("one")
            pid = fork_server.ACTIVE[0].process.pid
    assert child.process.wait(PATIENCE) == -signal.SIGKILL
    assert not os.path.exists(f"/proc/{pid}")
    child.line.close()
    child.end(PATIENCE)
