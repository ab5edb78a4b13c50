"""The cells of benchmarks/faults.py that are about other processes: engines, servers, ranks, nodes and the driver,
each killed, stopped for ever (SIGSTOP) or cut off, on this machine and on a Ray cluster of two nodes.

A cell says within how many seconds the fault has to be noticed, and what the run prints then.
"""

from __future__ import annotations

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
from typing import Any

from fault_cells import Cell, Seen, lines, warmed
from ray_nodes import CutNodes, Nodes, of_actors
from trial import HERE, Trial, children, command_of, kill, wait_for

ANSWER = 10
"""Seconds without a sign of life, in place of 60, so that a cell is short."""
SLACK = 3 * ANSWER
"""Seconds more that a busy machine may take."""
KILLED, STALLED = SLACK, 2 * ANSWER + SLACK
"""Seconds within which a fault has to be noticed: a dead process at once, one that is stopped by the next check."""
HELD = 3.0
"""Seconds in which a run hands out groups."""
GROUP_SIZE = 4

LEFT_OUT = "is left out and started again"
BACK = "is used again"
LOST = "rank . of the learner failed"
AGAIN = r"rollout worker . is started again"


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


@contextmanager
def held(trial: Trial) -> Iterator[None]:
    """Environments answer nothing meanwhile: else a run may be over before something is used again."""
    (trial.folder / "hold").touch()
    try:
        yield
    finally:
        (trial.folder / "hold").unlink()


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
    assert not unmade(trial), f"{unmade(trial):.0f} attempts were lost"
    again = begun_anew(trial)
    assert not again, f"{again} attempts were begun anew"
    return "went on, no attempt begun anew"


def unmade(trial: Trial) -> float:
    """How many attempts have failed or timed out."""
    return sum(line.get(f"status/{name}", 0.0) for line in trial.metrics for name in ("failed", "timed_out"))


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


# ---------------------------------------------------------------- rollout workers


def worker_lost(trial: Trial, number: int, find: Callable[[str, subprocess.Popen[bytes]], list[int]] = others) -> Seen:
    """A worker has the environments of its groups, which begin anew; no attempt fails for that."""
    process = started(trial)
    with held(trial):
        time.sleep(HELD)  # by now each worker has groups
        kill(find("^rollout worker", process)[-1], number)
        seconds = noticed(trial, AGAIN, process, KILLED if number == signal.SIGKILL else STALLED)
    return worker_went_on(trial, seconds, process)


def worker_went_on(trial: Trial, seconds: str, process: subprocess.Popen[bytes]) -> Seen:
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    assert not unmade(trial), f"{unmade(trial):.0f} attempts were lost"
    anew = re.findall(AGAIN + r".* (\d+) groups of it begin anew", (trial.out / "events.log").read_text())
    assert len(anew) == 1, f"{len(anew)} workers were started again"
    assert anew[0] != "0", "it had no group"
    return Seen(seconds, f"worker started again, {anew[0]} groups begun anew; went on, exit 0")


# ---------------------------------------------------------------- the driver


def driver_killed(trial: Trial, pattern: str, nodes: Any = None) -> Seen:
    """All processes of the run end with the one that started them."""
    process = started(trial)
    own = children(process.pid) if nodes is None else nodes.find(pattern, process)
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

    def bring_back(self, number: int, signal_back: int) -> None:
        """By a signal, or with 0 by a new process."""
        if signal_back:
            kill(self.processes[number].pid, signal_back)
        else:
            self.processes[number].wait()
            self.processes[number] = self.start(number)

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
        if back is not None:
            with held(trial):
                time.sleep(5.0)
                for number in which:
                    servers.bring_back(number, back)
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


NODE_STALLED = 2 * ANSWER + SLACK
"""Ray's own checks of a node take about 18 s here."""


def on_ray(trial: Trial, play: Callable[[Trial, Nodes], Seen], kind: type[Nodes] = Nodes) -> Seen:
    """Play a cell on a cluster of its own. At its end no process of the run is left, on nodes that are there and on
    those that were lost and go on."""
    with ExitStack() as stack:
        nodes = kind(trial)
        stack.callback(nodes.close)
        nodes.start()
        seen = play(trial, nodes)
        nodes.wake_lost()
        wait_for(lambda: not of_actors(trial.folder), patience=2 * SLACK)
        return seen


def actor_disturbed(trial: Trial, nodes: Nodes, pattern: str, number: int, **how: Any) -> Seen:
    return disturbed(trial, pattern, number, find=nodes.find, **how)


def worker_on_ray(trial: Trial, nodes: Nodes, number: int) -> Seen:
    return worker_lost(trial, number, nodes.find)


def environment_disturbed(trial: Trial, nodes: Nodes, number: int) -> Seen:
    """Attempts whose environments an actor had fail and are tried again; others get a new actor."""
    process = started(trial)
    kill(nodes.actors("ray::Environment")[-1], number)
    within = KILLED if number == signal.SIGKILL else STALLED
    seconds = noticed(trial, "environment actor . is started again", process, within)
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    return Seen(seconds, "actor started again, its attempts retried; exit 0")


def node_lost(trial: Trial, nodes: Nodes, pattern: str, number: int, joins: bool = True) -> Seen:
    """All processes of a node get a signal, or it is cut off. Replicas are left out, and start on a node that joins; a
    lost rank ends the run, which is resumed once another node is there."""
    process = started(trial)
    nodes.lose(nodes.with_actor(pattern, without="" if joins else "ray::Rank"), number)
    ranks = "Rank" in pattern
    within = KILLED if number == signal.SIGKILL else NODE_STALLED
    seconds = noticed(trial, LOST if ranks else LEFT_OUT, process, within)
    if ranks:
        nodes.nodes.append(nodes.join())
        assert process.wait(600) == 1, f"exit code {process.returncode}"
        assert trial.finish() == 0
        return Seen(seconds, "exit 1 in one line, resumed on another node")
    if joins:
        with held(trial):
            nodes.nodes.append(nodes.join())
            wait_for(lambda: warned(trial, BACK), process)
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    where = "started again on a node that joined" if joins else "left out"
    return Seen(seconds, f"{where}; {went_on(trial)}, exit 0")


def node_of_worker_lost(trial: Trial, nodes: Nodes, number: int) -> Seen:
    """A worker starts on another node, and its groups begin anew there."""
    process = started(trial)
    with held(trial):
        time.sleep(HELD)
        nodes.lose(nodes.with_actor("^rollout worker", without="ray::Rank"), number)
        seconds = noticed(trial, AGAIN, process, NODE_STALLED)
        nodes.nodes.append(nodes.join())
    return worker_went_on(trial, seconds, process)


def driver_on_ray(trial: Trial, nodes: Nodes, number: int) -> Seen:
    return driver_killed(trial, "ray::(Rank|Replica)", nodes) if number == signal.SIGKILL else driver_stalled(trial)


# ---------------------------------------------------------------- the matrix

LIMIT = f"cluster.answer_seconds={ANSWER}"
LONG = ("rollout.limits.call_seconds=300", "env.0.settings.pace=0.3")
"""Steps last long enough for a fault to happen in one."""
COUNTED = (*LONG, "env.0.settings.counts=true")
LAGGED = ("max_lag=2", LIMIT, *COUNTED)
ENGINES = ("engine.processes=2", *LAGGED)
WORKERS = ("cluster.rollout_workers=2", "rollout.limits.blocked_seconds=5", "max_lag=2", *COUNTED)
"""A worker that says nothing is lost after 5 + 15 seconds, which is twice `ANSWER`."""
RANKS = ("cluster.fsdp=2", LIMIT, *COUNTED)
TOGETHER = ("engine.processes=2", "cluster.fsdp=2", *LAGGED)
RAY = ("cluster.placement=separate_nodes", "cluster.fsdp=2", "cluster.replicas=2", "cluster.cpus=0.5", *LAGGED)
APART = ("cluster.placement=disaggregated", "cluster.replicas=3", "cluster.cpus=1", *LAGGED)
"""A rank and a replica on one node, two replicas on the other."""
ACTORS = ("cluster.placement=colocated", "cluster.cpus=0.5", "env.0.concurrency.actors=2", *LAGGED)
RAY_WORKERS = ("cluster.placement=colocated", "cluster.cpus=0.5", LIMIT, *WORKERS)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
REFUSE, LISTEN = signal.SIGUSR1, signal.SIGUSR2
CUT = 0
"""No signal."""


def ray_cell(
    what: str, how: str, play: Callable[..., Seen], settings: tuple[str, ...], nodes: type[Nodes] = Nodes, **given: Any
) -> Cell:
    return cell(what, how, partial(on_ray, play=partial(play, **given), kind=nodes), settings)


def cell(what: str, how: str, play: Callable[..., Seen], settings: tuple[str, ...], **given: Any) -> Cell:
    return Cell(f"{what}: {how}", "a step", partial(play, **given), settings, same=False)


ENGINE, RANK = {"pattern": "^engine process", "goes_on": True}, {"pattern": "^rank", "goes_on": False}
REPLICA, RAY_RANK = {"pattern": "ray::Replica", "goes_on": True}, {"pattern": "ray::Rank", "goes_on": False}

CLUSTER_CELLS = (
    cell("engine process", "kill -9", disturbed, ENGINES, number=KILL, **ENGINE),
    cell("engine process", "stall", disturbed, ENGINES, number=STOP, **ENGINE),
    cell("process rank", "kill -9", disturbed, RANKS, number=KILL, **RANK),
    cell("process rank", "stall", disturbed, RANKS, number=STOP, **RANK),
    cell("rollout worker", "kill -9", worker_lost, WORKERS, number=KILL),
    cell("rollout worker", "stall", worker_lost, WORKERS, number=STOP),
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
    ray_cell("Ray rollout worker", "kill -9", worker_on_ray, RAY_WORKERS, number=KILL),
    ray_cell("Ray rollout worker", "stall", worker_on_ray, RAY_WORKERS, number=STOP),
    ray_cell("Ray node of all replicas", "kill -9", node_lost, RAY, number=KILL, pattern="ray::Replica"),
    ray_cell("Ray node of all replicas", "stall", node_lost, RAY, number=STOP, pattern="ray::Replica"),
    ray_cell("Ray node of all replicas", "partition", node_lost, RAY, CutNodes, number=CUT, pattern="ray::Replica"),
    ray_cell(
        "Ray node of some replicas", "kill -9", node_lost, APART, number=KILL, pattern="ray::Replica", joins=False
    ),
    ray_cell("Ray node of ranks", "kill -9", node_lost, RAY, number=KILL, pattern="ray::Rank"),
    ray_cell("Ray node of ranks", "stall", node_lost, RAY, number=STOP, pattern="ray::Rank"),
    ray_cell("Ray node of ranks", "partition", node_lost, RAY, CutNodes, number=CUT, pattern="ray::Rank"),
    ray_cell("Ray node of a rollout worker", "partition", node_of_worker_lost, RAY_WORKERS, CutNodes, number=CUT),
    ray_cell("driver on Ray", "kill -9", driver_on_ray, RAY, number=KILL),
    ray_cell("driver on Ray", f"stall of {2 * ANSWER} s", driver_on_ray, RAY, number=STOP),
)
