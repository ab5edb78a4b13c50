"""vLLM as an engine: tokens in, tokens out, with the logprob and the version of every one.

vLLM has a copy of the weights of its own, in a process of its own, here or elsewhere. It names the version that sampled
each token. Prefixes are computed anew after each load, because calls are salted with its number: nothing has to be
reset while other calls are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turnwise.engines.base import BusyTime, Completion, EngineFailure, Sampling, checked_prompt, nothing
from turnwise.engines.vllm.service import Answer, Call, Service
from turnwise.types import StopReason, Tokens
from turnwise.weights.vllm_transfer import Transfer

COLDEST_OF_VLLM = 0.01
"""vLLM raises lower temperatures to this, except 0."""
ABORT_SECONDS = 0.05
"""How long an abort waits for its call to end before it says so again: vLLM forgets one that comes before the call."""


@dataclass(eq=False, slots=True)
class Visit:
    """A caller, from when it comes until it goes."""

    session: str
    turn: asyncio.Future[bool]
    """Whether it may go on: True when a slot is free, False when it was aborted before that."""
    work: asyncio.Task[Answer] | None = None
    name: str = ""
    aborted: bool = False


class VllmEngine:
    """`Engine` over a `Service`, with at most `slots` calls under way: vLLM has no queue of its own then, in which a
    call would wait through a load and go on from prefixes that older weights computed.

    Example:
        VllmEngine(VllmServer("http://host:8000"), FileTransfer(torch.float32), slots=64, context=4096,
                   vocabulary=32000, end_tokens=[2], tensors=model.state_dict(), version=0)
    """

    shares_weights = False

    def __init__(
        self,
        service: Service,
        transfer: Transfer,
        *,
        slots: int,
        context: int,
        vocabulary: int,
        end_tokens: Iterable[int],
        tensors: Iterable[str],
        version: int = 0,
        keep_cache: bool = False,
        first: Mapping[str, Any] | None = None,
    ) -> None:
        """`tensors` are the names that every load must have; `first` are the weights of `version`, where the service
        starts with others; `keep_cache` reuses prefixes that older weights computed."""
        self.service = service
        self.transfer = transfer
        self.context = context
        self.vocabulary = vocabulary
        self.version = version
        self.keep_cache = keep_cache
        self.first = first
        self.end_tokens = sorted(set(end_tokens))
        self.tensors = frozenset(tensors)
        self.free = slots
        self.queue: deque[Visit] = deque()
        self.visits: list[Visit] = []
        self.num_loads = self.forgotten = 0
        self.started = self.paused = self.closed = False
        self.changing = asyncio.Lock()  # held while weights, pauses and the service itself change
        self.numbers = itertools.count()
        self.prefix = uuid.uuid4().hex[:12]  # several engines may call one server
        self.busy = BusyTime()

    @property
    def seconds(self) -> float:
        """The time during which vLLM had at least one call: it does not report the time of its forward passes. Time in
        which those calls waited, for a load of weights or for other callers of a server, is included."""
        return self.busy.seconds

    # ------------------------------------------------------------ calls

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context, vocabulary=self.vocabulary)
        if 0 < sampling.temperature < COLDEST_OF_VLLM:
            raise ValueError(f"vLLM samples at a temperature of 0, or of {COLDEST_OF_VLLM} and more; set that")
        if self.closed:
            raise EngineFailure("the engine was closed")
        if sampling.max_tokens == 0:
            return nothing(StopReason.length)
        came = time.perf_counter()
        visit = Visit(session, asyncio.get_running_loop().create_future())
        self.visits.append(visit)
        try:
            if not await self.enter(visit):
                return completion_of(None, sampling)
            try:
                queued = time.perf_counter() - came
                answer = await self.ask(visit, tokens, sampling_params(sampling, self, len(tokens), seed))
            finally:
                self.leave()
        finally:
            self.visits.remove(visit)
        found = completion_of(answer, sampling)
        return replace(found, timing=replace(found.timing, queued=found.timing.queued + queued))

    async def ask(self, visit: Visit, prompt: Tokens, sampling: Mapping[str, Any]) -> Answer | None:
        """vLLM's answer; None where the caller was aborted before it was asked."""
        tokens: list[int] = prompt.tolist()
        while True:
            async with self.changing:
                await self.start()
                version, salt = self.version, self.salt
            if visit.aborted:
                return None
            visit.name = f"{self.prefix}-{next(self.numbers)}"
            call = Call(visit.name, tokens, sampling, salt, visit.session)
            visit.work = asyncio.create_task(self.service.generate(call), name=f"vLLM {visit.name}")
            try:
                with self.busy:
                    answer = await visit.work
            except asyncio.CancelledError:
                if self.closed and not cancelled_from_outside():
                    raise EngineFailure("the engine was closed") from None
                visit.work.cancel()
                await asyncio.gather(visit.work, return_exceptions=True)
                raise
            except Exception as error:  # whatever vLLM or the network does is a failure of the engine
                raise EngineFailure(f"vLLM failed: {in_one_line(error)}") from error
            # A call that a load overtook before its first token may have looked at prefixes of the older weights.
            if visit.aborted or self.keep_cache or not answer.tokens or answer.spans[0].version == str(version):
                return answer

    @property
    def salt(self) -> str:
        return f"{0 if self.keep_cache else self.num_loads}.{self.forgotten}"

    async def enter(self, visit: Visit) -> bool:
        """Wait for a slot; False where the visit was aborted first."""
        if self.free and not self.queue:
            self.free -= 1
            return True
        self.queue.append(visit)
        try:
            return await visit.turn
        except asyncio.CancelledError:
            if visit.turn.done() and not visit.turn.cancelled() and visit.turn.result():
                self.leave()
            raise

    def leave(self) -> None:
        """Hand a slot on."""
        while self.queue:
            following = self.queue.popleft()
            if not following.turn.done():
                following.turn.set_result(True)
                return
        self.free += 1

    async def abort(self, session: str) -> None:
        ending = [visit for visit in self.visits if visit.session == session]
        for visit in ending:
            visit.aborted = True
            if visit in self.queue and not visit.turn.done():
                visit.turn.set_result(False)
        await asyncio.gather(*(self.end(visit) for visit in ending))

    async def end(self, visit: Visit) -> None:
        """Have an aborted call answer."""
        while visit in self.visits:
            if visit.work is not None and not visit.work.done():
                await self.service.abort(visit.name)
                await asyncio.wait({visit.work}, timeout=ABORT_SECONDS)
            else:
                await asyncio.sleep(0)

    # ------------------------------------------------------------ weights

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        if missing := self.tensors - weights.keys():
            raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {min(missing)}")
        async with self.changing:
            self.first = None
            await self.start()
            await self.send(weights, version)

    async def send(self, weights: Mapping[str, Any], version: int) -> None:
        """Load between two tokens. After a load that failed nothing is sampled before one has succeeded: nobody knows
        which weights are there."""
        try:
            await self.service.pause()
            await self.transfer.send(weights, version, self.service)
            self.version = version
            self.num_loads += 1  # a version may be loaded again, with other weights
            if not self.paused:
                await self.service.resume()
        except Exception as error:
            raise EngineFailure(f"vLLM could not load version {version}: {in_one_line(error)}") from error

    async def open(self) -> None:
        """Start vLLM."""
        async with self.changing:
            await self.start()

    async def start(self) -> None:
        """Start the service, once, while changes are locked out."""
        if self.closed:
            raise EngineFailure("the engine was closed")
        if not self.started:
            try:
                await self.service.start(self.context)
                if self.first is None:
                    await self.service.name_version(str(self.version))
            except Exception as error:
                raise EngineFailure(f"vLLM did not start: {in_one_line(error)}") from error
            self.started = True
        if self.first is not None:
            await self.send(self.first, self.version)
            self.first = None

    # ------------------------------------------------------------ the rest

    async def forget(self) -> None:
        self.forgotten += 1

    async def pause(self) -> None:
        async with self.changing:
            await self.start()
            await self.service.pause()
            self.paused = True

    async def resume(self) -> None:
        async with self.changing:
            await self.start()
            self.paused = False
            await self.service.resume()

    async def close(self) -> None:
        self.closed = True
        for visit in self.visits:
            if not visit.turn.done():
                visit.turn.set_exception(EngineFailure("the engine was closed"))
                visit.turn.exception()
            if visit.work is not None:
                visit.work.cancel()
        async with self.changing:
            if self.started:
                self.started = False
                with contextlib.suppress(Exception):
                    await self.transfer.close()
                await self.service.close()


def sampling_params(sampling: Sampling, engine: VllmEngine, prompt_tokens: int, seed: int) -> dict[str, Any]:
    """How vLLM is told to sample. It ends at our end tokens and no others, and text is made only to look for stop
    strings in it."""
    return {
        "max_tokens": min(sampling.max_tokens, engine.context - prompt_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": signed(seed),
        "logprobs": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": engine.end_tokens,
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def signed(seed: int) -> int:
    """64 bits as vLLM takes them: signed, and -1 would mean none."""
    number = seed - (1 << 64) if seed >> 63 else seed
    return number if number != -1 else -2


def completion_of(answer: Answer | None, sampling: Sampling) -> Completion:
    """What was sampled; None is a call that was aborted before it began."""
    if answer is None:
        return nothing(StopReason.abort)
    tokens = np.asarray(answer.tokens, np.int32)
    logprobs = np.asarray(answer.logprobs, np.float32)
    if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
        raise EngineFailure(f"vLLM gave {len(tokens)} tokens no finite logprob each: the model's logits are no numbers")
    if sampling.temperature == 0:
        logprobs = np.zeros_like(logprobs)  # the distribution sampled from has one token; vLLM tells another's
    versions = versions_of(answer, len(tokens))
    for array in (tokens, logprobs, versions):
        array.flags.writeable = False
    return Completion(tokens, logprobs, versions, stop_reason(answer), answer.timing)


def versions_of(answer: Answer, num_tokens: int) -> Tokens:
    """The version of every token."""
    versions = np.full(num_tokens, -1, np.int32)
    for span in answer.spans:
        if not span.version.isdigit():
            raise EngineFailure(f'vLLM sampled with weights called "{span.version}", which this run has not loaded')
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise EngineFailure("vLLM did not say which weights sampled a token; use version 0.32")
    return versions


def stop_reason(answer: Answer) -> StopReason:
    if answer.finish == "stop":
        return StopReason.stop_string if isinstance(answer.stop, str) else StopReason.end_token
    if answer.finish in ("length", "abort"):
        return StopReason(answer.finish)
    raise EngineFailure(f"vLLM ended a call with {answer.finish!r}")


def in_one_line(error: BaseException) -> str:
    """An error's own text, or that of what caused it: vLLM wraps some in empty ones."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
