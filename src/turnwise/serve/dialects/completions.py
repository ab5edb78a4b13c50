"""OpenAI's /v1/completions: a prompt of the client's own making, which no chat template touches."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from turnwise.serve.dialects.answer import Events, ServedAnswer, event, in_pieces
from turnwise.serve.dialects.ask import Ask, Fields, checked_text, unfit
from turnwise.serve.dialects.chat import HARMLESS, asked_of, error, error_event, finish_of, usage_of

__all__ = ["error", "error_event", "read", "stream", "write"]

DEFAULT_TOKENS = 16
"""What the interface promises where a client names no limit."""


def read(body: Any) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    raw = prompt_of(fields)
    limit = fields.whole("max_tokens", 1)
    asked, stop, stream = asked_of(fields), fields.texts("stop"), fields.flag("stream")
    logprobs = fields.take("logprobs", (int, bool), "a whole number")
    if logprobs is not None and logprobs > 1:
        raise unfit("logprobs may be 0 or 1: only the sampled token's logprob is known")
    usage = Fields(fields.table("stream_options"), "stream_options")
    fields.refuse("n", "best_of", unless=(1,), why="may only be 1: send several requests, each is a sample of its own")
    fields.refuse("echo", unless=(False,))
    fields.refuse("suffix", unless=("",))
    fields.refuse("logit_bias")
    fields.ignore(*HARMLESS)
    fields.done()
    return Ask(
        model,
        raw=raw,
        max_tokens=DEFAULT_TOKENS if limit is None else limit,
        stop=stop,
        asked=asked,
        logprobs=logprobs is not None,
        stream=stream,
        stream_usage=usage.flag("include_usage"),
    )


def prompt_of(fields: Fields) -> str | tuple[int, ...]:
    """A string, an array of tokens, or an array of one of these."""
    given = fields.left.pop("prompt", None)
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
        [given] = given
    if isinstance(given, str) and given:
        return checked_text(given, "prompt")
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        return tuple(given)
    raise unfit("prompt must be one string or one array of tokens, and not empty", "invalid_type")


def logprobs_of(answer: ServedAnswer) -> dict[str, Any]:
    starts = [0, *accumulate(map(len, answer.pieces))][:-1]
    logprobs = list(answer.logprobs)
    return {"tokens": list(answer.pieces), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}


def head(answer: ServedAnswer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }


def choice_of(text: str, finish: str | None, logprobs: Any = None) -> list[dict[str, Any]]:
    return [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}]


def write(ask: Ask, answer: ServedAnswer) -> dict[str, Any]:
    choices = choice_of(answer.content, finish_of(answer), logprobs_of(answer) if ask.logprobs else None)
    return {**head(answer), "choices": choices, "usage": usage_of(answer), "turnwise": answer.note}


def stream(ask: Ask, answer: ServedAnswer) -> Events:
    for piece in in_pieces(answer.content):
        yield event({**head(answer), "choices": choice_of(piece, None)}), False
    last = choice_of("", finish_of(answer), logprobs_of(answer) if ask.logprobs else None)
    yield event({**head(answer), "choices": last, "turnwise": answer.note}), True
    if ask.stream_usage:
        yield event({**head(answer), "choices": [], "usage": usage_of(answer)}), False
    yield event("[DONE]"), False
