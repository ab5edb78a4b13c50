"""The endpoint of a process: one HTTP server for all sessions, in a separate thread.

The thread only reads and writes HTTP. It passes requests to the event loop of the run, where engine, renderer and
sessions live. It starts with the first session.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from turnwise.serve.registry import Address, Registry, Serves
from turnwise.serve.seal import ThinkingSeal

OPEN_FILES = 65536
"""Limit on open files; every client in this process takes two."""


class Endpoint:
    """The server and its sessions, by key.

    Example:
        endpoint = Endpoint()
        address = endpoint.open(session)
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        largest_body: int = 8 << 20,
        aliases: Sequence[str] = (),
        seal: ThinkingSeal | None = None,
    ) -> None:
        """`aliases`: other names of the model, for sessions of agents. `seal` signs thinking; one of this process if
        there is none."""
        self.host = host
        self.port = port
        self.aliases = tuple(aliases)
        self.registry = Registry(largest_body, seal)
        self.server: Any = None
        self.thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the server for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def open(self, session: Serves, key: str = "") -> Address:
        """Serve a session under a new key, or the given one."""
        self.start()
        key = key or secrets.token_urlsafe(24)
        self.registry.add(key, session)
        return Address(f"{self.url}/v1", key, session.model)

    def end(self, key: str) -> None:
        """End a session."""
        self.registry.end(key)

    def start(self) -> None:
        """Start the server, unless it runs already."""
        if self.thread is not None:
            return
        check_installed()
        import uvicorn

        from turnwise.serve.app import make_app

        allow_files(OPEN_FILES)
        try:
            listening = socket.create_server((self.host, self.port), backlog=2048, family=family_of(self.host))
        except OSError as error:
            where = f"{self.host}:{self.port}"
            raise ValueError(f"cannot serve on {where}: {error.strerror}; choose another host or port") from None
        # An answer is two writes. Without TCP_NODELAY the second waits 40 ms until the client acknowledges the first.
        # asyncio sets it only for sockets whose protocol was named when they were made.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.registry),
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=600,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        work = lambda: asyncio.run(self.server.serve(sockets=[listening]))
        self.thread = threading.Thread(target=work, name="endpoint", daemon=True)
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.002)

    def close(self) -> None:
        """Stop the server."""
        if self.thread is not None:
            self.server.should_exit = True
            self.thread.join(timeout=10)
            self.thread = None


def check_installed() -> None:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f'the endpoint needs {package}: pip install "turnwise[serve]"')


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def allow_files(count: int) -> None:
    """Raise the limit on open files of this process, as far as allowed."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
