"""An error or a Ctrl-C at any moment of a run leaves nothing open: no process, no port, no shared memory, no
placement."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.agents.test_agent_run import LINKS
from support.interrupting import MOMENTS, SMALL, Injected, break_at, go
from support.running import micro_recipe
from turnwise.engines.remote import fork_server
from turnwise.serve.endpoint import Endpoint
from turnwise.weights.publisher import PREFIX

DRIVEN = [*LINKS, "rollout.max_action_tokens=20"]


@pytest.fixture(autouse=True)
def own_processes(monkeypatch):
    """Each run starts its own processes, and has to end them."""
    monkeypatch.setattr(fork_server, "ACTIVE", [])


def children():
    """Processes below this one and below those, but for multiprocessing's own and zombies that somebody waits for."""
    parents, commands = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, fields = stat.read_text().rsplit(")", 1)
            command = Path(stat.parent, "cmdline").read_bytes()
        except OSError:
            continue
        if fields.split()[0] != "Z":
            parents[int(stat.parent.name)], commands[int(stat.parent.name)] = int(fields.split()[1]), command
    found, front = set(), {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found |= {(pid, commands[pid]) for pid in front if b"turnwise" in commands[pid]}
    return found


def descriptors():
    """What this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return found


def ports():
    """TCP ports that this process listens on."""
    lines, mine = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]], descriptors()
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}


def shared_memory():
    """Folders of published weights that this process has open."""
    return {str(Path(name).parent) for name in descriptors() if Path(name).parent.name.startswith(PREFIX)}


def held():
    return children(), ports(), shared_memory()


def check(tmp_path, monkeypatch, moment, how, settings):
    before, calls = held(), []
    break_at(monkeypatch, moment, how, held, calls)
    with pytest.raises(Injected if how == "error" else asyncio.CancelledError):
        asyncio.run(go(micro_recipe(tmp_path, *SMALL, *settings)))
    assert held() == before
    assert not any(Path(folder).exists() for folder in calls[0][2] - before[2])
    return before, calls[0]


QUICK = {("first evaluation", "error"), ("training", "Ctrl-C"), ("closing", "error")}
"""Each of the others takes seconds to start a process, and shows the same of another moment."""


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param(moment, how, marks=[] if (moment, how) in QUICK else pytest.mark.slow)
        for moment in MOMENTS
        for how in ("error", "Ctrl-C")
    ],
)
def test_an_engine_process_and_its_shared_memory_are_gone(tmp_path, monkeypatch, moment, how):
    before, then = check(tmp_path, monkeypatch, moment, how, ["max_lag=1", "engine.processes=1"])
    assert then[0] > before[0]
    assert then[2] > before[2]


@pytest.mark.parametrize("how", ["error", "Ctrl-C"])
@pytest.mark.parametrize("moment", ["training", "closing"])
def test_the_port_of_the_endpoint_is_gone(tmp_path, monkeypatch, moment, how):
    before, then = check(tmp_path, monkeypatch, moment, how, DRIVEN)
    assert then[1] > before[1]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["engines open", "first evaluation", "training", "closing"])
@pytest.mark.parametrize("how", ["error", "Ctrl-C"])
def test_learner_ranks_are_gone(tmp_path, monkeypatch, moment, how):
    before, then = check(tmp_path, monkeypatch, moment, how, ["cluster.fsdp=2"])
    assert len(then[0]) >= len(before[0]) + 2


def test_what_listens_is_counted():
    endpoint, before = Endpoint("127.0.0.1", 0), ports()
    endpoint.open(SimpleNamespace(model="policy"), "k")
    try:
        assert len(ports()) == len(before) + 1
    finally:
        endpoint.close()
    assert ports() == before
