"""vLLM as an engine: tokens in, tokens out, with the logprob and the version of every one.

vLLM has a copy of the weights in another process, on this machine or another. It names the version that sampled each
token. Prefixes are computed again after each load, because the cache salt of a call has the number of the load: nothing
has to be reset while other calls are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.engines.base import NO_ROUTES, BusyTime, Completion, EngineFailure, Sampling, checked_prompt, nothing
from turnwise.engines.grammar import Grammar
from turnwise.engines.guidance import NO_GRAMMARS, Guidance
from turnwise.engines.remote.call_slots import CallSlots
from turnwise.engines.remote.failures import cancelled_from_outside, in_one_line
from turnwise.engines.vllm.answers import Asked, completion_of
from turnwise.engines.vllm.guided import with_allowed
from turnwise.engines.vllm.params import sampling_params
from turnwise.engines.vllm.service import VllmAnswer, VllmCall, VllmService
from turnwise.tokens import Tokens
from turnwise.types import StopReason
from turnwise.weights.stages import stage
from turnwise.weights.vllm_transfer import WeightTransfer

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, except 0."""
NOTHING_KEPT = 2
"""The level of vLLM's sleep at which neither weights nor keys and values are kept."""
ABORT_SECONDS = 0.05
"""How long an abort waits for its call to end before it is repeated: vLLM ignores one that comes before the call."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call to the engine until it is answered."""

    session: str
    admitted: asyncio.Future[bool]
    """True when a slot is free, False when the call was aborted before that."""
    request: asyncio.Task[VllmAnswer] | None = None
    """The request to vLLM."""
    name: str = ""
    versions: set[int] = field(default_factory=set)
    """Of the weights that vLLM had since the request was sent."""
    aborted: bool = False


class VllmEngine:
    """`Engine` over a `VllmService`, with at most `slots` calls under way. So no call waits in vLLM's queue during a
    load and then continues from prefixes that older weights computed.

    Example:
        VllmEngine(VllmServer(Connection("http://host:8000")), FileTransfer(torch.float32), slots=64, context=4096,
                   vocabulary=32000, end_tokens=[2], tensors=model.state_dict(), version=None)
    """

    shares_weights = False

    def __init__(
        self,
        service: VllmService,
        transfer: WeightTransfer,
        *,
        slots: int,
        context: int,
        vocabulary: int,
        end_tokens: Iterable[int],
        tensors: Iterable[str],
        version: int | None = 0,
        keep_cache: bool = False,
        first_weights: Mapping[str, Any] | None = None,
        name: str = "vLLM",
        guidance: Guidance | None = None,
        route_layers: Sequence[int] | None = None,
        sleeps: bool = False,
    ) -> None:
        """`tensors` are the names that every load must have; `version` is that of the weights that the service starts
        with, or of `first_weights`, which it is then given; None where nobody knows them, and the first load comes
        before the first call. `name` is said in messages; `keep_cache` reuses prefixes that older weights computed;
        `guidance` reads grammars as vLLM does, and without it calls may have none; `route_layers` are the layers that
        have a router, without which calls may not ask for routes; `sleeps`: whether it shall sleep while the learner
        works."""
        self.sleeps = sleeps
        self.asleep = False
        self.name = name
        self.service = service
        self.transfer = transfer
        self.context = context
        self.vocabulary = vocabulary
        self.version = version
        """Of the weights that vLLM has; None where nobody knows them."""
        self.keep_cache = keep_cache
        self.first_weights = first_weights
        self.first_version = version
        self.guidance = guidance
        self.route_layers = None if route_layers is None else list(route_layers)
        self.end_tokens = sorted(set(end_tokens))
        self.tensors = frozenset(tensors)
        self.slots = CallSlots(slots)
        self.calls: list[PendingCall] = []
        self.num_loads = self.num_forgets = 0
        self.connected = self.started = self.paused = self.closed = False
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
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"vLLM samples at a temperature of 0, or of {MIN_TEMPERATURE} and more; set that")
        if self.closed:
            raise EngineFailure("the engine was closed")
        if sampling.grammar is not None:
            await self.check_grammar(sampling.grammar)
        if sampling.routes is not None and self.route_layers is None:
            raise ValueError(NO_ROUTES)
        if sampling.max_tokens == 0:
            return nothing(StopReason.length)
        submitted_at = time.perf_counter()
        call = PendingCall(session, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        try:
            if not await self.slots.allocate(call.admitted):
                return nothing(StopReason.abort)
            try:
                queued = time.perf_counter() - submitted_at
                completion = await self.ask(call, tokens, sampling, seed)
            finally:
                self.slots.release()
        finally:
            self.calls.remove(call)
        if sampling.grammar is not None and self.guidance is not None:
            completion = await asyncio.to_thread(with_allowed, completion, self.guidance, sampling.grammar)
        return replace(completion, timing=replace(completion.timing, queued=completion.timing.queued + queued))

    async def check_grammar(self, grammar: Grammar) -> None:
        """ValueError where a grammar cannot be followed, or what it allowed could not be told afterwards."""
        if self.guidance is None:
            raise ValueError(NO_GRAMMARS)
        if not set(self.guidance.end_tokens) <= set(self.end_tokens):
            raise ValueError("vLLM ends a grammar with the tokenizer's end token, which does not end an action here")
        await asyncio.to_thread(self.guidance.guide, grammar)
        async with self.changing:
            await self.start()
        if self.service.guidance_problem:
            raise ValueError(self.service.guidance_problem)

    async def ask(self, call: PendingCall, prompt: Tokens, sampling: Sampling, seed: int) -> Completion:
        """vLLM's completion; an empty one where the call was aborted before vLLM got it."""
        params = sampling_params(sampling, self.end_tokens, self.context - len(prompt), seed)
        layers = self.route_layers if sampling.routes is not None else None
        while True:
            while self.asleep and not (call.aborted or self.closed):
                await asyncio.sleep(ABORT_SECONDS)
            async with self.changing:
                await self.start()
                version, salt = self.version, self.salt
            if call.aborted:
                return nothing(StopReason.abort)
            if version is None:
                raise EngineFailure(f"{self.name} has got no weights yet")
            call.name = f"{self.prefix}-{next(self.numbers)}"
            call.versions = {version}
            request = VllmCall(call.name, prompt, params, salt, call.session)
            call.request = asyncio.create_task(self.service.generate(request), name=f"vLLM {call.name}")
            try:
                with self.busy:
                    answer = await call.request
            except asyncio.CancelledError:
                if self.closed and not cancelled_from_outside():
                    raise EngineFailure("the engine was closed") from None
                call.request.cancel()
                await asyncio.gather(call.request, return_exceptions=True)
                raise
            except Exception as error:  # any error of vLLM or the network is a failure of the engine
                raise EngineFailure(f"{self.name} failed: {in_one_line(error)}") from error
            asked = Asked(sampling, len(prompt), params["max_tokens"], self.vocabulary, call.versions, layers)
            completion = completion_of(answer, asked, self.name)
            # A call that was sent before a load and sampled after it may have read prefixes of the older weights.
            if call.aborted or self.keep_cache or not answer.tokens or completion.versions[0] == version:
                return completion

    @property
    def salt(self) -> str:
        return f"{0 if self.keep_cache else self.num_loads}.{self.num_forgets}"

    async def abort(self, session: str) -> None:
        calls = [call for call in self.calls if call.session == session]
        for call in calls:
            call.aborted = True
            self.slots.give_up(call.admitted)
        await asyncio.gather(*(self.end(call) for call in calls))

    async def end(self, call: PendingCall) -> None:
        """Returns when an aborted call is answered."""
        while call in self.calls:
            if call.request is not None and not call.request.done():
                try:
                    await self.service.abort(call.name)
                except Exception as error:
                    raise EngineFailure(f"{self.name} did not abort a call: {in_one_line(error)}") from error
                await asyncio.wait({call.request}, timeout=ABORT_SECONDS)
            else:
                await asyncio.sleep(0)

    # ------------------------------------------------------------ weights

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        if missing := self.tensors - weights.keys():
            raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {min(missing)}")
        prepared = await self.prepare(weights, version)  # calls are made and answered meanwhile
        async with self.changing:
            self.first_weights = None
            await self.connect()
            self.started = True  # what the service starts with is replaced before anybody asks
            await self.send(prepared, version)

    async def prepare(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        """The weights, brought as far as they can be while vLLM has the ones before."""
        try:
            return await self.transfer.prepare(weights, version)
        except Exception as error:
            raise EngineFailure(f"{self.name} could not be given version {version}: {in_one_line(error)}") from error

    async def send(self, weights: Mapping[str, Any], version: int) -> None:
        """Load between two tokens. After a failed load vLLM has unknown weights, and no call is made until one
        succeeds."""
        self.version = None
        try:
            with stage("swap"):
                await (self.service.wake("weights") if self.asleep else self.service.pause())
                await self.transfer.send(weights, version, self.service)
                if self.asleep:  # keys and values get their memory last: a load needs some of its own
                    await self.service.wake("kv_cache")
                    self.asleep = False
                    if self.paused:
                        await self.service.pause()
                self.version = version
                self.num_loads += 1  # a version may be loaded again, with other weights
                for call in self.calls:
                    call.versions.add(version)
                if not self.paused:
                    await self.service.resume()
        except Exception as error:
            self.version = None
            raise EngineFailure(f"{self.name} could not load version {version}: {in_one_line(error)}") from error

    async def open(self) -> None:
        """Start vLLM."""
        async with self.changing:
            await self.start()

    async def start(self) -> None:
        """Start the service, once, while changes are locked out; it then has weights whose version is known."""
        await self.connect()
        if self.first_weights is not None and self.first_version is not None:
            await self.send(self.first_weights, self.first_version)
            self.first_weights = None
        elif not self.started and self.version is not None:
            await self.told(self.service.name_version(str(self.version)))
        self.started = True

    async def connect(self) -> None:
        """Start the service, with whatever weights it has."""
        if self.closed:
            raise EngineFailure("the engine was closed")
        if not self.connected:
            try:
                await self.service.start(self.context)
            except Exception as error:
                raise EngineFailure(f"{self.name} did not start: {in_one_line(error)}") from error
            self.connected = True

    # ------------------------------------------------------------ the rest

    async def forget(self) -> None:
        self.num_forgets += 1

    async def check(self) -> None:
        """Returns when vLLM answers. A load may be under way, which takes long; a vLLM that has not started is
        started, and given no weights."""
        if self.closed:
            raise EngineFailure("the engine was closed")
        if self.connected:
            await self.told(self.service.check_alive())
        else:
            async with self.changing:
                await self.connect()

    async def pause(self) -> None:
        async with self.changing:
            await self.start()
            await self.told(self.service.pause())
            self.paused = True

    async def resume(self) -> None:
        async with self.changing:
            await self.start()
            self.paused = False
            await self.told(self.service.resume())

    async def sleep(self) -> None:
        """Give the memory of weights, keys and values to others until the next load. That brings all weights, so none
        are kept (level 2): level 1 would copy them to the host's memory for nothing."""
        async with self.changing:
            await self.start()
            if self.calls:
                raise EngineFailure(f"{self.name} has {len(self.calls)} calls under way, and cannot sleep")
            if not self.asleep:
                self.version = None
                self.asleep = True  # a call that fails half-way leaves a vLLM that must be woken
                await self.told(self.service.sleep(NOTHING_KEPT))

    async def told(self, answer: Awaitable[None]) -> None:
        try:
            await answer
        except Exception as error:
            raise EngineFailure(f"{self.name} failed: {in_one_line(error)}") from error

    async def close(self) -> None:
        self.closed = True
        for call in self.calls:
            if not call.admitted.done():
                call.admitted.set_exception(EngineFailure("the engine was closed"))
                call.admitted.exception()  # nobody may be waiting for it
            if call.request is not None:
                call.request.cancel()
        async with self.changing:
            if self.connected:
                self.connected = False
                with contextlib.suppress(Exception):
                    await self.transfer.close()
                await self.service.close()
