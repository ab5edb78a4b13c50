"""Retrieval services: an existing server, or a server that is started with the first search."""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import json
import logging
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from turnwise.envs.search.retrieval.corpus import corpus_file
from turnwise.envs.search.retrieval.server import RETRIEVERS, check_packages

log = logging.getLogger(__name__)
UNREACHABLE = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that a server found.

    Example:
        Passage("Fiji: Capital", "name: Suva (on Viti Levu); ...", 14.2)
    """

    title: str
    text: str
    score: float


class SearchService(Protocol):
    """The interface that environments use."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """The best passages for each query. Raises ConnectionError if the service does not answer."""
        ...


def ask(url: str, queries: Sequence[str], topk: int, seconds: float, *, proxies: bool = True) -> list[list[Passage]]:
    """The passages that the server at an address finds, in one call."""
    body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/retrieve", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(*([] if proxies else [urllib.request.ProxyHandler({})]))
    try:
        with opener.open(request, timeout=seconds) as response:
            results = passages_in(json.load(response))
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}/retrieve answered {error.code} {error.reason}") from None
    if len(results) != len(queries):
        raise ValueError(f"the retrieval server at {url} answered {len(results)} of {len(queries)} queries")
    return results


def passages_in(answer: Any) -> list[list[Passage]]:
    """The passages in a server's answer."""
    try:
        return [
            [passage_of(result["document"]["contents"], result["score"]) for result in results]
            for results in answer["result"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the answer of a retrieval server does not have Search-R1's form: {error!r}") from None


def passage_of(contents: str, score: float) -> Passage:
    title, _, text = contents.partition("\n")
    return Passage(title.strip().strip('"'), text.strip(), float(score))


class Remote:
    """An existing server."""

    def __init__(self, url: str, seconds: float = 60.0, tries: int = 4) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f'url = "{url}": write the address of a retrieval server, for instance http://10.0.0.7:8000'
            )
        self.url = url
        self.seconds = seconds
        self.tries = tries

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        for number in range(1, self.tries + 1):
            try:
                return ask(self.url, queries, topk, self.seconds)
            except UNREACHABLE as error:
                if number == self.tries:
                    raise ConnectionError(f"no retrieval server answers at {self.url}: {error}") from None
                time.sleep(0.5 * 2**number)
        raise AssertionError


class Local:
    """A server in a separate process on this machine. It starts with the first search, is restarted if it dies, and
    ends with this process."""

    def __init__(self, corpus: str, retriever: str, seconds: float = 60.0, tries: int = 4) -> None:
        if retriever not in RETRIEVERS:
            raise ValueError(f'retriever = "{retriever}" does not exist; choose one of {", ".join(RETRIEVERS)}')
        check_packages()
        if retriever == "bm25" and importlib.util.find_spec("bm25s") is None:
            raise ValueError('retriever = "bm25" needs bm25s: pip install "turnwise[search]"')
        corpus_file(corpus)
        self.corpus = corpus
        self.retriever = retriever
        self.seconds = seconds
        self.tries = tries
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.port = 0
        self.starts = 0
        """How many times it was started."""
        atexit.register(self.close)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        for number in range(1, self.tries + 1):
            process, url = self.running()
            try:
                return ask(url, queries, topk, self.seconds, proxies=False)
            except UNREACHABLE as error:
                if number == self.tries:
                    raise ConnectionError(f"the retrieval server does not answer: {error}") from None
                log.warning("the retrieval server did not answer (%s); asking again", error)
                self.give_up(process)
        raise AssertionError

    def running(self) -> tuple[subprocess.Popen[str], str]:
        """The process, started if it is not running, and its address."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process, self.port = self.start()
                self.starts += 1
            return self.process, f"http://127.0.0.1:{self.port}"

    def start(self) -> tuple[subprocess.Popen[str], int]:
        """A new process that is ready, and its port. The process may have to make its index first."""
        command = [sys.executable, "-m", "turnwise.envs.search.retrieval.server", self.corpus, self.retriever]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the run, which then ends this process
        )
        assert process.stdout is not None
        word, _, message = process.stdout.readline().strip().partition(" ")
        if word != "port":
            process.kill()
            process.wait()
            raise ValueError(message or "the retrieval server ended before it was ready")
        return process, int(message)

    def give_up(self, process: subprocess.Popen[str]) -> None:
        """End a process that does not answer, unless another caller has already."""
        with self.lock:
            if self.process is process:
                self.end()

    def close(self) -> None:
        with self.lock:
            self.end()

    def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@lru_cache(maxsize=32)
def service_of(url: str, corpus: str, retriever: str) -> SearchService:
    """The service that environments with the same settings share."""
    return Remote(url) if url else Local(corpus, retriever)
