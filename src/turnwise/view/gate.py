"""Who may see the page: this machine, or whoever has the token; and the headers that keep a browser's page closed."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "img-src 'self' data:"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
COOKIE = "turnwise-view"
PARAMETER = "token"
LONGEST_PATH = 1000


class Gate:
    """Lets requests through to the page.

    Without a token only this machine is served, and only under a name of this machine: a page of somebody else's whose
    name leads here (DNS rebinding) is refused. With a token the first address carries it, and a cookie afterwards.
    """

    def __init__(self, app: App, token: str = "") -> None:
        self.app = app
        self.token = token
        self.mark = hashlib.sha256(token.encode()).hexdigest()
        """What a browser shows instead of the token, which may have letters that a cookie cannot."""
        self.cookie = f"{COOKIE}-{self.mark[:8]}"
        """Its name: browsers send cookies to all ports of a host, and two viewers must not log each other out."""

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answer = self.answer(scope, headers)
        if answer is not None:
            status, text, more = answer
            await send({"type": "http.response.start", "status": status, "headers": [*HEADERS, *more]})
            await send({"type": "http.response.body", "body": text.encode()})
            return

        async def closed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        await self.app(scope, receive, closed)

    def answer(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """(status, text, headers) for a request that does not reach the page; None for one that does."""
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page is only read", plain
        if len(scope["path"]) > LONGEST_PATH:
            return 414, "the address is too long", plain
        if headers.get("sec-fetch-site", "none") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "the page of another site asks; this one answers only its own", plain
        if not self.token:
            if not is_this_machine(host_of(headers.get("host", ""))):
                return 403, "this page answers to 127.0.0.1 and localhost only", plain
            return None
        given = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if same(given.pop(PARAMETER, ""), self.token):
            where = f"?{urlencode(given)}" if given else "."
            # Lax: a link to here that is clicked on another site arrives by a redirect, which Strict would not follow.
            cookie = f"{self.cookie}={self.mark}; HttpOnly; SameSite=Lax; Path=/"
            return 303, "", [(b"location", where.encode()), (b"set-cookie", cookie.encode())]
        if not same(bearer_in(headers), self.token) and not same(cookie_in(headers, self.cookie), self.mark):
            return 401, "open the address that turnwise view has printed, with its token", plain
        return None


def bearer_in(headers: dict[str, str]) -> str:
    """The token that a program sends."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else ""


def cookie_in(headers: dict[str, str], wanted: str) -> str:
    """What a browser shows under a name. The cookies of other programs on this host may be malformed."""
    for cookie in headers.get("cookie", "").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == wanted:
            return value
    return ""


def same(given: str, token: str) -> bool:
    """Whether a token is the right one, in a time that does not depend on how much of it is."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def host_of(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_this_machine(host: str) -> bool:
    """Whether a host can only be this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
