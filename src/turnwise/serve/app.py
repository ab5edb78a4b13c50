"""The HTTP side of the endpoint: routes, keys, limits of bodies, streams, clients that hang up. Needs Starlette."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turnwise.engines.base import shown
from turnwise.serve.call import ServedCall
from turnwise.serve.dialects import chat, completions, messages, responses
from turnwise.serve.dialects.ask import Ask, Delivery, Refusal, read_json
from turnwise.serve.registry import Registry, Serves

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DIALECTS: dict[str, ModuleType] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
STILL_HERE = 10.0
"""Seconds after which a client that waits for a stream is told that we are there."""
GONE = 499
"""The status of a response that nobody is there to read."""


def make_app(registry: Registry) -> Starlette:
    """Bodies are read by the dialects themselves, in whose words a mistake must be answered: what FastAPI has beside
    this would go unused, and takes a second to import."""
    handler = RequestHandler(registry)
    routes = [Route(path, partial(handler.serve, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
    routes.append(Route("/v1/models", handler.models, methods=["GET"]))
    routes.append(Route("/v1/models/{name:path}", handler.model, methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: unknown})


async def unknown(request: Request, error: Exception) -> Response:
    """Paths and methods that are not served."""
    assert isinstance(error, HTTPException)
    path = path_of(request)
    about = f"{request.method} {shown(path)} is not served here; see {', '.join(DIALECTS)} and /v1/models"
    dialect = DIALECTS.get(path, chat)
    return refused(dialect, Refusal(error.status_code, about, "unknown_url"))


def refused(dialect: ModuleType, refusal: Refusal) -> Response:
    """No client shall try again by itself: what is refused once is refused always."""
    return JSONResponse(dialect.error(refusal), refusal.status, {"x-should-retry": "false"})


class RequestHandler:
    """Takes requests and hands out answers."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def serve(self, dialect: ModuleType, request: Request) -> Response:
        try:
            session = self.session_of(request)
            raw = await self.body_of(request)
            ask: Ask = dialect.read(read_json(raw))
            call = await there(session, session.open(ask, delivery_of(request, raw)))
            if ask.stream:
                headers = {"cache-control": "no-store", **overridden(call)}
                events = self.events(dialect, session, ask, call)
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            return await self.whole(dialect, session, ask, call, request)
        except Refusal as refusal:
            return refused(dialect, refusal)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception:
            log.exception("a request could not be served")
            return refused(dialect, Refusal(500, "this is a mistake of the server; its log says more", "internal"))

    def session_of(self, request: Request) -> Serves:
        """Whom a request is for, by its key."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key", "") or (bearer.strip() if scheme.lower() == "bearer" else "")
        return self.registry.find(key.encode("latin-1"))  # as Starlette reads the bytes of headers

    async def body_of(self, request: Request) -> bytes:
        """The body, if it is not too large. A larger one is read to its end all the same, within reason: a client that
        is still writing would not see why it was refused."""
        limit = self.registry.largest_body
        refusal = Refusal(413, f"the body is larger than {limit} bytes", "request_too_large")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > 8 * limit):
            raise refusal
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > 8 * limit:
                raise refusal
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
        if size > limit:
            raise refusal
        return b"".join(parts)

    async def whole(
        self, dialect: ModuleType, session: Serves, ask: Ask, call: ServedCall, request: Request
    ) -> Response:
        """The answer in one piece, or nothing where the client hung up; it may ask again, and have it then."""
        waiting = asyncio.ensure_future(there(session, session.hand_over(call)))
        gone = asyncio.ensure_future(hung_up(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return Response(status_code=GONE)
            answer = waiting.result()
            return JSONResponse(dialect.write(ask, answer), headers=answer.headers)
        finally:
            gone.cancel()
            waiting.cancel()
            later(session, call, for_good=False)

    async def events(self, dialect: ModuleType, session: Serves, ask: Ask, call: ServedCall) -> AsyncIterator[str]:
        """The answer as events. It is recorded right before the event that completes it: a client that hangs up earlier
        has not heard it."""
        waiting = asyncio.ensure_future(there(session, session.wait(call)))
        try:
            while not (await asyncio.wait({waiting}, timeout=STILL_HERE))[0]:
                yield ": still here\n\n"
            for text, completes in dialect.stream(ask, waiting.result()):
                if completes:
                    await there(session, session.record(call))
                yield text
        except Refusal as refusal:
            yield dialect.error_event(refusal)
        finally:
            waiting.cancel()
            later(session, call, for_good=True)

    async def models(self, request: Request) -> Response:
        try:
            listed = [entry_of(self.session_of(request).model)]
        except Refusal as refusal:
            return refused(chat, refusal)
        return JSONResponse({"object": "list", "data": listed, "has_more": False})

    async def model(self, request: Request) -> Response:
        try:
            name, known = request.path_params["name"], self.session_of(request).model
            if name != known:
                raise Refusal(404, f"there is no model {shown(name)} here; there is {known!r}", "model_not_found")
        except Refusal as refusal:
            return refused(chat, refusal)
        return JSONResponse(entry_of(known))


def entry_of(model: str) -> dict[str, Any]:
    """A model as both OpenAI's and Anthropic's lists have it."""
    ours = {"id": model, "object": "model", "created": 0, "owned_by": "turnwise"}
    return {**ours, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def overridden(call: ServedCall) -> dict[str, str]:
    names = ", ".join(sorted(call.overridden))
    return {"x-turnwise-overridden": names} if names else {}


def delivery_of(request: Request, raw: bytes) -> Delivery:
    """Which try of which request this is."""
    count = request.headers.get("x-stainless-retry-count", "0")
    name = f"{path_of(request)}\0".encode()
    return Delivery(
        hashlib.blake2b(name + raw, digest_size=16).digest(),
        int(count) if count.isdecimal() and len(count) < 9 else 0,
        request.headers.get("idempotency-key", ""),
    )


def path_of(request: Request) -> str:
    """The path; `request.url` would read the Host header too, which may say anything."""
    return str(request.scope["path"])


async def hung_up(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def there(session: Serves, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that runs where the session lives."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, session.loop)
    except RuntimeError:  # its loop is gone
        work.close()
        raise Refusal(410, "the run that this key belongs to is over", "session_over") from None
    return await asyncio.wrap_future(future)


def later(session: Serves, call: ServedCall, *, for_good: bool) -> None:
    """Tell the session that a client has left. Nothing is waited for: whoever hung up took our turn to wait along."""
    try:
        session.loop.call_soon_threadsafe(session.leave, call, for_good)
    except RuntimeError:  # its loop is gone
        return
