"""A rollout worker: a process that makes groups. It has renderer and environments of its own, and the run's engines
over its line."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from turnwise import frames
from turnwise.cluster.worker_desk import LogToRun, WorkerDesk
from turnwise.cluster.worker_line import TICK, TOCK, Message, WorkerLine
from turnwise.engines.places import MOST_ROUNDS, is_idle
from turnwise.engines.remote.wire import Wire, framed
from turnwise.rollout.environments import Environments
from turnwise.rollout.group import AttemptMaker, GroupRequest
from turnwise.schedule.run_loop import RunLoop, Stopwatch
from turnwise.schedule.watchdog import Watchdog

SILENCE = 3.0
"""Seconds without a word of the run after which a worker's clock stands still: the run stalls, and no attempt shall
time out for it."""
GRACE = 5.0
"""Seconds that attempts have to close their environments when the worker ends."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker works with."""

    makers: Mapping[str, AttemptMaker]
    """By kind: how training and held-out attempts are made."""
    environments: Environments
    blocked_seconds: float
    """How long an environment may block the worker's event loop."""


MakeParts = Callable[[WorkerDesk], WorkerParts]


def serve_rollouts(line: socket.socket) -> None:
    """Make groups in this process until the other end of the line is closed. The first message says how."""
    desk = WorkerDesk()
    try:
        size = frames.length_of(frames.receive_exactly(line, frames.HEAD))
        [(_, make, is_ordered)] = pickle.loads(frames.receive_exactly(line, size))
        parts: WorkerParts = pickle.loads(make)(desk)
    except EOFError:
        os._exit(1)
    except Exception as error:  # the run must read it, whatever it is
        traceback.print_exc()
        with suppress(OSError):
            line.sendall(framed([("broken", f"{type(error).__name__}: {error}")]))
        os._exit(1)
    logging.getLogger().addHandler(LogToRun(desk))
    watchdog = Watchdog(
        say=lambda text: None,
        blocked_seconds=parts.blocked_seconds,
        farewell="the run starts another worker",
        loop_factory=WorkerLoop,
    )
    watchdog.run(lambda stop: RolloutWorker(parts, desk, is_ordered).serve(line))
    parts.environments.close()
    os._exit(0)  # an orderly end of the interpreter takes long and frees nothing that the kernel does not


class RolloutWorker:
    """Makes the groups that the run asks for, and says when it waits for the run, where the order of calls matters."""

    def __init__(self, parts: WorkerParts, desk: WorkerDesk, is_ordered: bool) -> None:
        self.is_ordered = is_ordered
        self.parts = parts
        self.desk = desk
        self.groups: dict[int, asyncio.Task[None]] = {}
        """By serial number."""
        self.woken = asyncio.Event()
        self.is_ending = False

    async def serve(self, line: socket.socket) -> None:
        """Returns when the run has gone, or needs this worker no more; all environments are closed."""
        loop = asyncio.get_running_loop()
        self.desk.loop, self.desk.line = loop, WorkerLine(await Wire.over(line))
        telling = asyncio.create_task(self.tell_when_waiting(), name="worker waits")
        self.desk.line.send("ready")
        try:
            with suppress(EOFError):
                while True:
                    messages = await self.desk.line.receive()
                    if isinstance(loop, WorkerLoop):
                        loop.heard()
                    for message in messages:
                        self.hear(message)
        finally:
            self.is_ending = True
            telling.cancel()
            groups = list(self.groups.values())
            for group in groups:
                group.cancel()
            if groups:
                await asyncio.wait(groups, timeout=GRACE)
            self.desk.line.close()

    def hear(self, message: Message) -> None:
        if message == TICK:
            self.desk.line.send(*TOCK)
            return
        if self.is_ordered:
            self.woken.set()
        match message:
            case "make", kind, request:
                task = asyncio.create_task(self.make(kind, request), name=f"group {request.serial}: {request.task.id}")
                self.groups[request.serial] = task
            case "cancel", serial:
                if serial in self.groups:
                    self.groups[serial].cancel()
                else:
                    self.desk.line.send("ended", serial)
            case "answer", number, answer:
                self.desk.answer(number, answer)
            case _:
                raise AssertionError(f"unknown message {message[0]}")

    async def make(self, kind: str, request: GroupRequest) -> None:
        """Make a group and send it, in the form in which its turns share their prompts."""
        made: Message
        try:
            group = await self.parts.makers[kind].group_of(request)
            data = pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
            made = "made", request.serial, data, self.parts.environments.report()
        except asyncio.CancelledError:
            if self.is_ending:  # the run did not ask for it, and begins the group anew elsewhere
                raise
            made = "ended", request.serial
        except Exception as error:  # of ours: what environments and engines raise is in the group
            made = "broken", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            del self.groups[request.serial]
        self.desk.line.send(*made)

    async def tell_when_waiting(self) -> None:
        """Tell the run each time that nothing can go on here without it, or without the world outside."""
        line = self.desk.line
        while True:
            await self.woken.wait()
            self.woken.clear()
            quiet = rounds = 0
            while quiet < 2 and rounds < MOST_ROUNDS:
                await asyncio.sleep(0)
                rounds = 0 if line.outbox else rounds + 1
                quiet = quiet + 1 if is_idle() else 0
            line.send("waits", line.num_received)
            line.flush()


class SilenceWatch(Stopwatch):
    """The stopwatch of a worker: it also stands still while the run says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_at = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        before = self.now
        ready = super().select(timeout)
        if time.monotonic() - self.heard_at > SILENCE:
            self.now = before
        return ready


class WorkerLoop(RunLoop):
    """The event loop of a worker. Deadlines of attempts do not run while the run itself stalls."""

    def __init__(self) -> None:
        self.silence = SilenceWatch()
        super().__init__(self.silence)

    def heard(self) -> None:
        self.silence.heard_at = time.monotonic()


def connect_and_serve(own: socket.socket, host: str, port: int, key: bytes) -> None:
    """A worker that calls the run at an address, and shows that it is the one that was started."""
    line = socket.create_connection((host, port))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(key)
    serve_rollouts(line)
