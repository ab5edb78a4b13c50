"""The lock of a run folder, between processes and within one."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from turnwise.runs.lock import NAME, InUse, owned

HOLDER = """
import os, sys, time
from pathlib import Path
from turnwise.runs.lock import owned
with owned(Path(sys.argv[1])):
    if sys.argv[2] == "with a child" and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
        os._exit(0)
    os.write(1, b"held\\n")
    sys.stdin.readline()
"""


@pytest.fixture
def hold(tmp_path):
    """Start a process that owns the folder; it lets go when a line is written to it."""
    started = []

    def start(how="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, sorted(process.stdout.readline().strip() for _ in range(2 if how == "with a child" else 1))

    yield start
    for process in started:
        process.kill()
        process.wait()


def is_free(folder):
    """Whether another process could own the folder."""
    code = HOLDER.replace("sys.stdin.readline()", "pass")
    return subprocess.run([sys.executable, "-c", code, str(folder), "alone"], capture_output=True).returncode == 0


def test_a_second_process_learns_who_has_the_lock(tmp_path, hold):
    process, _ = hold()
    written = (tmp_path / NAME).read_bytes()
    holder = json.loads(written)
    with pytest.raises(InUse) as error, owned(tmp_path):
        raise AssertionError
    assert str(error.value) == (
        f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()} since {holder['since']}; "
        "wait until it ends, or stop it"
    )
    assert (tmp_path / NAME).read_bytes() == written
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    process.communicate("go\n")
    with owned(tmp_path):
        pass


def test_it_dies_with_its_process_also_where_a_child_lives_on(tmp_path, hold):
    process, (child, _) = hold("with a child")
    try:
        process.kill()
        process.wait()
        with owned(tmp_path):
            pass
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_one_process_cannot_take_it_twice_and_does_not_lose_it_by_trying(tmp_path):
    with owned(tmp_path):
        for _ in range(2):
            with pytest.raises(InUse, match=f"process {os.getpid()} on"), owned(tmp_path):
                raise AssertionError
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    with owned(tmp_path):
        pass


def test_it_is_let_go_where_the_block_raises(tmp_path):
    with pytest.raises(KeyboardInterrupt), owned(tmp_path):
        raise KeyboardInterrupt
    assert is_free(tmp_path)


def test_two_folders_have_two_locks(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with owned(tmp_path / "a"), owned(tmp_path / "b"):
        pass


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b'{"host": 1}'])
def test_a_lock_without_the_name_of_its_owner(tmp_path, hold, content):
    hold()
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(InUse, match="in use by another process; wait until it ends"), owned(tmp_path):
        raise AssertionError


def test_a_file_that_its_owner_took_away_is_not_owned(tmp_path, monkeypatch):
    """A start that fails removes its folder's lock; who waited for that one must not share the folder with the next."""
    lock, opened = fcntl.lockf, []

    def late(handle, how):
        if not opened:
            (tmp_path / NAME).unlink()
        opened.append(handle)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with owned(tmp_path):
        assert len(opened) == 2
        assert not is_free(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog, number):
    def refuse(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with owned(tmp_path):
        pass
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the file system of {tmp_path} has no locks ({os.strerror(number)}): see to it yourself that no other process "
        "trains there"
    )


def test_a_folder_of_another_user_is_refused_in_one_line(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot write to .* \(Permission denied\); only its owner"), owned(tmp_path):
        raise AssertionError


def test_other_errors_are_not_taken_for_a_missing_lock(tmp_path, monkeypatch):
    def fail(handle, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match="Input/output"), owned(tmp_path):
        raise AssertionError
