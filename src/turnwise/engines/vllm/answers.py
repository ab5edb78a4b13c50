"""From the answer of a server that samples to a completion. What it says is checked: a server may be broken, and its
tokens, logprobs and versions are trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turnwise.engines.base import MOST_TOKENS, Completion, EngineFailure, Sampling, nothing, shown
from turnwise.engines.remote.answers import checked_logprobs, checked_tokens
from turnwise.engines.vllm.server import ROUTES_OPTION
from turnwise.engines.vllm.service import VllmAnswer
from turnwise.routes import Routes, frozen_routes
from turnwise.tokens import Tokens
from turnwise.types import StopReason


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asked for, and so what its answer may have."""

    sampling: Sampling
    prompt_tokens: int
    max_tokens: int
    vocabulary: int
    versions: Collection[int]
    """Of the weights that the engine had since the call was sent."""
    route_layers: Sequence[int] | None = None
    """The layers that have a router, where the call asked for routes."""


def completion_of(answer: VllmAnswer | None, asked: Asked, name: str) -> Completion:
    """The completion of an answer; None is a call that was aborted before the server got it. An EngineFailure names
    the server whose answer cannot be what was asked for."""
    if answer is None:
        return nothing(StopReason.abort)
    try:
        tokens = checked_tokens(answer.tokens, most=asked.max_tokens, vocabulary=asked.vocabulary)
        logprobs = checked_logprobs(answer.logprobs, len(answer.tokens))
        versions = versions_of(answer, asked.versions)
        stop = stop_reason(answer)
        routes = routes_of(answer, asked)
    except EngineFailure as error:
        raise EngineFailure(f"{name} {error}") from None
    if asked.sampling.temperature == 0:
        logprobs = np.zeros_like(logprobs)  # a greedy choice is certain; vLLM's logprobs are before that choice
    for array in (tokens, logprobs, versions):
        array.flags.writeable = False
    return replace(Completion(tokens, logprobs, versions, stop, answer.timing), routes=routes)


def versions_of(answer: VllmAnswer, known: Collection[int]) -> Tokens:
    """The version of every token: of weights that were live while the call was under way."""
    versions = np.full(len(answer.tokens), -1, np.int32)
    for span in answer.spans:
        if not is_version(span.version):
            raise EngineFailure(f"sampled with weights called {shown(span.version)}, which this run has not loaded")
        versions[max(0, span.start) : max(0, span.end)] = int(span.version)
    if (versions < 0).any():
        raise EngineFailure("did not say which weights sampled a token; use vLLM 0.32")
    if others := set(versions.tolist()) - set(known):
        raise EngineFailure(f"sampled with version {min(others)}, and has been given {max(known, default=None)}")
    return versions


def is_version(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 11 and int(name) <= MOST_TOKENS


def routes_of(answer: VllmAnswer, asked: Asked) -> Routes | None:
    """The routes of an answer in the layers that have a router: vLLM has zeros for the others. None where the call
    asked for none, and where nothing was sampled, because the call was aborted."""
    if asked.sampling.routes is None or asked.route_layers is None or not answer.tokens:
        return None
    routes, layers = answer.routes, list(asked.route_layers)
    count = asked.prompt_tokens + len(answer.tokens) - 1 - asked.sampling.routes
    if routes is None and count == 0:
        return None  # vLLM leaves out what is empty
    if routes is None or routes.ndim != 3 or len(routes) != count or routes.shape[1] <= max(layers):
        given = "none" if routes is None else f"an array {list(routes.shape)}"
        raise EngineFailure(f"gave {given} as the routes of {count} tokens; start it with {ROUTES_OPTION}")
    return frozen_routes(routes[:, layers])


def stop_reason(answer: VllmAnswer) -> StopReason:
    if answer.finish == "stop":
        return StopReason.stop_string if isinstance(answer.stop, str) else StopReason.end_token
    if answer.finish in ("length", "abort"):
        return StopReason(answer.finish)
    raise EngineFailure(f"ended a call with {shown(answer.finish)}")
