"""Where rollout workers run: in processes of this machine, or in actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from contextlib import suppress
from typing import Any, Protocol

from turnwise.cluster.placement import connect as join_cluster
from turnwise.cluster.rollout_worker import connect_and_serve, serve_rollouts
from turnwise.engines.remote.child import Child
from turnwise.frames import receive_exactly_async
from turnwise.recipe.cluster import ClusterConfig
from turnwise.schedule.stopping import RunStopped

KEY_BYTES = 32
POLL = 0.1
"""Seconds between two looks at whether a worker on the cluster has ended."""


class WorkerHost(Protocol):
    """The process of one worker, which the constructor starts."""

    async def connect(self) -> socket.socket:
        """The line to the process. EOFError, with a reason, if there will be none, and another try may help; RunStopped
        if there is no place for it."""
        ...

    async def ended(self, seconds: float) -> None:
        """Returns when the process has ended; it is killed after so many seconds."""
        ...

    def how_it_ended(self) -> str: ...

    def kill(self) -> None: ...


class ProcessHost:
    """A process of this machine. It ends with the run, however that ends."""

    def __init__(self, number: int) -> None:
        self.child = Child(f"rollout worker {number}")
        self.is_connected = False

    async def connect(self) -> socket.socket:
        try:
            self.child.work(serve_rollouts)
        except OSError as error:
            raise EOFError(str(error)) from None
        self.is_connected = True
        return self.child.line

    async def ended(self, seconds: float) -> None:
        if not self.is_connected:
            self.child.line.close()
        await self.child.ended(seconds)

    def how_it_ended(self) -> str:
        return f"process {self.child.pid} of it ended with code {self.child.code}"

    def kill(self) -> None:
        self.child.kill()


class WorkerActor:
    """A process of the cluster that starts a worker beside it: environments need a process whose main thread they have
    for themselves. The worker ends with the actor."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.child = Child("rollout worker")
        self.child.work(connect_and_serve, host, port, key)

    def ready(self) -> None:
        return None

    def code(self) -> int | None:
        return self.child.code


class ActorHost:
    """An actor of a Ray cluster, whose worker connects to the run over TCP and shows the key that it was given: what it
    sends is unpickled here."""

    def __init__(self, number: int, cluster: ClusterConfig) -> None:
        import ray

        join_cluster(cluster.address)
        self.number = number
        self.seconds = cluster.placement_seconds
        self.key = secrets.token_bytes(KEY_BYTES)
        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self.listener.setblocking(False)
        host, port = self.listener.getsockname()[:2]
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        self.actor: Any = ray.remote(WorkerActor).options(**options).remote(host, port, self.key)

    async def connect(self) -> socket.socket:
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(self.seconds):
                await self.actor.ready.remote()
                return await self.accept()
        except TimeoutError:
            raise RunStopped(
                f"after {self.seconds:g} s the Ray cluster has no CPU for rollout worker {self.number}; add nodes, or "
                "lower cluster.rollout_workers"
            ) from None
        except RayError as error:
            raise EOFError(str(error).splitlines()[0]) from None

    async def accept(self) -> socket.socket:
        """The connection of the worker; others are closed unread."""
        loop = asyncio.get_running_loop()
        while True:
            line, _ = await loop.sock_accept(self.listener)
            line.setblocking(False)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(10.0):
                    shown = await receive_exactly_async(line, KEY_BYTES)
            except (TimeoutError, EOFError, OSError):
                shown = b""
            if hmac.compare_digest(shown, self.key):
                return line
            line.close()

    async def ended(self, seconds: float) -> None:
        self.listener.close()
        with suppress(Exception):  # the actor is gone, or out of time
            async with asyncio.timeout(seconds):
                while await self.actor.code.remote() is None:
                    await asyncio.sleep(POLL)
        self.kill()

    def how_it_ended(self) -> str:
        return "its actor or its connection is gone"

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)
