"""The HTTP side of the endpoint: routes, keys, size limits, streams, and clients that disconnect. Needs Starlette."""

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
from turnwise.serve.call import ANY, ServedCall, is_served, no_model
from turnwise.serve.dialects import chat, completions, messages, responses
from turnwise.serve.dialects.answer import AnswerStream, headers_of
from turnwise.serve.dialects.ask import Ask, Delivery, Refusal, read_json
from turnwise.serve.registry import Registry, Serves
from turnwise.serve.stored import StoredResponse
from turnwise.serve.streamed import Piece

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DIALECTS: dict[str, ModuleType] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
KEEP_ALIVE_SECONDS = 10.0
"""Seconds between two keep-alive comments in a stream."""
CLIENT_CLOSED = 499
"""The status of a response to a client that has disconnected."""


def make_app(registry: Registry) -> Starlette:
    """The application. It uses Starlette, not FastAPI: each dialect reads its bodies itself, because errors must be
    written in that dialect, and FastAPI takes a second to import."""
    handler = RequestHandler(registry)
    routes = [Route(path, partial(handler.serve, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
    routes.append(Route("/v1/messages/count_tokens", handler.count_tokens, methods=["POST"]))
    routes.append(Route("/v1/responses/{name}", handler.response, methods=["GET", "DELETE"]))
    routes.append(Route("/v1/models", handler.models, methods=["GET"]))
    routes.append(Route("/v1/models/{name:path}", handler.model, methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: unknown})


async def unknown(request: Request, error: Exception) -> Response:
    """The response for paths and methods that are not served."""
    assert isinstance(error, HTTPException)
    path = path_of(request)
    problem = f"{request.method} {shown(path)} is not served here; see {', '.join(DIALECTS)} and /v1/models"
    dialect = DIALECTS.get(path, chat)
    return refused(dialect, Refusal(error.status_code, problem, "unknown_url"))


def refused(dialect: ModuleType, refusal: Refusal) -> Response:
    """The response of a refusal. It tells clients not to retry, because a retry would be refused too."""
    return JSONResponse(dialect.error(refusal), refusal.status, {"x-should-retry": "false"})


class RequestHandler:
    """Receives requests and sends answers."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def serve(self, dialect: ModuleType, request: Request) -> Response:
        try:
            session = self.session_of(request)
            raw = await self.body_of(request)
            ask: Ask = dialect.read(read_json(raw), self.registry.seal)
            call = await in_session_loop(session, session.open(ask, delivery_of(request, raw)))
            if ask.stream:
                headers = {"cache-control": "no-store", **headers_of(call.overridden, ask.ignored)}
                events = self.events(dialect, session, ask, call)
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            return await self.complete(dialect, session, ask, call, request)
        except Refusal as refusal:
            return refused(dialect, refusal)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except Exception:
            log.exception("a request could not be served")
            return refused(dialect, Refusal(500, "the server failed; see its log", "internal"))

    def session_of(self, request: Request) -> Serves:
        """The session of a request, found by its key."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key", "") or (bearer.strip() if scheme.lower() == "bearer" else "")
        return self.registry.find(key.encode("latin-1"))  # Starlette decodes headers as Latin-1

    async def body_of(self, request: Request) -> bytes:
        """The body, if it is not too large. A larger body is also read, up to a limit: a client that is still sending
        would not read why it was refused."""
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

    async def complete(
        self, dialect: ModuleType, session: Serves, ask: Ask, call: ServedCall, request: Request
    ) -> Response:
        """The answer in one piece; an empty response if the client disconnected. A retry can still get the answer."""
        waiting = asyncio.ensure_future(in_session_loop(session, session.hand_over(call)))
        disconnect = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({waiting, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return Response(status_code=CLIENT_CLOSED)
            answer = waiting.result()
            headers = {"x-turnwise-version": str(answer.version), **headers_of(answer.overridden, answer.ignored)}
            return JSONResponse(dialect.write(ask, answer, self.registry.seal), headers=headers)
        finally:
            disconnect.cancel()
            waiting.cancel()
            leave_session(session, call, for_good=False)

    async def events(self, dialect: ModuleType, session: Serves, ask: Ask, call: ServedCall) -> AsyncIterator[str]:
        """The answer as events, while it is sampled. It is recorded right before the event that completes it: a client
        that disconnects earlier received only a part of it, and nothing more is sampled for it."""
        stream: AnswerStream = dialect.stream(ask, call.head(session.model), self.registry.seal)
        waiting: asyncio.Future[Any] | None = None
        num_pieces = 0
        try:
            for text in stream.begin():
                yield text
            while True:
                waiting = asyncio.ensure_future(in_session_loop(session, session.next_pieces(call, num_pieces)))
                while not (await asyncio.wait({waiting}, timeout=KEEP_ALIVE_SECONDS))[0]:
                    yield ": still here\n\n"
                pieces: list[Piece] = waiting.result()
                if not pieces:
                    break
                num_pieces += len(pieces)
                for piece in pieces:
                    for text in stream.more(piece.thinking, piece.content):
                        yield text
            waiting = asyncio.ensure_future(in_session_loop(session, session.wait(call)))
            for text, completes in stream.end(await waiting):
                if completes:
                    await in_session_loop(session, session.record(call))
                yield text
        except Refusal as refusal:
            yield dialect.error_event(refusal)
        finally:
            if waiting is not None:
                waiting.cancel()
            leave_session(session, call, for_good=True)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a request in Anthropic's dialect."""
        try:
            session = self.session_of(request)
            ask = messages.read_to_count(read_json(await self.body_of(request)), self.registry.seal)
            tokens = await in_session_loop(session, session.count(ask))
            return JSONResponse({"input_tokens": tokens}, headers=headers_of({}, ask.ignored))
        except Refusal as refusal:
            return refused(messages, refusal)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except Exception:
            log.exception("a request could not be served")
            return refused(messages, Refusal(500, "the server failed; see its log", "internal"))

    async def response(self, request: Request) -> Response:
        """A stored response, or its deletion."""
        try:
            session, name = self.session_of(request), request.path_params["name"]
            deletes = request.method == "DELETE"
            stored = await in_session_loop(session, look_up(session, name, deletes=deletes))
            if deletes:
                return JSONResponse({"id": name, "object": "response", "deleted": True})
            return JSONResponse(responses.write(stored.ask, stored.answer, self.registry.seal))
        except Refusal as refusal:
            return refused(responses, refusal)

    async def models(self, request: Request) -> Response:
        try:
            session = self.session_of(request)
        except Refusal as refusal:
            return refused(chat, refusal)
        names = [session.model, *(name for name in session.aliases if name != ANY)]
        return JSONResponse({"object": "list", "data": list(map(entry_of, names)), "has_more": False})

    async def model(self, request: Request) -> Response:
        try:
            name, session = request.path_params["name"], self.session_of(request)
            if not is_served(name, session.model, session.aliases):
                raise no_model(name, session.model)
        except Refusal as refusal:
            return refused(chat, refusal)
        return JSONResponse(entry_of(name))


async def look_up(session: Serves, name: str, *, deletes: bool) -> StoredResponse:
    """A stored response of a session, which is removed if that is wanted."""
    stored = session.stored.find(name)
    if deletes:
        session.stored.remove(name)
    return stored


def entry_of(model: str) -> dict[str, Any]:
    """A model in a form that fits the lists of both OpenAI and Anthropic."""
    openai_fields = {"id": model, "object": "model", "created": 0, "owned_by": "turnwise"}
    return {**openai_fields, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def delivery_of(request: Request, raw: bytes) -> Delivery:
    """The identity of a request and the number of its try."""
    count = request.headers.get("x-stainless-retry-count", "0")
    name = f"{path_of(request)}\0".encode()
    return Delivery(
        hashlib.blake2b(name + raw, digest_size=16).digest(),
        int(count) if count.isdecimal() and len(count) < 9 else 0,
        request.headers.get("idempotency-key", ""),
    )


def path_of(request: Request) -> str:
    """The path. `request.url` would also read the Host header, which is hostile input."""
    return str(request.scope["path"])


async def disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def in_session_loop(session: Serves, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that runs in the session's event loop."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, session.loop)
    except RuntimeError:  # its loop is gone
        work.close()
        raise Refusal(410, "the run that this key belongs to is over", "session_over") from None
    return await asyncio.wrap_future(future)


def leave_session(session: Serves, call: ServedCall, *, for_good: bool) -> None:
    """Tell the session that a client has left. This does not wait, because the request's task may be cancelled."""
    try:
        session.loop.call_soon_threadsafe(session.leave, call, for_good)
    except RuntimeError:  # its loop is gone
        return
