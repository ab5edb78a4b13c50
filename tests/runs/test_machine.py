"""What a run records of its machine."""

import getpass
import json
import platform
import socket
import subprocess

import pytest

import turnwise
from turnwise.runs.machine import commit_of, cpu_model, installed, read_machines, record_machine


def test_a_start_is_recorded_and_the_same_machine_only_once(tmp_path):
    path = tmp_path / "machine.json"
    record_machine(path, 0, ["GPU A"])
    before = path.read_bytes()
    record_machine(path, 20, ["GPU A"])
    assert path.read_bytes() == before
    [entry] = read_machines(path)
    assert (entry["step"], entry["turnwise"], entry["gpus"]) == (0, turnwise.__version__, ["GPU A"])
    assert entry["python"] == platform.python_version()
    assert {"torch", "numpy"} <= entry["packages"].keys()
    assert entry["cores"] >= 1


def test_another_machine_is_added_and_what_is_made_again_is_replaced(tmp_path):
    path = tmp_path / "machine.json"
    for step, gpus in ((0, []), (20, ["A"]), (40, ["B"]), (40, ["C"]), (30, ["D"])):
        record_machine(path, step, gpus)
    assert [(entry["step"], entry["gpus"]) for entry in read_machines(path)] == [(0, []), (20, ["A"]), (30, ["D"])]


def test_it_names_no_host_no_user_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    record_machine(tmp_path / "machine.json", 0, [])
    written = (tmp_path / "machine.json").read_text()
    values = json.dumps(list(json.loads(written)[0].values()))
    assert str(tmp_path) not in written
    assert platform.node() not in values
    assert getpass.getuser() not in values or getpass.getuser() in ("a", "root")
    assert "/" not in values


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1, {}]", b"\xff", b"[" * 100_000])
def test_a_file_that_cannot_be_read_is_written_again(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    assert read_machines(path) == []
    record_machine(path, 3, [])
    assert [entry["step"] for entry in read_machines(path)] == [3]


def test_the_commit_is_that_of_the_source(tmp_path):
    package = tmp_path / "src" / "turnwise"
    package.mkdir(parents=True)
    (package / "a.py").write_text("")
    assert commit_of(package) == ""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit_of(package)
    assert len(clean) == 40
    (package / "a.py").write_text("changed")
    assert commit_of(package) == clean + "+"
    assert commit_of(tmp_path / "site-packages" / "turnwise") == ""  # installed inside somebody's repository


def test_no_git_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()

    def absent(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", absent)
    assert commit_of(tmp_path / "src" / "turnwise") == ""


def test_the_processor_is_what_it_calls_itself(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast 9000\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Fast 9000"
    assert cpu_model(tmp_path / "absent") == (platform.processor() or platform.machine())


def test_packages_that_are_not_there_are_left_out():
    assert installed(["numpy", "no-such-package"]).keys() == {"numpy"}
