"""The retrieval server: an index behind HTTP, in Search-R1's wire format.

    POST /retrieve {"queries": ["capital of Fiji", ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "17", "contents": "\\"Fiji: Capital\\"\\n..."}, "score": 14.2}, ...], ...]}

By default it listens on the loopback address only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from turnwise.envs.search.retrieval.corpus import Corpus, corpus_file
from turnwise.envs.search.retrieval.dense import Dense
from turnwise.envs.search.retrieval.index import Bm25, Index

RETRIEVERS = ("bm25", "dense")
MOST_QUERIES, MOST_PASSAGES, LONGEST_QUERY = 4096, 100, 2000


class SearchRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")

    queries: list[Annotated[str, StringConstraints(max_length=LONGEST_QUERY)]] = Field(max_length=MOST_QUERIES)
    topk: int = Field(3, ge=1, le=MOST_PASSAGES)
    return_scores: bool = False


def check_packages() -> None:
    for module in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f'the retrieval server needs {module}: pip install "turnwise[search]"')


def open_index(corpus: Corpus, retriever: str, *, make: bool = True) -> Index:
    return Dense.of(corpus, make=make) if retriever == "dense" else Bm25.of(corpus)


def application(corpus: Corpus, index: Index) -> Any:
    """The web application over an index."""
    from fastapi import FastAPI

    app = FastAPI(title="retrieval", openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(corpus)}

    @app.post("/retrieve")
    def retrieve(request: SearchRequest) -> dict[str, Any]:
        results = index.search(request.queries, request.topk)
        if not request.return_scores:
            return {"result": [[corpus[number] for number, _ in one] for one in results]}
        return {"result": [[{"document": corpus[number], "score": score} for number, score in one] for one in results]}

    return app


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that no other process can take the port before the server starts."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port") from None
    listener.listen(128)
    return listener


def serve(corpus: Corpus, index: Index, host: str, port: int, say: Callable[[int], None]) -> None:
    """Serve until the process is stopped. `say` gets the port as soon as the socket listens."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(application(corpus, index), log_level="warning", access_log=False))
    listening = listen(host, port)
    say(int(listening.getsockname()[1]))
    server.run(sockets=[listening])


def die_with_parent() -> None:
    """End the process when its standard input closes: the parent has the other end, which closes however it dies."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """The server process of a run: it prints its port on standard output when it is ready."""
    parser = argparse.ArgumentParser(description="started by the environment search; see turnwise retrieve --help")
    parser.add_argument("corpus")
    parser.add_argument("retriever", choices=RETRIEVERS)
    chosen = parser.parse_args()
    die_with_parent()
    try:
        corpus = Corpus(corpus_file(chosen.corpus))
        index = open_index(corpus, chosen.retriever, make=chosen.retriever == "bm25")
    except ValueError as error:
        print(f"error {error}", flush=True)
        sys.exit(2)
    serve(corpus, index, "127.0.0.1", 0, lambda port: print(f"port {port}", flush=True))


if __name__ == "__main__":
    main()
