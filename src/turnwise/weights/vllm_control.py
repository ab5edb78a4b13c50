"""How vLLM's senders, in threads and processes of a learner, reach a vLLM that the process of the run talks to."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from turnwise.weights.vllm_transfer import TransferControl


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a `ControlServer` listens on this machine, and the key without which it does not answer."""

    path: str
    key: bytes = field(repr=False)


class ControlServer:
    """Makes calls to a `TransferControl` in the event loop, for senders that make them from elsewhere."""

    def __init__(self, control: TransferControl, loop: asyncio.AbstractEventLoop) -> None:
        self.control = control
        self.loop = loop
        key = os.urandom(32)
        self.listener = Listener(family="AF_UNIX", authkey=key)
        assert isinstance(self.listener.address, str)
        self.address = ControlAddress(self.listener.address, key)
        self.closing, self.close_line = Pipe(duplex=False)
        self.thread = threading.Thread(target=self.accept, name="weight control", daemon=True)
        self.thread.start()

    def accept(self) -> None:
        """Serve one caller after the other, until this is closed."""
        while not self.closing.poll():
            with suppress(OSError, EOFError, AuthenticationError), self.listener.accept() as line:
                self.serve(line)

    def serve(self, line: Connection) -> None:
        with suppress(EOFError, OSError):
            while self.closing not in wait([line, self.closing]):
                method, arguments = line.recv()
                try:
                    call = getattr(self.control, method)(*arguments)
                    asyncio.run_coroutine_threadsafe(call, self.loop).result()
                    line.send(None)
                except Exception as error:  # the sender raises it
                    line.send(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self.close_line.send(None)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as nobody:
            nobody.connect(self.address.path)  # the thread may be waiting for a caller
        self.thread.join()
        for each in (self.listener, self.closing, self.close_line):
            each.close()


class ControlCaller:
    """The calls of vLLM's `VLLMWeightSyncClient`, made by a `ControlServer`."""

    def __init__(self, address: ControlAddress) -> None:
        self.line = Client(address.path, family="AF_UNIX", authkey=address.key)
        self.version = ""
        """The version that is being sent: vLLM's senders do not know it."""

    def call(self, method: str, *arguments: Any) -> None:
        self.line.send((method, arguments))
        problem = self.line.recv()
        if problem is not None:
            raise RuntimeError(problem)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_transfer", init_info)

    def start_weight_update(self) -> None:
        self.call("start_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_update", weight_version or self.version)

    def close(self) -> None:
        self.line.close()
