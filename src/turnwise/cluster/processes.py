"""Ranks as processes of this machine."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Never

from turnwise.cluster.life import ANSWER_SECONDS, BEAT, TICK, BeatingLine, Silence, silent_for
from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.rank import MakeLearner, Rank, RankAddress, join, leave
from turnwise.engines.remote.child import Child
from turnwise.schedule.stopping import LearnerLost
from turnwise.weights.parted import PartedWeights
from turnwise.weights.publisher import Publisher

GRACE = 10.0
"""Seconds that a process has to end by itself."""


class ProcessRanks:
    """`Ranks` as processes that the constructor starts. They end with `close`, or with this process.

    Example:
        ranks = ProcessRanks(MeshShape(fsdp=2), partial(learner_of_a_rank, recipe, folder))
    """

    def __init__(
        self,
        shape: MeshShape,
        make: MakeLearner,
        *,
        device: str = "cpu",
        threads: int = 1,
        on_host: bool = False,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`answer_seconds`: how long a rank may give no sign of life during a call."""
        self.shape = shape
        self.answer_seconds = answer_seconds
        size = shape.ranks
        pickled_make = pickle.dumps(make)  # once for all of them
        address = RankAddress(0, size, f"tcp://127.0.0.1:{free_port()}", device, threads, on_host=on_host)
        self.processes: list[Child] = []
        self.lines: list[Connection] = []
        try:
            for rank in range(size):
                self.processes.append(Child(f"rank {rank}"))
            for rank, process in enumerate(self.processes):  # by now all of them have begun to import
                self.tell(rank, process, replace(address, rank=rank), shape, pickled_make)
            self.answers(starting=True)  # wait until each rank is ready
        except BaseException:
            self.kill()
            raise

    def tell(self, rank: int, process: Child, address: RankAddress, shape: MeshShape, pickled_make: bytes) -> None:
        try:
            process.work(serve, address, shape, pickled_make)
        except OSError:
            self.fail(rank, "its process has ended")
        limit = struct.pack("ll", int(self.answer_seconds), int(self.answer_seconds % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped process may have read half a message
            process.line.setsockopt(socket.SOL_SOCKET, option, limit)
        self.lines.append(Connection(process.line.detach()))

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        if not self.lines:
            raise LearnerLost("the ranks of the learner have ended")
        for rank, line in enumerate(self.lines):
            try:
                line.send((method, [argument[rank] for argument in arguments]))
            except BlockingIOError:
                self.fail(rank, silent_for(self.answer_seconds))
            except OSError:
                self.fail(rank, "its process has ended")
        return self.answers()

    def read(self, weights: PartedWeights) -> Mapping[str, Any]:
        """Every rank copies its part into a file in memory."""
        with closing(Publisher()) as publisher:
            return publisher.publish(weights, 0).__enter__()  # mapped, it stays readable

    def answers(self, *, starting: bool = False) -> list[Any]:
        """The answers of all ranks. They may arrive in any order. A start may take any time."""
        answers: dict[int, Any] = {}
        waiting = {line: rank for rank, line in enumerate(self.lines)}
        silence = Silence(self.answer_seconds, () if starting else waiting.values())
        while waiting:
            ready = [line for line in wait(list(waiting), TICK) if isinstance(line, Connection)]
            silent = silence.look([waiting[line] for line in ready], waiting.values())
            if silent is not None:
                self.fail(silent, silent_for(self.answer_seconds))
            for line in ready:
                rank = waiting[line]
                said = self.received(rank, line)
                if said is BEAT:
                    continue
                del waiting[line]
                succeeded, answers[rank] = said
                if not succeeded:
                    self.fail(rank, answers[rank])
        return [answers[rank] for rank in range(self.shape.ranks)]

    def received(self, rank: int, line: Connection) -> Any:
        try:
            return line.recv()
        except BlockingIOError:
            self.fail(rank, silent_for(self.answer_seconds))
        except (EOFError, OSError):
            self.fail(rank, "its process has ended")

    def fail(self, rank: int, reason: str) -> Never:
        self.kill()
        raise LearnerLost.by(rank, reason)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.end(GRACE)
        self.processes, self.lines = [], []

    def kill(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.line.close()
            process.kill()
        self.close()


def serve(channel: socket.socket, address: RankAddress, shape: MeshShape, pickled_make: bytes) -> None:
    """Answer calls until the other end closes the connection."""
    line = BeatingLine(channel.detach())
    try:
        join(address)
        rank = Rank(address, shape, pickle.loads(pickled_make))
        line.send((True, None))
        while True:
            method, arguments = line.recv()
            line.send((True, getattr(rank, method)(*arguments)))
    except EOFError:
        leave()
        os._exit(0)  # a regular exit of the interpreter takes seconds and is not needed
    except Exception:  # the caller gets the traceback
        line.send((False, traceback.format_exc()))
        os._exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
