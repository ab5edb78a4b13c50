"""Ray clusters of several nodes on this machine for benchmarks/cluster_cells.py: nodes that can be killed, stopped for
ever (SIGSTOP) and cut off.

    python benchmarks/ray_nodes.py ADDRESS IP CPUS BYTES    one node, until its process ends
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_cells import Unavailable
from trial import Trial, children, command_of, environment_of, kill

CPUS, STORE = 2, 80 << 20
PATIENCE = 120.0
"""Seconds that a node may take to start on a busy machine."""
QUICK_CHECKS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray notices a node that does not answer after about a minute; with these in about 18 seconds."""


@dataclass(frozen=True)
class Node:
    """A node besides the head."""

    pid: int
    """Of the process that has started all others of the node."""
    link: str = ""
    """The network device by which others reach it."""

    @property
    def processes(self) -> list[int]:
        return [self.pid, *children(self.pid)]


class Nodes:
    """A Ray cluster on this machine: a head without CPUs, where the driver is, and two nodes."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.nodes: list[Node] = []
        self.lost: list[int] = []
        """Processes of a node that was lost."""
        self.cluster: Any = None

    def start(self) -> None:
        with variables(self.trial.environment() | QUICK_CHECKS):
            self.cluster = patiently(self.head)
        self.nodes = [self.join(), self.join()]
        self.trial.settings = (*self.trial.settings, f"cluster.address={self.cluster.address}")

    def head(self, **named: Any) -> Any:
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
        return Cluster(initialize_head=True, head_node_args={**size, **named})

    def join(self) -> Node:
        """One more node."""
        with variables(self.trial.environment() | QUICK_CHECKS):
            made = patiently(lambda: self.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE))
        return Node(int(made.all_processes["raylet"][0].process.pid))

    def actors(self, pattern: str) -> list[int]:
        """Processes of actors by a pattern for their names."""
        found = (pid for node in self.nodes for pid in node.processes)
        return [pid for pid in found if re.search(pattern, command_of(pid))]

    def with_actor(self, pattern: str, without: str = "") -> Node:
        """A node that has such an actor, and none of another kind."""
        for node in reversed(self.nodes):
            commands = "\n".join(command_of(pid) for pid in node.processes)
            if re.search(pattern, commands, re.MULTILINE) and not (without and re.search(without, commands)):
                return node
        raise AssertionError(f"no node has {pattern}")

    def find(self, pattern: str, process: subprocess.Popen[bytes]) -> list[int]:
        return self.actors(pattern)

    def lose(self, node: Node, number: int) -> None:
        """All processes of a node get a signal."""
        self.nodes.remove(node)
        self.lost = node.processes
        for pid in self.lost:
            kill(pid, number)

    def wake_lost(self) -> None:
        """A node that was lost is there again, if it can be: what it still runs is of no use to anybody."""
        for pid in self.lost:
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for pid in processes_of(self.trial.folder):  # a stopped process cannot end
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGCONT)
        if self.cluster is not None:
            self.cluster.shutdown()
        end = time.monotonic() + PATIENCE
        while processes_of(self.trial.folder) and time.monotonic() < end:  # Ray's own take a while
            time.sleep(0.1)


class CutNodes(Nodes):
    """Nodes with a network of their own each (Linux' namespaces, which take root), so that one of them can be cut off:
    its packets are lost, and its processes go on."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.name, self.count = f"tw{os.getpid() % 100_000}", 0
        self.spaces: list[str] = []
        self.cut = ""
        """The device of the node that is cut off."""

    def start(self) -> None:
        try:
            call("ip", "link", "add", self.name, "type", "bridge")
        except (OSError, subprocess.CalledProcessError):
            raise Unavailable("needs the right to make networks") from None
        call("ip", "address", "add", f"{NETWORK}.1/24", "dev", self.name)
        call("ip", "link", "set", self.name, "up")
        super().start()

    def head(self, **named: Any) -> Any:
        return super().head(node_ip_address=f"{NETWORK}.1", **named)

    def join(self) -> Node:
        self.count += 1
        space, link, address = f"{self.name}-{self.count}", f"{self.name}v{self.count}", f"{NETWORK}.{1 + self.count}"
        call("ip", "netns", "add", space)
        self.spaces.append(space)
        call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        call("ip", "link", "set", link, "master", self.name, "up")
        inside = ("ip", "-n", space)
        call(*inside, "link", "set", "lo", "up")
        call(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        call(*inside, "link", "set", "eth0", "up")
        command = ["ip", "netns", "exec", space, sys.executable, __file__, self.cluster.address, address]
        with open(self.trial.folder / f"node {self.count}", "wb") as log:
            process = subprocess.Popen(
                [*command, str(CPUS), str(STORE)],
                stdout=log,
                stderr=log,
                env=self.trial.environment() | QUICK_CHECKS,
                start_new_session=True,
            )
        self.wait_until_it_is_there(address, process)
        return Node(process.pid, link)

    def wait_until_it_is_there(self, address: str, process: subprocess.Popen[bytes]) -> None:
        said = Path(self.trial.folder / f"node {self.count}")
        end = time.monotonic() + PATIENCE
        while "Ray runtime started" not in said.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"Ray did not start at {address}: {said.read_text(errors='replace')[-1000:]}")
            time.sleep(0.1)

    def lose(self, node: Node, number: int) -> None:
        """A node is cut off."""
        self.nodes.remove(node)
        self.lost = node.processes
        self.cut = node.link
        call("ip", "link", "set", node.link, "down")

    def wake_lost(self) -> None:
        call("ip", "link", "set", self.cut, "up")

    def close(self) -> None:
        for pid in {*self.lost, *(pid for node in self.nodes for pid in node.processes)}:
            if str(self.trial.folder) in environment_of(pid):
                with suppress(ProcessLookupError):
                    kill(pid)
        super().close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)
        subprocess.run(["ip", "link", "delete", self.name], check=False)


NETWORK = "10.201.77"


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 seconds to start, which a busy machine exceeds, and leaves processes of it behind."""
    for _ in range(3):
        before = set(daemons())
        try:
            with small_agents():
                return start()
        except Exception as error:
            failure = error
            for pid in set(daemons()) - before:
                with suppress(ProcessLookupError):
                    kill(pid)
    raise RuntimeError(f"Ray did not start: {failure}")


def daemons() -> list[int]:
    """Ray's own processes that this one has started."""
    return [pid for pid in children(os.getpid()) if "/ray/" in command_of(pid)]


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


def processes_of(folder: Path) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and str(folder) in environment_of(pid)]


def of_actors(folder: Path) -> list[int]:
    """Processes of a run's actors, on any node, and what they have started."""
    pattern = "ray::(Rank|Replica|Environment|Worker)|^rollout worker"
    return [pid for pid in processes_of(folder) if re.search(pattern, command_of(pid))]


@contextmanager
def variables(wanted: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def serve(address: str, ip: str, cpus: str, store: str) -> None:
    """A node in this process's network."""
    from ray.scripts.scripts import start

    options = ["--address", address, "--node-ip-address", ip, "--num-cpus", cpus, "--object-store-memory", store]
    with small_agents():
        start.main([*options, "--disable-usage-stats", "--block"], standalone_mode=False)


if __name__ == "__main__":
    serve(*sys.argv[1:])
