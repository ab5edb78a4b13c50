"""A played server: HTTP on a port of this machine, whose routes a subclass answers as some server would."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

Handler = Callable[[Any], Awaitable[Any]]


class PlayedServer:
    """Answers HTTP as a server would that samples, and fails as one might.

    Example:
        async with PlayedVllm(engine, vocabulary=63) as server:
            connection = Connection(server.url)
    """

    def __init__(self, *, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.key = key
        self.tls = tls
        self.url = ""
        self.asked: list[str] = []
        """The routes that were asked for, in order."""
        self.stalled = asyncio.Event()
        """While it is set, requests are accepted and never answered."""
        self.instead: dict[str, Any] = {}
        """By route: the answer that is given instead, or a function of the request that makes it."""
        self.missing: set[str] = set()
        """Routes that it does not have."""
        self.runner: Any = None
        self.port = 0

    def routes(self) -> Mapping[str, Handler]:
        """By "GET /path" or "POST /path": what answers a request."""
        raise NotImplementedError

    def guarded(self, path: str) -> bool:
        """Whether a route asks for the key."""
        return True

    async def __aenter__(self) -> PlayedServer:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self) -> None:
        """Answer on a free port; after it has vanished, on the port that it had."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, ssl_context=self.tls, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    async def vanish(self) -> None:
        """Close the port: connections are refused, and those that are open are cut."""
        runner, self.runner = self.runner, None
        if runner is not None:
            await runner.cleanup()

    async def close(self) -> None:
        await self.vanish()

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        path = request.path
        self.asked.append(path.lstrip("/"))
        while self.stalled.is_set():
            await asyncio.sleep(0.005)
        if self.key and self.guarded(path) and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path in self.instead:
            given = self.instead[path]
            given = await given(request) if callable(given) else given
            return given if isinstance(given, web.StreamResponse) else web.json_response(given)
        handler = None if path in self.missing else self.routes().get(f"{request.method} {path}")
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            found = await handler(request)
        except Exception as error:  # as servers do: the caller hears of it, and the server goes on
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)


@contextmanager
def in_thread(server: PlayedServer) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A server that listens in a thread with an event loop of its own. Yields a function that runs a coroutine there
    and returns its result.

    Example:
        with in_thread(server) as there:
            there(server.vanish())
    """
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="played server", daemon=True)
    thread.start()

    def there(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        there(server.listen())
        yield there
    finally:
        there(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
