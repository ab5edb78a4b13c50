"""An engine in another process: it samples while this one learns, and neither waits for the other's interpreter.

A call is one message to the process and one back. Weights go through shared memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, checked_prompt
from turnwise.engines.remote.child import Child
from turnwise.engines.remote.wire import Wire, framed
from turnwise.tokens import Tokens
from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher
from turnwise.weights.skeleton import model_of_skeleton

MakeEngine = Callable[[Any, int], Engine]
"""(model, version of its weights) -> an engine, in another process."""
GRACE = 5.0
"""Seconds that a process has to end by itself."""
NOBODY = -1
"""The number of a message that answers no call."""


class ProcessEngine:
    """`Engine` in a process that starts here, reads the newest weights that are published, and ends with this one.

    Example:
        publisher = Publisher()
        publisher.publish(model.state_dict(), version)
        engine = ProcessEngine(make, skeleton_of(model), publisher, context=4096)
    """

    shares_weights = False

    def __init__(
        self, make: MakeEngine, skeleton: bytes, publisher: Publisher, *, context: int, name: str = "engine"
    ) -> None:
        """`make` gets the model of the skeleton, in the other process."""
        self.publisher = publisher
        self.context = context
        self.name = name
        self.process = Child(name)
        self.line = self.process.line
        with suppress(OSError):  # the first call notices a process that is dead already
            self.process.work(serve, make, skeleton, publisher.folder)
        self.wire: Wire | None = None
        self.connecting = asyncio.Lock()
        self.listening: asyncio.Task[None] | None = None
        self.numbers = count()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.failure = ""
        """Why no call is answered any more; empty while calls are."""
        self.seconds = 0.0
        """Seconds inside the model, as the other process said with its last answer."""

    async def open(self) -> None:
        """Returns when the engine in the other process is ready."""
        await self.ask("open")

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context)
        completion: Completion = await self.ask("generate", tokens, sampling, session, seed)
        for array in (completion.tokens, completion.logprobs, completion.versions):
            array.flags.writeable = False
        return completion

    async def abort(self, session: str) -> None:
        await self.ask("abort", session)

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        publish = self.publisher.publish
        published = weights if isinstance(weights, Published) else await asyncio.to_thread(publish, weights, version)
        await self.ask("load", published.path, version)

    async def forget(self) -> None:
        await self.ask("forget")

    async def pause(self) -> None:
        await self.ask("pause")

    async def resume(self) -> None:
        await self.ask("resume")

    async def check(self) -> None:
        """Returns when the engine answers."""
        await self.ask("check")

    async def close(self) -> None:
        self.fail("it was closed")
        if self.listening is not None:
            self.listening.cancel()
            await asyncio.gather(self.listening, return_exceptions=True)
        if self.wire is not None:
            self.wire.close()
        self.line.close()
        await self.process.ended(GRACE)

    # ------------------------------------------------------------ calls

    async def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `EngineServer` in the other process."""
        wire = await self.connected()
        if self.failure:
            raise EngineFailure(self.failure)
        number = next(self.numbers)
        call = self.calls[number] = asyncio.get_running_loop().create_future()
        try:
            wire.send((number, method, arguments))
            return await call
        except asyncio.CancelledError:
            wire.send((NOBODY, "cancel", (number,)))
            raise
        finally:
            del self.calls[number]

    async def connected(self) -> Wire:
        async with self.connecting:  # so that calls are sent in the order they came
            if self.wire is None:
                self.wire = await Wire.over(self.line)
                self.listening = asyncio.create_task(self.listen(self.wire), name=f"{self.name} listens")
            return self.wire

    async def listen(self, wire: Wire) -> None:
        """Give answers to the calls that wait for them, until the process ends."""
        reason = ""
        try:
            while True:
                number, error, answer, seconds = await wire.receive()
                self.seconds = max(self.seconds, seconds)
                if number == NOBODY:
                    reason = f": {answer}"
                elif (call := self.calls.get(number)) is not None and not call.done():
                    if error is None:
                        call.set_result(answer)
                    else:
                        call.set_exception(error(answer))
        except EOFError:
            await self.process.ended(GRACE)
            self.fail(f"process {self.process.pid} of it ended with code {self.process.code}{reason}")

    def fail(self, reason: str) -> None:
        """Fail the calls under way and all later ones."""
        self.failure = self.failure or f"{self.name} is gone: {reason}"
        for call in self.calls.values():
            if not call.done():
                call.set_exception(EngineFailure(self.failure))


# ---------------------------------------------------------------- the other process


def serve(line: socket.socket, make: MakeEngine, skeleton: bytes, folder: Path) -> None:
    """Answer calls until the other end is closed."""
    try:
        with Published.newest(folder) as weights:
            engine = make(model_of_skeleton(skeleton, weights), weights.version)
        asyncio.run(EngineServer(engine).serve(line))
    except Exception as error:  # the caller must read it, whatever it is
        traceback.print_exc()
        with suppress(OSError):
            line.setblocking(True)
            line.sendall(framed((NOBODY, None, f"{type(error).__name__}: {error}", 0.0)))
        os._exit(1)
    os._exit(0)  # an orderly end of the interpreter takes long and frees nothing that the kernel does not


class EngineServer:
    """Makes the calls of a wire to an engine, each as it comes. A method of this class is what a call may name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: dict[int, asyncio.Task[None]] = {}

    async def serve(self, line: socket.socket) -> None:
        wire = await Wire.over(line)
        with suppress(EOFError):
            while True:
                number, method, arguments = await wire.receive()
                if method == "cancel":
                    if (call := self.calls.get(arguments[0])) is not None:
                        call.cancel()
                    continue
                task = self.calls[number] = asyncio.create_task(self.answer(wire, number, method, arguments))
                task.add_done_callback(partial(self.ended, number))

    async def answer(self, wire: Wire, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        error: type[Exception] | None = None
        try:
            result = await getattr(self, method)(*arguments)
        except ValueError as refusal:
            error, result = ValueError, str(refusal)
        except Exception as failure:
            error, result = EngineFailure, str(failure)
        wire.send((number, error, result, self.engine.seconds))

    def ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self.calls[number]

    async def open(self) -> None:
        await self.engine.open()

    async def generate(self, prompt: Tokens, sampling: Sampling, session: str, seed: int) -> Completion:
        return await self.engine.generate(prompt, sampling, session=session, seed=seed)

    async def abort(self, session: str) -> None:
        await self.engine.abort(session)

    async def load(self, path: Path, version: int) -> None:
        with Published(path) as weights:
            await self.engine.load(weights, version)

    async def forget(self) -> None:
        await self.engine.forget()

    async def pause(self) -> None:
        await self.engine.pause()
        await asyncio.sleep(0)  # calls that ended before it are answered before it

    async def resume(self) -> None:
        await self.engine.resume()

    async def check(self) -> None:
        return None
