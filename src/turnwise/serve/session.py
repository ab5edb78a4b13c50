"""A session: the model calls of one attempt, recorded as turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.engines.base import Sampling
from turnwise.messages import ToolSpec
from turnwise.rollout.limits import num_bytes, text_bytes
from turnwise.rollout.render.off_loop import render_off_loop
from turnwise.rollout.render.renderer import Prompt, frozen
from turnwise.rollout.scene import Attempt, Scene
from turnwise.routes import first_new
from turnwise.serve.call import (
    ServedCall,
    answer_of,
    check_model,
    cut_short,
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
from turnwise.serve.history import History, ServedTurn
from turnwise.serve.stored import StoredResponse, StoredResponses
from turnwise.serve.streamed import Piece
from turnwise.tokens import extends
from turnwise.types import Break, Status, StopReason, Turn

OVER = "this attempt is over: nothing more is sampled for it"
PATIENCE = 15.0
"""Seconds that an answer is kept for a client that disconnected and may retry. Clients wait less between tries."""


class Session:
    """Serves the model calls of one attempt. Everything here runs in the event loop of the run.

    A call becomes a turn when its answer is handed over, in that order. An answer that no client received had no effect
    and is not recorded. One that a client received in part before it hung up is recorded up to there, as aborted.
    """

    def __init__(self, attempt: Attempt, scene: Scene, model: str, aliases: Sequence[str] = ()) -> None:
        self.attempt = attempt
        self.engine = scene.engine
        self.renderer = scene.renderer
        self.sampling = scene.sampling
        self.limits = scene.limits
        self.model = model
        self.aliases = tuple(aliases)
        self.stored = StoredResponses()
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.history = History()
        self.recorded: list[ServedCall] = []
        self.in_flight: list[ServedCall] = []
        self.num_calls = 0
        self.opening = asyncio.Lock()
        """Serialises requests: a long one is rendered in a thread, and no other may overtake it."""
        self.by_fingerprint: dict[bytes, list[ServedCall]] = {}
        self.by_key: dict[str, tuple[bytes, ServedCall]] = {}
        self.refused: Status | None = None
        """The limit that refused the last request."""
        self.over = False
        self.broken: asyncio.Future[None] = self.loop.create_future()
        """Holds the error after which the attempt cannot go on."""
        self.ended_at: dict[str, float] = {}

    # ------------------------------------------------------------ a request from start to end

    async def open(self, ask: Ask, delivery: Delivery) -> ServedCall:
        """The call that serves a request: a new one, or for a retry the one that the first try started."""
        check_model(ask, self.model, self.aliases)
        if self.over:
            raise Refusal(410, OVER, "session_over")
        async with self.opening:
            call = self.find_retried(delivery)
            if call is not None:
                call.listeners += 1
                return call
            call = await self.start_call(ask)
            self.by_fingerprint.setdefault(delivery.fingerprint, []).append(call)
            if delivery.key:
                self.by_key[delivery.key] = delivery.fingerprint, call
            return call

    async def next_pieces(self, call: ServedCall, index: int) -> list[Piece]:
        """The pieces of a streamed answer from a number on; none if there are no more."""
        assert call.live is not None
        return await call.live.after(index)

    async def wait(self, call: ServedCall) -> ServedAnswer:
        """The answer of a call. A client that hangs up does not end the call."""
        assert call.work is not None
        try:
            return await asyncio.shield(call.work)
        except asyncio.CancelledError:
            if call.work.cancelled():
                raise Refusal(410, OVER, "session_over") from None
            raise

    async def hand_over(self, call: ServedCall) -> ServedAnswer:
        """The answer of a call, which is recorded as a turn."""
        answer = await self.wait(call)
        await self.record(call)
        return answer

    async def record(self, call: ServedCall) -> None:
        """The answer is handed over: the call counts as a turn from now on."""
        self.keep(call)

    def keep(self, call: ServedCall) -> None:
        if self.over or call not in self.in_flight:
            return
        assert call.turn is not None
        assert call.answer is not None
        self.in_flight.remove(call)
        self.recorded.append(call)
        self.refused = None
        self.ended_at[call.id] = self.now()
        told = call.answer.said
        if call.ask.raw is None:
            self.history.add(ServedTurn(call.turn, call.messages, call.ask.tools, call.sent, told))
            self.stored.add(StoredResponse(call.ask, call.answer, call.sent[call.ask.instructions :], told))

    def leave(self, call: ServedCall, for_good: bool) -> None:
        """A client has its answer or hung up. One that began to receive the answer does not retry (`for_good`)."""
        call.listeners -= 1
        if for_good:
            self.forget(call)
        else:
            self.loop.call_later(PATIENCE, self.forget, call)

    def forget(self, call: ServedCall) -> None:
        """End a call that no client waits for and that was not recorded. What a client has read of it may have had an
        effect: that is recorded as a turn which was aborted."""
        if call.listeners > 0 or call not in self.in_flight:
            return
        if call.work is not None:
            call.work.cancel()
        for calls in self.by_fingerprint.values():
            if call in calls:
                calls.remove(call)
        self.by_key = {key: entry for key, entry in self.by_key.items() if entry[1] is not call}
        if not self.over and cut_short(call, self.renderer, self.model):
            self.keep(call)
        else:
            self.in_flight.remove(call)

    def end(self) -> None:
        """Serve nothing more, and cancel the calls in flight."""
        self.over = True
        for call in self.in_flight:
            if call.work is not None:
                call.work.cancel()
        self.in_flight = []
        if not self.broken.cancel() and not self.broken.cancelled():
            self.broken.exception()  # retrieved, so that asyncio does not report it

    def fail(self, error: Exception) -> None:
        """An error of the engine or the environment: the attempt cannot count."""
        if not self.broken.done():
            self.broken.set_exception(error)

    # ------------------------------------------------------------ retries

    def find_retried(self, delivery: Delivery) -> ServedCall | None:
        """The call of an earlier try, if this is a retry."""
        if delivery.key in self.by_key:
            fingerprint, call = self.by_key[delivery.key]
            if fingerprint != delivery.fingerprint:
                raise unfit("this Idempotency-Key was used for another request", "idempotency_key_reused")
            return call
        if delivery.key or not delivery.retry:
            return None
        same_request = self.by_fingerprint.get(delivery.fingerprint, [])
        abandoned = [call for call in same_request if not call.listeners and call in self.in_flight]
        answered = [call for call in same_request if call in self.recorded]
        # A call whose client still waits belongs to another client, unless there is no other call.
        return next(iter([*abandoned, *reversed(answered), *reversed(same_request)]), None)

    # ------------------------------------------------------------ from a request to a prompt

    async def start_call(self, ask: Ask) -> ServedCall:
        if len(self.recorded) + len(self.in_flight) >= self.limits.max_turns:
            self.refused = Status.too_many_turns
            raise Refusal(410, f"this attempt has had its {self.limits.max_turns} turns", "too_many_turns")
        self.room(fewest_tokens(self.renderer, ask))
        messages, sent, before, prompt = await self.read(ask)
        if self.over:
            raise Refusal(410, OVER, "session_over")
        room = self.room(len(prompt.tokens))
        limit = room if ask.max_tokens is None else min(room, ask.max_tokens)
        try:
            stop = (*self.sampling.stop, *ask.stop)
            last = None if before is None else before.turn
            routes = None if self.sampling.routes is None else first_new(prompt.tokens, last)
            sampling = replace(self.sampling, max_tokens=limit, stop=stop, grammar=ask.grammar, routes=routes)
        except ValueError as error:
            raise unfit(str(error), "invalid_value") from None
        call = ServedCall(ask, messages, prompt, sampling, overridden(ask, sampling), self.num_calls, before, sent)
        self.num_calls += 1
        if before is not None and not before.continued:
            before.continued = True
            earlier = next(call for call in self.recorded if call.turn is before.turn)
            earlier.heard = messages[len(before.messages) + 1 :]
            earlier.seconds = self.now() - self.ended_at[earlier.id]
        self.in_flight.append(call)
        call.start(self.sample(call), self.renderer, f"{self.attempt.session}: request {call.number}")
        return call

    async def read(self, ask: Ask) -> tuple[Messages, Messages, ServedTurn | None, Prompt]:
        """(messages of the prompt, the same as the client sent them, the turn that the request continues, the
        prompt)."""
        if ask.raw is not None:
            self.check_size(num_bytes(ask.raw) if isinstance(ask.raw, str) else 0)
            return (), (), None, await render_off_loop(self.raw_prompt, ask.raw)
        messages = sent = new = self.stored.followed(ask)
        before = self.history.find(messages)
        if before is not None:
            new = messages[len(before.messages) + 1 :]
            messages, sent = (*before.messages, before.turn.said, *new), (*before.sent, before.told, *new)
        self.check_size(text_bytes(new, ask.tools))
        return messages, sent, before, await render_off_loop(prompt_after, self.renderer, ask, messages, before)

    async def count(self, ask: Ask) -> int:
        """The tokens of the prompt that a request would have. Nothing is sampled or recorded."""
        check_model(ask, self.model, self.aliases)
        if self.over:
            raise Refusal(410, OVER, "session_over")
        refused = self.refused
        try:
            async with self.opening:
                _, _, _, prompt = await self.read(ask)
        finally:
            self.refused = refused  # a count ends no attempt
        return len(prompt.tokens)

    def check_size(self, size: int) -> None:
        """Refuse a request that is too large to be tokenised."""
        if size > self.limits.observation_bytes:
            self.refused = Status.observation_too_large if self.recorded else Status.prompt_too_long
            raise too_large(size, self.limits.observation_bytes)

    def raw_prompt(self, raw: str | tuple[int, ...]) -> Prompt:
        """A prompt that the client wrote as text or tokens. Text that continues a turn keeps that turn's tokens."""
        if isinstance(raw, tuple):
            return raw_prompt(self.renderer, raw)
        decode = self.renderer.decode
        for call in sorted(self.recorded, key=lambda call: -len(call.prompt.tokens)):
            turn = call.turn
            if call.ask.raw is None or turn is None or turn.stop is StopReason.end_token:
                continue
            text = decode([*turn.prompt.tolist(), *turn.action.tolist()])
            if raw.startswith(text):
                new_tokens = self.renderer.encode_raw(raw[len(text) :])
                return Prompt(frozen(np.concatenate([turn.prompt, turn.action, new_tokens]).astype(np.int32)))
        return raw_prompt(self.renderer, raw)

    def room(self, size: int) -> int:
        """Tokens that may be sampled after `size` tokens. A limit that leaves none sets the status of the attempt."""
        room = self.limits.room_for_action(size, self.engine.context)
        if room == 0:
            self.refused = Status.too_long if self.recorded else Status.prompt_too_long
            longest = min(self.limits.max_prompt_tokens, self.limits.max_trajectory_tokens - 1, self.engine.context - 1)
            raise too_long(size, longest)
        return room

    # ------------------------------------------------------------ sampling

    async def sample(self, call: ServedCall) -> ServedAnswer:
        """The answer that the engine samples. If the engine fails, so does the session: no answer is invented."""
        try:
            async with asyncio.timeout(self.limits.call_seconds):
                completion = await generated(self.engine, call, self.attempt.session, self.attempt.noise(call.number))
            call.turn = finished(call, completion, self.renderer)
            call.answer = answer_of(call, call.turn, self.renderer, self.model)
            return call.answer
        except Refusal:
            if call in self.in_flight:  # it does not count against max_turns
                self.in_flight.remove(call)
            raise
        except TimeoutError as error:
            self.fail(error)
            raise Refusal(504, "the engine took longer than rollout.limits.call_seconds", "timeout") from None
        except Exception as error:
            self.fail(error)
            raise Refusal(500, f"the engine failed: {error}", "engine_failure") from None

    # ------------------------------------------------------------ the result

    def pay(self, reward: float) -> None:
        """Pay for the last recorded turn."""
        if reward and not self.recorded:
            raise ValueError("the environment gave a reward before the first turn")
        if reward:
            self.recorded[-1].reward += reward

    def first_shown(self) -> tuple[Messages, tuple[ToolSpec, ...]]:
        """The messages and the tools of the first recorded turn."""
        return (self.recorded[0].messages, self.recorded[0].ask.tools) if self.recorded else ((), ())

    def turns(self) -> list[Turn]:
        """The turns in the order they were recorded. A turn whose prompt does not extend the turn before says why: the
        agent chose another history, unless it continued that very turn."""
        turns: list[Turn] = []
        for index, call in enumerate(self.recorded):
            assert call.turn is not None
            broke = Break.none
            if index and not extends(call.turn, self.recorded[index - 1].turn or call.turn):
                follows = call.before is not None and call.before.turn is self.recorded[index - 1].turn
                broke = call.prompt.broke if follows and call.prompt.broke is not Break.none else Break.history
            timing = replace(call.turn.timing, environment=call.seconds)
            turns.append(replace(call.turn, reward=call.reward, heard=call.heard, timing=timing, broke=broke))
        return turns


def overridden(ask: Ask, sampling: Sampling) -> Mapping[str, Any]:
    """Sampling settings of the client that were overridden, with the values used instead."""
    used: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    settings = {name: max(0, value) if name == "top_k" else value for name, value in ask.settings.items()}
    return {
        name: {"asked": value, "used": used.get(name)}
        for name, value in settings.items()
        if name not in used or used[name] != value
    }
