"""The server of the page, in a thread: where it listens, and the address that a person opens."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from typing import Any
from urllib.parse import urlencode

from turnwise.serve.endpoint import family_of
from turnwise.view.gate import PARAMETER, is_this_machine
from turnwise.view.watched_run import WatchedRuns


class ViewServer:
    """Serves the page of some runs.

    Example:
        with WatchedRuns.open(["runs/quickstart"]) as runs, ViewServer(runs) as server:
            print(server.url)
    """

    def __init__(self, runs: WatchedRuns, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        if not token and not is_this_machine(host):
            raise ValueError(f"--host {host} lets others in, so the page needs a token")
        self.runs = runs
        self.host = host
        self.port = port
        self.token = token
        self.server: Any = None
        self.thread: threading.Thread | None = None

    @property
    def base(self) -> str:
        """Where the page is."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def url(self) -> str:
        """What to open, with the token where there is one."""
        return f"{self.base}?{urlencode({PARAMETER: self.token})}" if self.token else self.base

    def __enter__(self) -> ViewServer:
        check_installed()
        import uvicorn

        from turnwise.view.app import make_app

        try:
            listening = socket.create_server((self.host, self.port), family=family_of(self.host))
        except OSError as error:
            where = f"{self.host}:{self.port}"
            raise ValueError(f"cannot serve on {where}: {error.strerror}; choose another --host or --port") from None
        # An answer is two writes, and without this the second waits for the client to acknowledge the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.runs, self.token),
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        work = lambda: asyncio.run(self.server.serve(sockets=[listening]))
        self.thread = threading.Thread(target=work, name="view-server", daemon=True)
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.002)
        if not self.server.started:
            raise ValueError(f"the server did not start on {self.host}:{self.port}; choose another --host or --port")
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        if self.thread is not None:
            self.thread.join(timeout=10)


def check_installed() -> None:
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f'the page needs {package}: pip install "turnwise[view]"')
