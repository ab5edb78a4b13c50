"""A request while it is served: from its prompt to its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from turnwise.engines.base import Completion, Engine, Sampling, can_stream, shown
from turnwise.messages import Message
from turnwise.rollout.render.renderer import Prompt, Renderer, frozen
from turnwise.serve.dialects.answer import AnswerHead, ServedAnswer
from turnwise.serve.dialects.ask import Ask, Messages, Refusal, unfit
from turnwise.serve.history import ServedTurn
from turnwise.serve.streamed import LiveAnswer, StreamedText
from turnwise.types import Break, StopReason, Turn

NO_TOOLS = 'this model is served without a format for tool calls; set rollout.tools = "auto"'

ANY = "*"
"""The alias that every name matches."""


@dataclass(eq=False, slots=True)
class ServedCall:
    """A request that is being served."""

    ask: Ask
    messages: Messages
    """Messages of the prompt. Answers of the model are our originals, not the copies that the client sent back."""
    prompt: Prompt
    sampling: Sampling
    overridden: Mapping[str, Any]
    number: int
    """Number of earlier requests of the session; the sampling noise depends on it."""
    before: ServedTurn | None = None
    """The turn that it continues."""
    sent: Messages = ()
    """The messages as the client sent them."""
    live: LiveAnswer | None = None
    """The answer while it is sampled, if the client wants it streamed."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    work: asyncio.Task[ServedAnswer] | None = None
    listeners: int = 1
    """Clients that wait for its answer: more than one if a client retries."""
    turn: Turn | None = None
    answer: ServedAnswer | None = None
    cached: int = 0
    """Tokens of the prompt that the engine had cached."""
    reward: float = 0.0
    heard: Messages = ()
    seconds: float = 0.0
    """Seconds between its answer and the first request that continued it."""

    def head(self, model: str) -> AnswerHead:
        """What is known of the answer before it is sampled."""
        return AnswerHead(self.id, self.created, model, len(self.prompt.tokens))

    def start(self, work: Coroutine[Any, Any, ServedAnswer], renderer: Renderer, name: str) -> None:
        """Start to sample."""
        if self.ask.stream:
            # What a grammar makes is text, even where it looks like a call.
            raw = self.ask.raw is not None or self.sampling.grammar is not None
            text = StreamedText(renderer, self.prompt.tokens, self.sampling.stop, raw=raw)
            self.live = LiveAnswer(text)
        self.work = asyncio.create_task(work, name=name)
        self.work.add_done_callback(self.ended)

    def ended(self, work: asyncio.Task[ServedAnswer]) -> None:
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not report it
        if self.live is not None:
            self.live.end()


def prompt_after(renderer: Renderer, ask: Ask, messages: Messages, before: ServedTurn | None) -> Prompt:
    """The prompt of a request: the exact tokens of the turn it continues plus the new messages, or a new rendering."""
    if renderer.template.format is None and (ask.tools or any(message.calls for message in messages)):
        raise unfit(NO_TOOLS)
    try:
        if before is None:
            return renderer.first(messages, ask.tools)
        return renderer.next(before.turn, before.messages, messages, ask.tools, before.tools)
    except ValueError as error:
        raise unfit(" ".join(str(error).split()), "invalid_value") from None


def raw_prompt(renderer: Renderer, raw: str | tuple[int, ...]) -> Prompt:
    """A prompt that a client wrote itself, control tokens included."""
    if isinstance(raw, str):
        return Prompt(frozen(renderer.encode_raw(raw)))
    size = len(renderer.tokenizer)
    if not all(0 <= token < size for token in raw):
        raise unfit(f"prompt: tokens must be between 0 and {size - 1}", "invalid_value")
    return Prompt(frozen(np.array(raw, np.int32)))


def too_long(size: int, longest: int) -> Refusal:
    return unfit(
        f"the prompt has {size} tokens, and the longest that is served has {longest}", "context_length_exceeded"
    )


def too_large(size: int, largest: int) -> Refusal:
    return unfit(f"the new messages have {size} bytes; the limit is {largest}", "context_length_exceeded")


def fewest_tokens(renderer: Renderer, ask: Ask) -> int:
    """A lower bound on the tokens of a prompt, without tokenising it: far too long prompts are refused early."""
    if isinstance(ask.raw, tuple):
        return len(ask.raw)
    texts = [ask.raw or ""]
    texts += [text for message in ask.messages for text in (message.content, *(call.text for call in message.calls))]
    return sum(map(len, texts)) // longest_token(renderer)


@lru_cache(maxsize=8)
def longest_token(renderer: Renderer) -> int:
    """Characters of the longest token."""
    return max(map(len, renderer.tokenizer.get_vocab()), default=1)


async def generated(engine: Engine, call: ServedCall, session: str, seed: int) -> Completion:
    """The engine's completion. A ValueError of the engine means that the request is invalid."""
    try:
        prompt, sampling = call.prompt.tokens, call.sampling
        if call.live is not None and can_stream(engine):
            return await engine.generate(prompt, sampling, session=session, seed=seed, on_tokens=call.live.hear)
        return await engine.generate(prompt, sampling, session=session, seed=seed)
    except ValueError as error:
        raise unfit(" ".join(str(error).split()), "invalid_value") from None


def finished(call: ServedCall, completion: Completion, renderer: Renderer) -> Turn:
    """The turn of a completed call; its reward is not known yet."""
    tokens = completion.tokens
    call.cached = completion.cached
    # What a grammar made is text, even where it looks like a call.
    if call.ask.raw is None and call.sampling.grammar is None:
        message = renderer.said(call.prompt.tokens, tokens, call.ask.tools)
    else:
        message = Message("assistant", spoken(renderer, completion))
    return Turn(
        prompt=call.prompt.tokens,
        action=tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        stop=completion.stop,
        reward=0.0,
        said=message,
        timing=completion.timing,
        broke=Break.none,
        allowed=completion.allowed,
        routes=completion.routes,
    )


def spoken(renderer: Renderer, completion: Completion) -> str:
    return renderer.decode(renderer.without_end(completion.tokens).tolist())


def cut_short(call: ServedCall, renderer: Renderer, model: str) -> bool:
    """Make the turn and the answer of a call whose client hung up in the middle of a stream, from the text that it
    took; False if it took none."""
    taken, told = call.live.taken() if call.live is not None else (None, None)
    if taken is None or not len(taken.tokens):
        return False
    completion = Completion(
        taken.tokens, taken.logprobs, taken.versions, StopReason.abort, allowed=taken.allowed, cached=call.cached
    )
    call.turn = finished(call, completion, renderer)
    call.answer = answer_of(call, call.turn, renderer, model, told)
    return True


def answer_of(
    call: ServedCall, turn: Turn, renderer: Renderer, model: str, told: Message | None = None
) -> ServedAnswer:
    """The answer of a call as its client reads it; `told` is what it has read of an answer that was cut short."""
    text = renderer.decode(renderer.without_end(turn.action).tolist())
    stopped_by = first_of(call.sampling.stop, text) if turn.stop is StopReason.stop_string else ""
    said = turn.said
    if stopped_by:
        said = replace(said, content=said.content.partition(stopped_by)[0])
    if told is not None:
        said = told
    elif call.live is not None:
        said = call.live.finish(said)
    wanted = turn.action.tolist() if call.ask.logprobs else []
    return ServedAnswer(
        id=call.id,
        created=call.created,
        model=model,
        prompt_tokens=len(turn.prompt),
        said=said,
        stop=turn.stop,
        stopped_by=stopped_by,
        num_tokens=len(turn.action),
        pieces=tuple(renderer.decode([token]) for token in wanted),
        logprobs=tuple(turn.logprobs.tolist()) if wanted else (),
        version=int(turn.versions[-1]) if len(turn.versions) else -1,
        overridden=call.overridden,
        ignored=call.ask.ignored,
        cached_tokens=call.cached,
    )


def first_of(stops: tuple[str, ...], text: str) -> str:
    """The one of some strings that occurs first in a text."""
    occurring = [stop for stop in stops if stop in text]
    return min(occurring, key=text.find, default="")


def check_model(ask: Ask, model: str, aliases: Collection[str]) -> None:
    if not is_served(ask.model, model, aliases):
        raise no_model(ask.model, model)


def is_served(name: str, model: str, aliases: Collection[str]) -> bool:
    """Whether a name stands for the model: its own, an alias, or any name if "*" is an alias."""
    return name == model or name in aliases or ANY in aliases


def no_model(name: str, model: str) -> Refusal:
    return Refusal(404, f"there is no model {shown(name)} here; there is {model!r}", "model_not_found", "model")
