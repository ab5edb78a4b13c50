"""The cells of benchmarks/faults.py that are about other processes: engines, servers, ranks, nodes and the driver,
each killed, stopped for ever (SIGSTOP) or cut off, on this machine and on a Ray cluster of two nodes.

A cell says within how many seconds the fault has to be noticed, and what the run prints then.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fault_cells import Cell, Seen, lines, warmed
from trial import HERE, Trial, children, command_of, environment_of, kill, wait_for

ANSWER = 10
"""Seconds without a sign of life, in place of 60, so that a cell is short."""
SLACK = 30
"""Seconds more that a busy machine may take."""
KILLED, STALLED = SLACK, ANSWER + 5 + SLACK
"""Seconds within which a fault has to be noticed: a dead process at once, one that is stopped by the next check."""
GROUP_SIZE = 4

LEFT_OUT = "is left out and started again"
BACK = "is used again"
LOST = "rank . of the learner failed"


def others(pattern: str, process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of a run by a pattern for their names."""
    return [child for child in children(process.pid) if re.search(pattern, command_of(child))]


def started(trial: Trial) -> subprocess.Popen[bytes]:
    """A run that has made two steps."""
    process = trial.start()
    wait_for(partial(lines(1), trial), process)
    (trial.folder / "opened").unlink(missing_ok=True)  # by demonstrations and the first evaluation
    wait_for(partial(lines(3), trial), process)
    return process


def warned(trial: Trial, says: str) -> int:
    """How often a run has printed something; of many warnings the screen has the first ones, the run's log all."""
    events = trial.out / "events.log"
    return len(re.findall(says, trial.said)) + len(re.findall(says, events.read_text() if events.exists() else ""))


def noticed(trial: Trial, says: str, process: subprocess.Popen[bytes], within: float) -> str:
    """How long it took until the run printed something, and how long it may take."""
    seconds = wait_for(lambda: warned(trial, says) or process.poll() is not None)
    assert warned(trial, says), f"the run ended with {process.poll()} and did not say {says!r}"
    assert seconds <= within, f"noticed after {seconds:.0f} s, not within {within:g}"
    return f"{seconds:.1f} s, of {within:g} s"


def disturbed(
    trial: Trial,
    pattern: str,
    number: int,
    *,
    goes_on: bool,
    find: Callable[[str, subprocess.Popen[bytes]], list[int]] = others,
    within: float | None = None,
    says: str = "",
) -> Seen:
    """Send a signal to a process of the run. The run goes on, or ends in one line that says which rank was lost."""
    process = started(trial)
    found = find(pattern, process)
    assert found, f"no process {pattern}"
    since = len(trial.said)
    kill(found[-1], number)
    within = within or (KILLED if number == signal.SIGKILL else STALLED)
    seconds = noticed(trial, says or (LEFT_OUT if goes_on else LOST), process, within)
    code = process.wait(600)
    if goes_on:
        assert code == 0, f"exit code {code}"
        return Seen(seconds, f"{went_on(trial)}, exit 0")
    assert code == 1, f"exit code {code}"
    said = [line for line in trial.said[since:].splitlines() if re.search(LOST, line)]
    assert len(said) == 1, said
    wait_for(lambda: not find("^rank|ray::Rank", process), patience=SLACK)
    assert trial.finish() == 0, "it did not resume"
    return Seen(seconds, "exit 1 in one line, resumed")


def went_on(trial: Trial) -> str:
    """What became of the attempts; none may have failed or have been begun anew."""
    bad = sum(line.get(f"status/{name}", 0.0) for line in trial.metrics for name in ("failed", "timed_out"))
    assert not bad, f"{bad:.0f} attempts were lost"
    again = begun_anew(trial)
    assert not again, f"{again} attempts were begun anew"
    return "went on, no attempt begun anew"


def begun_anew(trial: Trial) -> int:
    """How many environments were opened more often than their groups have attempts."""
    from turnwise.runs.archive import archived_steps, read_step

    opened = Counter((trial.folder / "opened").read_text().split())
    steps = archived_steps(trial.out / "archive")
    records = [one for step in steps for one in read_step(trial.out / "archive" / f"step-{step:06d}.parquet")]
    trained = {one.group.task.id for one in records}
    assert trained, "nothing was archived"
    assert trained <= opened.keys(), "the environment did not count"
    return sum(max(0, opened[task] - GROUP_SIZE) for task in trained)


# ---------------------------------------------------------------- the driver


def driver_killed(trial: Trial, pattern: str, nodes: Any = None) -> Seen:
    """All processes of the run end with the one that started them."""
    process = started(trial)
    own = children(process.pid) if nodes is None else nodes.actors(pattern, process)
    assert any(re.search(pattern, command_of(pid)) for pid in own), f"no process {pattern}"
    kill(process.pid)
    process.wait()
    seconds = wait_for(lambda: not any(re.search(pattern, command_of(pid)) for pid in own))
    assert seconds <= KILLED, f"after {seconds:.0f} s some were left"
    assert trial.finish() == 0
    return Seen(f"{seconds:.1f} s, of {KILLED} s", "all its processes ended; resumed")


def driver_stalled(trial: Trial) -> Seen:
    """A driver that was stopped for longer than others may be silent goes on: what it has not read is no silence."""
    process = started(trial)
    kill(process.pid, signal.SIGSTOP)
    time.sleep(2 * ANSWER)
    kill(process.pid, signal.SIGCONT)
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    assert not warned(trial, LEFT_OUT), "it took its own pause for that of others"
    return Seen(f"stopped for {2 * ANSWER} s", f"{went_on(trial)}, exit 0")


# ---------------------------------------------------------------- vLLM servers


class Servers:
    """Two played vLLM servers, each a process of its own."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        before = Trial(trial.folder / "before", *paced(trial), cache=trial.cache)
        process = before.start()
        wait_for(lambda: warmed(before), process)
        kill(process.pid)
        process.wait()
        [weights] = trial.cache.glob("warm-*/config.json")
        self.folder = weights.parent
        self.ports = [free_port() for _ in range(2)]
        self.processes = [self.start(number) for number in range(2)]
        for number in range(2):
            self.wait_until_it_listens(number)
        urls = ",".join(f'"http://localhost:{port}"' for port in self.ports)
        trial.settings = (*trial.settings, "engine.name=vllm", f"engine.vllm.servers=[{urls}]")

    def start(self, number: int) -> subprocess.Popen[bytes]:
        recipe, port = str(self.trial.folder / "recipe.toml"), str(self.ports[number])
        command = [sys.executable, str(HERE / "played_vllm.py"), recipe, str(self.folder), port]
        with open(self.trial.folder / f"server {number}", "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.trial.environment())

    def wait_until_it_listens(self, number: int) -> None:
        log = self.trial.folder / f"server {number}"
        wait_for(lambda: "listens" in log.read_text(), self.processes[number])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def server_lost(trial: Trial, away: int, back: int | None, which: tuple[int, ...] = (1,)) -> Seen:
    """Servers get a signal, and later another one: none for one that is killed, which is started again; with None they
    never come back."""
    with ExitStack() as stack:
        servers = Servers(trial)
        stack.callback(servers.close)
        process = started(trial)
        for number in which:
            kill(servers.processes[number].pid, away)
        seconds = noticed(trial, LEFT_OUT, process, STALLED if away == signal.SIGSTOP else KILLED)
        time.sleep(5.0)
        for number in which if back is not None else ():
            if away == signal.SIGKILL:
                servers.processes[number].wait()
                servers.processes[number] = servers.start(number)
            else:
                kill(servers.processes[number].pid, back or 0)
        if back is not None:
            wait_for(lambda: warned(trial, BACK) >= len(which), process)
        code = process.wait(600)
        assert code == 0, f"exit code {code}"
        outcome = "left out" if back is None else "left out, used again"
        return Seen(seconds, f"{outcome}; {went_on(trial)}, exit 0")


def paced(trial: Trial) -> list[str]:
    return [setting for setting in trial.settings if setting.startswith("env.")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- Ray


class Nodes:
    """A Ray cluster on this machine: a head without CPUs, where the driver is, and two nodes."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.size = {"num_cpus": 2, "object_store_memory": 80 << 20}
        with variables(trial.environment() | QUICK_CHECKS):
            self.cluster = self.patiently(self.head)
        self.nodes = [self.join(), self.join()]
        trial.settings = (*trial.settings, f"cluster.address={self.cluster.address}")

    def head(self) -> Any:
        from ray.cluster_utils import Cluster

        size = {**self.size, "num_cpus": 0, "include_dashboard": False}
        return Cluster(initialize_head=True, head_node_args=size)

    def join(self) -> Any:
        with variables(self.trial.environment() | QUICK_CHECKS):
            return self.patiently(lambda: self.cluster.add_node(**self.size))

    def patiently(self, start: Callable[[], Any]) -> Any:
        """Ray gives a node 30 seconds to start, which a busy machine exceeds."""
        for _ in range(3):
            try:
                with small_agents():
                    return start()
            except Exception as error:
                failure = error
        raise RuntimeError(f"Ray did not start: {failure}")

    def actors(self, pattern: str, process: subprocess.Popen[bytes] | None = None) -> list[int]:
        """Processes of actors by a pattern for their names."""
        found = (pid for node in self.nodes for pid in children(raylet(node)))
        return [pid for pid in found if re.search(pattern, command_of(pid))]

    def with_actor(self, pattern: str) -> Any:
        """The node that has such an actor."""
        return next(
            node for node in self.nodes if any(re.search(pattern, command_of(pid)) for pid in children(raylet(node)))
        )

    def find(self, pattern: str, process: subprocess.Popen[bytes]) -> list[int]:
        return self.actors(pattern)

    def close(self) -> None:
        for pid in processes_of(self.trial.folder):  # a stopped process cannot end
            kill(pid, signal.SIGCONT)
        self.cluster.shutdown()


QUICK_CHECKS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray notices a node that does not answer after about a minute; with these in about 18 seconds."""
NODE_STALLED = 18 + SLACK


@contextmanager
def small_agents() -> Iterator[None]:
    """Nodes whose agents leave out what only a dashboard needs. Ray lets a node die whose agents do not start within 15
    seconds, and on a busy machine the others do not."""
    import ray._private.utils as checks

    before = checks.get_dashboard_dependency_error
    checks.get_dashboard_dependency_error = lambda: ImportError("not wanted")
    try:
        yield
    finally:
        checks.get_dashboard_dependency_error = before


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def processes_of(folder: Path) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and str(folder) in environment_of(pid)]


@contextmanager
def variables(wanted: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def on_ray(trial: Trial, play: Callable[[Trial, Nodes], Seen]) -> Seen:
    """Play a cell on a cluster of its own. At its end no actor of the run is left on the nodes."""
    with ExitStack() as stack:
        nodes = Nodes(trial)
        stack.callback(nodes.close)
        seen = play(trial, nodes)
        mine = "ray::(Rank|Replica|Environment)"
        wait_for(lambda: not nodes.actors(mine), patience=SLACK)
        return seen


def actor_disturbed(trial: Trial, nodes: Nodes, pattern: str, number: int, **how: Any) -> Seen:
    return disturbed(trial, pattern, number, find=nodes.find, **how)


def environment_disturbed(trial: Trial, nodes: Nodes, number: int) -> Seen:
    """Attempts whose environments an actor had fail and are tried again; others get a new actor."""
    process = started(trial)
    kill(nodes.actors("ray::Environment")[-1], number)
    within = KILLED if number == signal.SIGKILL else STALLED
    seconds = noticed(trial, "environment actor . is started again", process, within)
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    return Seen(seconds, "actor started again, its attempts retried; exit 0")


def node_lost(trial: Trial, nodes: Nodes, pattern: str, number: int, joins: bool) -> Seen:
    """All processes of a node get a signal. Replicas are left out, and start on a node that joins; a lost rank ends
    the run, which is resumed once another node is there."""
    process = started(trial)
    node = nodes.with_actor(pattern)
    for pid in [raylet(node), *children(raylet(node))]:
        kill(pid, number)
    ranks = "Rank" in pattern
    within = KILLED if number == signal.SIGKILL else NODE_STALLED
    seconds = noticed(trial, LOST if ranks else LEFT_OUT, process, within)
    nodes.nodes.remove(node)
    if joins:
        nodes.nodes.append(nodes.join())
    if ranks:
        assert process.wait(600) == 1, f"exit code {process.returncode}"
        assert trial.finish() == 0
        return Seen(seconds, "exit 1 in one line, resumed on another node")
    if joins:
        wait_for(lambda: warned(trial, BACK), process)
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    where = "started again on a node that joined" if joins else "left out"
    return Seen(seconds, f"{where}; {went_on(trial)}, exit 0")


def driver_on_ray(trial: Trial, nodes: Nodes, number: int) -> Seen:
    return driver_killed(trial, "ray::(Rank|Replica)", nodes) if number == signal.SIGKILL else driver_stalled(trial)


# ---------------------------------------------------------------- the matrix

LIMIT = f"cluster.answer_seconds={ANSWER}"
LONG = ("rollout.limits.call_seconds=300", "env.0.settings.pace=0.3")
"""Steps last long enough for a fault to happen in one."""
COUNTED = (*LONG, "env.0.settings.counts=true")
LAGGED = ("max_lag=2", LIMIT, *COUNTED)
ENGINES = ("engine.processes=2", *LAGGED)
RANKS = ("cluster.fsdp=2", LIMIT, *COUNTED)
TOGETHER = ("engine.processes=2", "cluster.fsdp=2", *LAGGED)
RAY = ("cluster.placement=separate_nodes", "cluster.fsdp=2", "cluster.replicas=2", "cluster.cpus=0.5", *LAGGED)
APART = ("cluster.placement=disaggregated", "cluster.replicas=3", "cluster.cpus=1", *LAGGED)
"""A rank and a replica on one node, two replicas on the other."""
ACTORS = ("cluster.placement=colocated", "cluster.cpus=0.5", "env.0.concurrency.actors=2", *LAGGED)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
REFUSE, LISTEN = signal.SIGUSR1, signal.SIGUSR2


def ray_cell(what: str, how: str, play: Callable[..., Seen], settings: tuple[str, ...], **given: Any) -> Cell:
    return cell(what, how, partial(on_ray, play=partial(play, **given)), settings)


def cell(what: str, how: str, play: Callable[..., Seen], settings: tuple[str, ...], **given: Any) -> Cell:
    return Cell(f"{what}: {how}", "a step", partial(play, **given), settings, same=False)


ENGINE, RANK = {"pattern": "^engine process", "goes_on": True}, {"pattern": "^rank", "goes_on": False}
REPLICA, RAY_RANK = {"pattern": "ray::Replica", "goes_on": True}, {"pattern": "ray::Rank", "goes_on": False}

CLUSTER_CELLS = (
    cell("engine process", "kill -9", disturbed, ENGINES, number=KILL, **ENGINE),
    cell("engine process", "stall", disturbed, ENGINES, number=STOP, **ENGINE),
    cell("process rank", "kill -9", disturbed, RANKS, number=KILL, **RANK),
    cell("process rank", "stall", disturbed, RANKS, number=STOP, **RANK),
    cell("driver of processes", "kill -9", driver_killed, TOGETHER, pattern="^rank|^engine process"),
    cell("driver of processes", f"stall of {2 * ANSWER} s", driver_stalled, TOGETHER),
    cell("vLLM server", "kill -9, started again", server_lost, LAGGED, away=KILL, back=0),
    cell("vLLM server", "kill -9, not started again", server_lost, LAGGED, away=KILL, back=None),
    cell("vLLM server", "stall, then goes on", server_lost, LAGGED, away=STOP, back=signal.SIGCONT),
    cell("vLLM server", "stall", server_lost, LAGGED, away=STOP, back=None),
    cell("vLLM server", "partition (refused), then back", server_lost, LAGGED, away=REFUSE, back=LISTEN),
    cell("both vLLM servers", "partition, then back", server_lost, LAGGED, away=REFUSE, back=LISTEN, which=(0, 1)),
    ray_cell("Ray replica", "kill -9", actor_disturbed, RAY, number=KILL, **REPLICA),
    ray_cell("Ray replica", "stall", actor_disturbed, RAY, number=STOP, **REPLICA),
    ray_cell("Ray rank", "kill -9", actor_disturbed, RAY, number=KILL, **RAY_RANK),
    ray_cell("Ray rank", "stall", actor_disturbed, RAY, number=STOP, **RAY_RANK),
    ray_cell("Ray environment actor", "kill -9", environment_disturbed, ACTORS, number=KILL),
    ray_cell("Ray environment actor", "stall", environment_disturbed, ACTORS, number=STOP),
    ray_cell("Ray node of all replicas", "kill -9", node_lost, RAY, pattern="ray::Replica", number=KILL, joins=True),
    ray_cell("Ray node of all replicas", "stall", node_lost, RAY, pattern="ray::Replica", number=STOP, joins=True),
    ray_cell("Ray node of ranks", "kill -9", node_lost, RAY, pattern="ray::Rank", number=KILL, joins=True),
    ray_cell("Ray node of ranks", "stall", node_lost, RAY, pattern="ray::Rank", number=STOP, joins=True),
    ray_cell("driver on Ray", "kill -9", driver_on_ray, RAY, number=KILL),
    ray_cell("driver on Ray", f"stall of {2 * ANSWER} s", driver_on_ray, RAY, number=STOP),
)
