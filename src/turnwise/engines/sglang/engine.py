"""SGLang as an engine: tokens in, tokens out, with the logprob and the version of every one.

SGLang names one version for a whole request. So a load ends the requests under way, and their calls go on from what was
sampled so far with a request of their own. Prefixes are computed again after each load, because the salt of a request
has the number of the load.

Rehearsed against a played server, not run with SGLang itself.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.engines.base import (
    NO_ROUTES,
    BusyTime,
    Completion,
    EngineFailure,
    Sampling,
    checked_prompt,
    nothing,
    shown,
)
from turnwise.engines.guidance import NO_GRAMMARS
from turnwise.engines.recent_text import Decode
from turnwise.engines.remote.answers import checked_logprobs, checked_tokens
from turnwise.engines.remote.call_slots import CallSlots
from turnwise.engines.remote.failures import cancelled_from_outside, in_one_line
from turnwise.engines.sglang.action import GrowingAction
from turnwise.engines.sglang.params import is_cut, sampling_params
from turnwise.engines.sglang.service import SglangAnswer, SglangRequest, SglangService
from turnwise.tokens import Tokens
from turnwise.types import StopReason, TurnTiming
from turnwise.weights.published import Published
from turnwise.weights.served_files import ServedFiles
from turnwise.weights.stages import stage
from turnwise.weights.weight_folder import weight_folder

ABORT_SECONDS = 0.05
"""How long an abort waits for its request to end before it is repeated: SGLang ignores one that comes before it."""
NAN = "NaN happened"
"""What SGLang calls a token that it put in place of one that could not be sampled."""


@dataclass(eq=False, slots=True)
class SglangCall:
    """A call to the engine until it is answered."""

    session: str
    admitted: asyncio.Future[bool]
    """True when a slot is free, False when the call was aborted before that."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something may have changed for a call that waits to be sent."""
    request: asyncio.Task[SglangAnswer] | None = None
    name: str = ""
    """Of the request."""
    aborted: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_under_way(self) -> bool:
        return self.request is not None and not self.request.done()


class SglangEngine:
    """`Engine` over an `SglangService`, with at most `slots` calls under way.

    Example:
        SglangEngine(SglangServer(Connection("http://host:30000")), ServedFiles(torch.float32), slots=64, context=4096,
                     vocabulary=32000, end_tokens=[2], tensors=model.state_dict(), decode=tokenizer.decode)
    """

    shares_weights = False

    def __init__(
        self,
        service: SglangService,
        files: ServedFiles,
        *,
        slots: int,
        context: int,
        vocabulary: int,
        end_tokens: Iterable[int],
        tensors: Iterable[str],
        decode: Decode,
        first_weights: Published | None = None,
        keep_cache: bool = False,
        seeds: bool = True,
        name: str = "SGLang",
    ) -> None:
        """`files` is where weights are written that are in no file yet; whoever made it closes it. `tensors` are the
        names that every load must have; `decode` is how stop strings are looked for; `first_weights` are loaded before
        the first call, which fails without; `keep_cache` reuses prefixes that older weights computed; `seeds`: whether
        calls carry theirs; `name` is said in messages."""
        self.service = service
        self.files = files
        self.context = context
        self.vocabulary = vocabulary
        self.end_tokens = frozenset(end_tokens)
        self.tensors = frozenset(tensors)
        self.decode = decode
        self.first_weights = first_weights
        self.keep_cache = keep_cache
        self.seeds = seeds
        self.name = name
        self.version: int | None = None
        """Of the weights that SGLang has; None where nobody knows them."""
        self.slots = CallSlots(slots)
        self.calls: list[SglangCall] = []
        self.num_loads = self.num_forgets = self.num_holds = 0
        self.connected = self.paused = self.loading = self.closed = False
        self.changing = asyncio.Lock()  # held while weights, pauses and the connection change
        self.numbers = itertools.count()
        self.prefix = uuid.uuid4().hex[:12]  # several engines may call one server
        self.busy = BusyTime()

    @property
    def seconds(self) -> float:
        """The time during which SGLang had at least one request: it does not report that of its forward passes."""
        return self.busy.seconds

    # ------------------------------------------------------------ calls

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context, vocabulary=self.vocabulary)
        if self.closed:
            raise EngineFailure("the engine was closed")
        if sampling.grammar is not None:
            raise ValueError(NO_GRAMMARS)
        if sampling.routes is not None:
            raise ValueError(NO_ROUTES)
        if sampling.max_tokens == 0:
            return nothing(StopReason.length)
        submitted_at = time.perf_counter()
        call = SglangCall(session, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        try:
            if not await self.slots.allocate(call.admitted):
                return nothing(StopReason.abort)
            try:
                return await self.ask(call, tokens, sampling, seed, time.perf_counter() - submitted_at)
            finally:
                self.slots.release()
        finally:
            self.calls.remove(call)
            call.answered.set()

    async def ask(self, call: SglangCall, prompt: Tokens, sampling: Sampling, seed: int, queued: float) -> Completion:
        """The completion of a call, by as many requests as it takes."""
        limit = min(sampling.max_tokens, self.context - len(prompt))
        action = GrowingAction(sampling, end_tokens=self.end_tokens, limit=limit, decode=self.decode)
        started, cached = time.perf_counter(), None
        async with self.changing:
            await self.start()
        while action.stop is None:
            await self.wait_until_sent(call)
            if call.aborted:
                break
            if self.version is None:
                raise EngineFailure(f"{self.name} has got no weights yet")
            version, holds = self.version, self.num_holds
            answer = await self.request(call, action, prompt, sampling, seed)
            try:
                self.take(answer, action, sampling, version)
                if action.stop is None:
                    self.check_unfinished(answer, call.aborted or holds != self.num_holds)
            except EngineFailure as error:
                raise EngineFailure(f"{self.name} {error}") from None
            cached = answer.cached if cached is None else cached
        timing = TurnTiming(queued=queued, decode=time.perf_counter() - started)
        return action.completion(action.stop or StopReason.abort, timing, cached or 0)

    async def wait_until_sent(self, call: SglangCall) -> None:
        """Returns when a call may be sent, or need not be any more."""
        while (self.paused or self.loading) and not (call.aborted or self.closed):
            call.woken.clear()
            await call.woken.wait()
        if self.closed:
            raise EngineFailure("the engine was closed")

    async def request(
        self, call: SglangCall, action: GrowingAction, prompt: Tokens, sampling: Sampling, seed: int
    ) -> SglangAnswer:
        """SGLang's answer to what is left of a call. Nothing is waited for before it is under way: a load that begins
        afterwards sees it."""
        call.name = f"{self.prefix}-{next(self.numbers)}"
        given_seed = seed if self.seeds else None
        params = sampling_params(sampling, sorted(self.end_tokens), action.room, given_seed, self.vocabulary)
        sent = SglangRequest(
            call.name, action.following(prompt), params, self.salt, call.session, is_cut=is_cut(sampling)
        )
        call.request = asyncio.create_task(self.service.generate(sent), name=f"SGLang {call.name}")
        try:
            with self.busy:
                return await call.request
        except asyncio.CancelledError:
            if self.closed and not cancelled_from_outside():
                raise EngineFailure("the engine was closed") from None
            call.request.cancel()
            await asyncio.gather(call.request, return_exceptions=True)
            raise
        except Exception as error:  # any error of SGLang or the network is a failure of the engine
            raise EngineFailure(f"{self.name} failed: {in_one_line(error)}") from error

    def take(self, answer: SglangAnswer, action: GrowingAction, sampling: Sampling, version: int) -> None:
        """Add what an answer has to an action; an EngineFailure where it cannot be what was asked for."""
        tokens = checked_tokens(answer.tokens, most=action.room, vocabulary=self.vocabulary)
        logprobs = checked_logprobs(answer.logprobs, len(tokens))
        if answer.weights != self.service.weights_of(version):
            raise EngineFailure(
                f"sampled with weights called {shown(answer.weights)}, and has been given version {version}"
            )
        if answer.matched == NAN and NAN not in sampling.stop:
            raise EngineFailure("could not sample a token: the model's logits are no numbers")
        if sampling.temperature == 0:
            logprobs = np.zeros_like(logprobs)  # a greedy choice is certain; SGLang's logprobs are before that choice
        action.add(tokens.tolist(), logprobs.tolist(), version)

    def check_unfinished(self, answer: SglangAnswer, was_ended: bool) -> None:
        """An EngineFailure where SGLang ended a request for which there was no reason. It may end one at a token that
        only the model's own settings call an end; the call goes on after it."""
        if answer.finish == "abort":
            if not was_ended:
                raise EngineFailure(f"aborted a call: {shown(answer.message)}")
        elif answer.finish == "length":
            raise EngineFailure("ended a call before its limit; start it with more --context-length")
        elif answer.finish != "stop":
            raise EngineFailure(f"ended a call with {shown(answer.finish)}")
        elif not answer.tokens:
            raise EngineFailure("ended a call without a token")

    @property
    def salt(self) -> str:
        return f"{self.prefix}.{0 if self.keep_cache else self.num_loads}.{self.num_forgets}"

    async def abort(self, session: str) -> None:
        calls = [call for call in self.calls if call.session == session]
        for call in calls:
            call.aborted = True
            call.woken.set()
            self.slots.give_up(call.admitted)
        await asyncio.gather(*(self.end(call) for call in calls))

    async def end(self, call: SglangCall) -> None:
        """Returns when an aborted call is answered."""
        while not call.answered.is_set():
            if call.is_under_way:
                await self.told(self.service.abort(call.name))
            with suppress(TimeoutError):
                await asyncio.wait_for(call.answered.wait(), ABORT_SECONDS)

    # ------------------------------------------------------------ weights

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        if missing := self.tensors - weights.keys():
            raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {min(missing)}")
        try:  # calls are made and answered meanwhile
            published = await asyncio.to_thread(self.write, weights, version)
        except Exception as error:
            raise EngineFailure(f"{self.name} could not be given version {version}: {in_one_line(error)}") from error
        async with self.changing:
            self.first_weights = None
            await self.connect()
            await self.send(published, version)

    def write(self, weights: Mapping[str, Any], version: int) -> Published:
        return weights if isinstance(weights, Published) else self.files.publish(weights, version)

    async def send(self, published: Published, version: int) -> None:
        """Load while no request is under way. After a failed load SGLang has unknown weights, and no request is sent
        until one succeeds."""
        self.version, self.loading = None, True
        try:
            with stage("swap"):
                await self.hold()
                with stage("transfer"), weight_folder(published.path) as folder:
                    await self.service.load(folder, version)
        except Exception as error:
            raise EngineFailure(f"{self.name} could not load version {version}: {in_one_line(error)}") from error
        self.version, self.loading = version, False
        self.num_loads += 1  # a version may be loaded again, with other weights
        self.wake()

    async def hold(self) -> None:
        """End the requests under way; their calls wait to be sent again."""
        self.num_holds += 1
        while requests := {call.request for call in self.calls if call.request is not None and call.is_under_way}:
            await self.service.abort_all()
            await asyncio.wait(requests, timeout=ABORT_SECONDS)

    def wake(self) -> None:
        """Let calls that wait look again."""
        for call in self.calls:
            call.woken.set()

    async def open(self) -> None:
        """Connect, and give the server its first weights."""
        async with self.changing:
            await self.start()

    async def start(self) -> None:
        """Connect, once, while changes are locked out; the server then has weights whose version is known, if there
        are any."""
        await self.connect()
        if self.first_weights is not None:
            await self.send(self.first_weights, self.first_weights.version)
            self.first_weights = None

    async def connect(self) -> None:
        """Connect, whatever weights the server has."""
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
        """Returns when SGLang answers. A load may be under way, which takes long."""
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
            self.paused = True
            await self.told(self.hold())

    async def resume(self) -> None:
        async with self.changing:
            await self.start()
            self.paused = False
            self.wake()

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
        self.wake()
        async with self.changing:
            if self.connected:
                self.connected = False
                await self.service.close()
