"""A model for every client that has the key, with the client's sampling settings. Only a log line is recorded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from turnwise.engines.base import Engine, Sampling
from turnwise.rollout.limits import largest_text, num_bytes, text_bytes
from turnwise.rollout.render.off_loop import render_off_loop
from turnwise.rollout.render.renderer import Prompt, Renderer
from turnwise.seeds import seed_of
from turnwise.serve.call import (
    ServedCall,
    answer_of,
    check_model,
    fewest_tokens,
    finished,
    generated,
    prompt_after,
    raw_prompt,
    too_large,
    too_long,
)
from turnwise.serve.dialects.answer import ServedAnswer
from turnwise.serve.dialects.ask import Ask, Delivery, Messages, Refusal, unfit
from turnwise.serve.stored import StoredResponse, StoredResponses
from turnwise.serve.streamed import Piece

log = logging.getLogger(__name__)
FOLLOWED = ("temperature", "top_p", "top_k", "seed")


class Public:
    """Serves independent requests. All its methods run in one event loop."""

    def __init__(self, engine: Engine, renderer: Renderer, model: str, aliases: Sequence[str] = ()) -> None:
        self.engine = engine
        self.renderer = renderer
        self.model = model
        self.aliases = tuple(aliases)
        self.stored = StoredResponses()
        self.loop = asyncio.get_running_loop()
        self.num_calls = 0

    async def open(self, ask: Ask, delivery: Delivery) -> ServedCall:
        check_model(ask, self.model, self.aliases)
        messages, prompt = await self.read(ask)
        sampling = sampling_of(ask, self.engine.context - len(prompt.tokens))
        self.num_calls += 1
        call = ServedCall(ask, messages, prompt, sampling, {}, self.num_calls)
        call.start(self.sample(call), self.renderer, f"request {call.number}")
        return call

    async def read(self, ask: Ask) -> tuple[Messages, Prompt]:
        """The messages of a request, with those of the response that it continues, and their prompt."""
        messages = self.stored.followed(ask)
        longest = self.engine.context - 1
        if (size := fewest_tokens(self.renderer, ask)) > longest:
            raise too_long(size, longest)
        raw = ask.raw if isinstance(ask.raw, str) else ""
        if (size := text_bytes(messages, ask.tools) + num_bytes(raw)) > largest_text(longest):
            raise too_large(size, largest_text(longest))
        if ask.raw is not None:
            prompt = await render_off_loop(raw_prompt, self.renderer, ask.raw)
        else:
            prompt = await render_off_loop(prompt_after, self.renderer, ask, messages, None)
        if (size := len(prompt.tokens)) > longest:
            raise too_long(size, longest)
        return messages, prompt

    async def count(self, ask: Ask) -> int:
        """The tokens of the prompt that a request would have."""
        check_model(ask, self.model, self.aliases)
        _, prompt = await self.read(ask)
        return len(prompt.tokens)

    async def sample(self, call: ServedCall) -> ServedAnswer:
        began = time.perf_counter()
        chosen_seed = call.ask.settings.get("seed")
        seed = seed_of("public", call.id if chosen_seed is None else chosen_seed)
        try:
            completion = await generated(self.engine, call, f"public/{call.id}", seed)
        except Refusal:
            raise
        except Exception as error:
            log.warning("request %d failed: %s", call.number, error)
            raise Refusal(500, f"the engine failed: {error}", "engine_failure") from None
        turn = call.turn = finished(call, completion, self.renderer)
        seconds = time.perf_counter() - began
        size = len(turn.prompt)
        log.info("request %d: %d tokens in, %d out, %.2f s", call.number, size, len(turn.action), seconds)
        call.answer = answer_of(call, turn, self.renderer, self.model)
        return call.answer

    async def next_pieces(self, call: ServedCall, index: int) -> list[Piece]:
        assert call.live is not None
        return await call.live.after(index)

    async def wait(self, call: ServedCall) -> ServedAnswer:
        assert call.work is not None
        return await asyncio.shield(call.work)

    async def hand_over(self, call: ServedCall) -> ServedAnswer:
        answer = await self.wait(call)
        await self.record(call)
        return answer

    async def record(self, call: ServedCall) -> None:
        """Keep the answer if its client may refer to it."""
        assert call.answer is not None
        assert call.turn is not None
        messages = call.messages[call.ask.instructions :]
        self.stored.add(StoredResponse(call.ask, call.answer, messages, call.turn.said))

    def leave(self, call: ServedCall, for_good: bool) -> None:
        """Cancel the call of a client that has left; no other client waits for it."""
        if call.work is not None:
            call.work.cancel()


def sampling_of(ask: Ask, room: int) -> Sampling:
    """The client's sampling settings; settings that the engine does not support are refused."""
    settings: dict[str, Any] = dict(ask.settings)
    for name in settings:
        if name not in FOLLOWED:
            raise unfit(f"{name} is not supported; remove it", "unsupported_parameter")
    try:
        return Sampling(
            max_tokens=room if ask.max_tokens is None else min(room, ask.max_tokens),
            temperature=settings.get("temperature", 1.0),
            top_p=settings.get("top_p", 1.0),
            top_k=max(0, settings.get("top_k", 0)),
            stop=ask.stop,
            grammar=ask.grammar,
        )
    except ValueError as error:
        raise unfit(str(error), "invalid_value") from None
