"""Ranks as processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from turnwise.cluster.parcel import opened
from turnwise.cluster.rank import MakeLearner, Place, Rank, join, leave

GRACE = 10.0
"""Seconds that a process has to end by itself."""


class ProcessRanks:
    """`Ranks` in processes that are started here and end with `close`, or with this process.

    Example:
        ranks = ProcessRanks(2, partial(learner_of_a_rank, recipe, model))
    """

    def __init__(self, size: int, make: MakeLearner, *, device: str = "cpu", threads: int = 1) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads of torch that do not run there
        made = pickle.dumps(make)  # here, where a tensor is its bytes: between processes it would be a file descriptor
        place = Place(0, size, f"tcp://127.0.0.1:{free_port()}", device, threads)
        self.processes, self.lines = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(there, replace(place, rank=rank), made), name=f"rank {rank}", daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.lines.append(here)
        self.answers()  # that each has been made

    def call(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        if not self.lines:
            raise RuntimeError("the ranks have ended; resume from the last checkpoint")
        for rank, line in enumerate(self.lines):
            try:
                line.send((method, [argument[rank] for argument in arguments]))
            except OSError:
                self.fail(rank, "its process has ended")
        return self.answers()

    def publish(self) -> Mapping[str, Any]:
        return opened(self.call("publish")[0])

    def answers(self) -> list[Any]:
        """What every rank says, in whichever order they say it."""
        found: dict[int, Any] = {}
        waiting = {line: rank for rank, line in enumerate(self.lines)}
        while waiting:
            for line in wait(list(waiting)):
                assert isinstance(line, Connection)
                rank = waiting.pop(line)
                try:
                    succeeded, found[rank] = line.recv()
                except (EOFError, OSError):
                    self.fail(rank, "its process has ended")
                if not succeeded:
                    self.fail(rank, found[rank])
        return [found[rank] for rank in range(self.size)]

    def fail(self, rank: int, reason: str) -> None:
        for process in self.processes:
            process.terminate()
        self.close()
        raise RuntimeError(f"rank {rank} of the learner failed: {reason}")

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.lines = [], []


def serve(line: Connection, place: Place, made: bytes) -> None:
    """Answer calls until the other end closes the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which stops when it can
    try:
        join(place)
        rank = Rank(place, pickle.loads(made))
        line.send((True, None))
        while True:
            method, arguments = line.recv()
            line.send((True, getattr(rank, method)(*arguments)))
    except EOFError:
        leave()
        os._exit(0)  # to take the interpreter apart takes seconds, and frees nothing that would not be freed anyhow
    except Exception:  # whatever it is, the one who called shall read it
        line.send((False, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
