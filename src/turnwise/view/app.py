"""The HTTP side of the page: its files, its questions, and what is answered where something cannot be read."""

from __future__ import annotations

import logging
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnwise.view.api import QUESTIONS, Question
from turnwise.view.clipped import as_bytes
from turnwise.view.gate import App, Gate
from turnwise.view.page_files import PageFile, page_files
from turnwise.view.watched_run import WatchedRuns

log = logging.getLogger(__name__)


def make_app(runs: WatchedRuns, token: str = "") -> App:
    """Plain functions run in worker threads, so that reading a large attempt does not hold up the others."""
    routes = [Route(path, partial(serve_file, file), methods=["GET"]) for path, file in page_files().items()]
    routes += [
        Route(path, partial(serve_answer, runs, question), methods=["GET"]) for path, question in QUESTIONS.items()
    ]
    return Gate(Starlette(routes=routes), token)


async def serve_file(file: PageFile, request: Request) -> Response:
    """A file of the page; it is in memory, so no worker is needed."""
    headers = {"etag": file.mark, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.mark:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


def serve_answer(runs: WatchedRuns, question: Question, request: Request) -> Response:
    """The answer to a question, or nothing where the runs have not changed since the page asked it last."""
    runs.looked_at.set()
    mark = f'"{runs.mark}-{runs.version}"'
    headers = {"etag": mark, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    try:
        content = as_bytes(question(runs, request.path_params, request.query_params))
        return Response(content, headers=headers, media_type="application/json")
    except (ValueError, OSError) as error:
        status, text = 404, str(error)
    except Exception as error:  # a file of a run may hold anything
        log.warning("cannot answer %s", request.scope["path"][:200], exc_info=True)
        status, text = 500, f"this cannot be shown ({type(error).__name__}: {error})"
    return Response(as_bytes({"error": text[:2000]}), status, media_type="application/json")
