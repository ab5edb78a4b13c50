"""The run's end of a rollout worker: its process, its line, and what the run does for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.cluster.call_gate import CallGate
from turnwise.cluster.worker_host import WorkerHost
from turnwise.cluster.worker_line import TICK, Message, WorkerLine, fields_of, sampling_of
from turnwise.engines.base import Engine
from turnwise.engines.places import PLACE, Place
from turnwise.engines.remote.wire import Wire
from turnwise.rollout.environments import Environments
from turnwise.rollout.open_limit import OpenLimit
from turnwise.tokens import Tokens

EXIT_SECONDS = 5.0
"""How long a process that has closed its line may take to end."""


@dataclass(frozen=True, slots=True)
class RunServices:
    """What workers ask the run for."""

    engines: Mapping[str, Engine]
    environments: Environments
    """Whose limits and failures are those of all workers."""
    gate: CallGate
    halves: dict[int, OpenLimit] = field(default_factory=dict)
    """Of the limits, for evaluations that overlap training; by the identity of the whole."""

    def limit(self, label: str, is_half: bool) -> OpenLimit:
        whole = self.environments.datasets[label].open_limit
        return self.halves.setdefault(id(whole), whole.half()) if is_half else whole


class WorkerLink:
    """A worker as the run sees it. `receive` serves what it asks for and returns the rest of what it says.

    Example:
        link = WorkerLink(host, services)
        await link.open(make)
        link.tell("make", "train", request)
        for word, *values in await link.receive(): ...
    """

    def __init__(self, host: WorkerHost, services: RunServices) -> None:
        self.host = host
        self.services = services
        self.gate = services.gate
        self.line: WorkerLine | None = None
        self.questions: dict[int, asyncio.Task[None]] = {}
        """Calls and permits of the worker, by their numbers."""
        self.left: set[int] = set()
        """Questions that the worker took back before they went through the gate."""
        self.held: set[int] = set()
        """Questions that wait at the gate."""
        self.told = 0
        """The last frame that the worker may answer with calls."""
        self.heard_at = 0.0
        self.killed = ""
        self.gone = False

    async def open(self, make: bytes) -> None:
        """Returns when the worker is ready; EOFError, with a reason, if it never will be."""
        try:
            wire = await Wire.over(await self.host.connect())
            self.line = WorkerLine(wire)
            wire.send(
                [("start", make, self.gate.is_ordered)]
            )  # before there is a line at the other end, which counts frames
            for word, *values in await self.line.receive():
                if word == "broken":
                    raise EOFError(values[0])
                assert word == "ready", word
        except (EOFError, OSError) as error:
            raise EOFError(str(error) or await self.ending()) from None
        self.heard_at = asyncio.get_running_loop().time()

    def tell(self, *message: Any) -> None:
        """Send something that may bring calls."""
        if self.line is not None and not self.gone:
            self.told = self.line.send(*message)
            self.gate.sent(self)

    def tick(self, seconds: float) -> bool:
        """Ask whether the worker is there; False if it has said nothing for so long."""
        if self.line is not None:
            self.line.send(*TICK)
        return asyncio.get_running_loop().time() - self.heard_at < seconds

    async def receive(self) -> list[Message]:
        """The next messages that are not for this link; EOFError, with the reason, when the worker is gone."""
        assert self.line is not None
        try:
            messages = await self.line.receive()
        except EOFError:
            raise EOFError(self.killed or await self.ending()) from None
        self.heard_at = asyncio.get_running_loop().time()
        return [message for message in messages if not self.serve(message)]

    async def ending(self) -> str:
        """How the process ended."""
        await self.host.ended(EXIT_SECONDS)
        return self.host.how_it_ended()

    # ------------------------------------------------------------ what the worker asks for

    def serve(self, message: Message) -> bool:
        """Do what a message asks for; False for one that is not for this link."""
        match message:
            case "call", number, name, prompt, sampling, session, seed, place:
                call = (number, name, prompt, sampling, session, seed, place)
                self.enter(number, place, lambda: self.call(*call))
            case "permit", number, label, is_half, place:
                self.enter(number, place, lambda: self.permit(number, label, is_half))
            case "left", number:
                self.leave(number)
            case "abort", name, session:
                self.begin(-1, self.services.engines[name].abort(session))
            case "waits", frames:
                if frames >= self.told:
                    self.gate.waits(self)
            case "failure", what, raised, advice:
                self.services.environments.failures.note(what, raised, advice)
            case "log", name, level, text:
                logging.getLogger(name).log(level, "%s", text)
            case ("tock",):
                pass
            case _:
                return False
        return True

    def enter(self, number: int, place: Place, make: Any) -> None:
        """Begin what a question asks for, once it is its turn."""
        self.held.add(number)

        def act() -> None:
            self.held.discard(number)
            if number in self.left or self.gone:
                self.left.discard(number)
            else:
                self.begin(number, make())

        self.gate.enter(place, act)

    def begin(self, number: int, work: Any) -> None:
        task = asyncio.ensure_future(work)
        if number >= 0:
            self.questions[number] = task
            task.add_done_callback(lambda _: self.questions.pop(number, None))

    def leave(self, number: int) -> None:
        """Nobody waits for an answer any more, or a permit is given back."""
        if number in self.held:
            self.left.add(number)
        elif number in self.questions:
            self.questions[number].cancel()

    async def call(
        self,
        number: int,
        name: str,
        prompt: Tokens,
        sampling: tuple[Any, ...],
        session: str,
        seed: int,
        place: Place,
    ) -> None:
        """One model call: the answer, how it failed, and the caller's next place."""
        PLACE.set(place)
        error: str = ""
        answer: Any = None
        engine = self.services.engines[name]
        try:
            answer = fields_of(await engine.generate(prompt, sampling_of(*sampling), session=session, seed=seed))
        except ValueError as refusal:
            error, answer = "refused", str(refusal)
        except Exception as failure:
            error, answer = "failed", str(failure)
        self.tell("answer", number, (error, answer, PLACE.get()))

    async def permit(self, number: int, label: str, is_half: bool) -> None:
        """A permit, until it is given back."""
        async with self.services.limit(label, is_half).permit():
            self.tell("answer", number, number)
            await asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ its end

    def kill(self, reason: str) -> None:
        """End a process that does not answer. Where it cannot be reached, nobody closes the other end of its line."""
        self.killed = self.killed or reason
        self.host.kill()
        if self.line is not None:
            self.line.cut()

    def forget(self) -> None:
        """The worker is gone: whatever it asked for is given up, and nobody waits for its calls."""
        self.gone = True
        for task in list(self.questions.values()):
            task.cancel()
        self.gate.waits(self)
        if self.line is not None:
            self.line.close()

    async def end(self, seconds: float) -> None:
        """End the worker, which has so many seconds to close its environments."""
        self.forget()
        await self.host.ended(seconds)
