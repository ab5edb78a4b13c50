"""OpenAI's /v1/completions: the client writes the whole prompt, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from turnwise.serve.dialects.answer import AnswerHead, Events, ServedAnswer, event
from turnwise.serve.dialects.ask import Ask, Fields, checked_text, unfit
from turnwise.serve.dialects.chat import HARMLESS, error, error_event, finish_of, settings_of, usage_of
from turnwise.serve.dialects.structured import openai_format
from turnwise.serve.seal import ThinkingSeal

__all__ = ["error", "error_event", "read", "stream", "write"]

DEFAULT_TOKENS = 16
"""The default of max_tokens in OpenAI's interface."""


def read(body: Any, seal: ThinkingSeal) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    raw = prompt_of(fields)
    limit = fields.integer("max_tokens", 1)
    grammar, _ = openai_format(fields, fields.table("response_format"), "response_format", has_tools=False)
    settings, stop, stream = settings_of(fields), fields.texts("stop"), fields.flag("stream")
    logprobs = fields.take("logprobs", (int, bool), "a whole number")
    if logprobs is not None and logprobs > 1:
        raise unfit("logprobs may be 0 or 1: only the sampled token's logprob is known")
    usage = Fields(fields.table("stream_options"), "stream_options")
    fields.refuse("n", "best_of", unless=(1,), why="may only be 1: send several requests, each gives a new sample")
    fields.refuse("echo", unless=(False,))
    fields.refuse("suffix", unless=("",))
    fields.refuse("logit_bias")
    fields.ignore(*HARMLESS)
    fields.note_unknown()
    return Ask(
        model,
        raw=raw,
        max_tokens=DEFAULT_TOKENS if limit is None else limit,
        stop=stop,
        settings=settings,
        logprobs=logprobs is not None,
        stream=stream,
        stream_usage=usage.flag("include_usage"),
        grammar=grammar,
        ignored=fields.ignored.listed,
    )


def prompt_of(fields: Fields) -> str | tuple[int, ...]:
    """A string, an array of tokens, or an array of one of these."""
    prompt = fields.left.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return checked_text(prompt, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise unfit("prompt must be one string or one array of tokens, and not empty", "invalid_type")


def logprobs_of(answer: ServedAnswer) -> dict[str, Any]:
    starts = [0, *accumulate(map(len, answer.pieces))][:-1]
    logprobs = list(answer.logprobs)
    return {"tokens": list(answer.pieces), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}


def head(answer: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }


def choice_of(text: str, finish: str | None, logprobs: Any = None) -> list[dict[str, Any]]:
    return [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}]


def write(ask: Ask, answer: ServedAnswer, seal: ThinkingSeal) -> dict[str, Any]:
    choices = choice_of(answer.content, finish_of(answer), logprobs_of(answer) if ask.logprobs else None)
    return {**head(answer), "choices": choices, "usage": usage_of(answer), "turnwise": answer.note}


class TextStream:
    """Chunks of a text completion."""

    def __init__(self, ask: Ask, opening: AnswerHead, seal: ThinkingSeal) -> None:
        self.ask = ask
        self.start = head(opening)

    def begin(self) -> Iterator[str]:
        return iter(())

    def more(self, thinking: str, content: str) -> Iterator[str]:
        yield event({**self.start, "choices": choice_of(content, None)})

    def end(self, answer: ServedAnswer) -> Events:
        last = choice_of("", finish_of(answer), logprobs_of(answer) if self.ask.logprobs else None)
        yield event({**self.start, "choices": last, "turnwise": answer.note}), True
        if self.ask.stream_usage:
            yield event({**self.start, "choices": [], "usage": usage_of(answer)}), False
        yield event("[DONE]"), False


stream = TextStream
