"""HTTP with one server that samples: JSON there and back, with a key and TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 60.0
"""How long a server may take for an answer that needs no model."""
MOST_BYTES = 1 << 28
"""Of an answer: a long action with its routes has less."""
MOST_SHOWN = 300
"""Characters of an answer that an error shows."""


class ServerFailure(RuntimeError):
    """A server did not answer, or answered that it could not do it."""


class Connection:
    """JSON over HTTP to one server.

    Example:
        connection = Connection("https://host:8000", key="secret", ca_file="/etc/ssl/own.pem")
        await connection.open()
        answer = await connection.get("weight_info")
    """

    def __init__(self, url: str, *, key: str = "", ca_file: str = "", advice: str = "") -> None:
        """`ca_file` has the certificates that an https server is known by; empty takes those of the machine. `advice`
        is said where a server lacks a route."""
        self.url = url.rstrip("/")
        self.key = key
        self.ca_file = ca_file
        self.advice = advice
        self.session: Any = None

    async def open(self) -> None:
        """May be called again."""
        import aiohttp

        if self.session is not None:
            return
        trusted = ssl.create_default_context(cafile=self.ca_file or None)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
        )

    async def close(self) -> None:
        """Calls under way fail."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    async def get(self, route: str, *, seconds: float = ANSWER_SECONDS, **query: str) -> Any:
        return await self.ask("GET", route, None, query, {}, seconds)

    async def post(
        self,
        route: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = ANSWER_SECONDS,
        **query: str,
    ) -> Any:
        """`body` is JSON if it is bytes, and is written as JSON else. `seconds`: how long the answer may take; None for
        ever."""
        return await self.ask("POST", route, body, query, headers or {}, seconds)

    async def ask(
        self,
        method: str,
        route: str,
        body: Any,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        seconds: float | None,
    ) -> Any:
        """The JSON of an answer; None for an answer without JSON."""
        import aiohttp

        if self.session is None:
            raise ServerFailure(f"{self.url} is not connected")
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        given: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            given, headers = {"data": body}, {"Content-Type": "application/json", **headers}
        try:
            # A redirect would carry the key to where nobody named.
            async with self.session.request(
                method,
                f"{self.url}/{route}",
                params=query,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                **given,
            ) as response:
                return self.read(route, response, await limited(response))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise ServerFailure(f"{self.url} is not connected any more") from None  # closed while it was looked up
        except TimeoutError:
            within = CONNECT_SECONDS if seconds is None else seconds
            raise ServerFailure(f"{self.url}/{route} did not answer in {within:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"{self.url} cannot be reached: {self.said(str(error) or repr(error))}") from None

    def read(self, route: str, response: Any, content: bytes) -> Any:
        status, text = response.status, content.decode(errors="replace")
        if status in (401, 403):
            refusal = "refused the key" if self.key else "asks for a key"
            raise ServerFailure(f"{self.url}/{route} {refusal} (status {status}); see api_key_variable")
        if status == 404:
            raise ServerFailure(f"{self.url} has no /{route}{self.advice and '; '}{self.advice}")
        if status != 200:
            raise ServerFailure(f"{self.url}/{route} answered {status}: {self.said(text)}")
        if response.content_type != "application/json":
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerFailure(f"{self.url}/{route} answered no JSON: {self.said(text)}") from None

    def said(self, text: str) -> str:
        """Text of a server as an error may show it: one line, without the key."""
        shown = text.replace(self.key, "***") if self.key else text
        return " ".join(shown.split())[:MOST_SHOWN]


def is_cancelled() -> bool:
    """Whether somebody cancels the present task: aiohttp also raises a CancelledError where a session is closed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def limited(response: Any) -> bytes:
    """The content of an answer; one that does not end is an error."""
    content = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        content += part
        if len(content) > MOST_BYTES:
            raise ServerFailure(f"an answer has more than {MOST_BYTES >> 20} MiB")
    return bytes(content)
