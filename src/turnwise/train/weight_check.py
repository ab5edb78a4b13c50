"""The check that weights have arrived: engine and learner must say the same of what the engine samples.

An engine has its own layout of the weights, and a load may leave a part of it as it was while everything looks well:
the output changes, and no call fails. So the engine samples a few tokens after random prompts, and the learner scores
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.base import Engine, EngineFailure, Sampling
from turnwise.learn.base import AnyLearner
from turnwise.learn.perturbation import MIRRORS, Change
from turnwise.plan.plan import Plan
from turnwise.types import Message, Turn

log = logging.getLogger(__name__)

PROMPT, ACTION = 24, 8
"""Tokens of a probe."""
AT_START, AT_LOAD = 16, 4
"""How many probes."""
EXACT = 1e-5
"""Mean difference that float32 allows."""
ROOM = 4.0
"""In lower precision: how many times as far apart as at the start engine and learner may be."""
WRONG = 0.1
"""No precision excuses a mean difference of this."""
FAR = 2048
"""Tokens of the longest prompt of the start, where the context has room for it: what differs may differ further on."""
ROOM_FAR = 10.0
"""How many times the limit a difference may be there, in float32."""
NOTICEABLE, STRONG = 4.0, 16.0
"""How many times the limit a disturbed model must differ from itself for the test at the start to say anything, and, in
lower precision, how many times it may: rounding shows the more, the less is left of what a model has learned."""
TRIES = 6
"""How often a disturbance is made weaker."""
PATIENCE = 2.0
"""Seconds that a busy engine gets for the probes of a load; twice as many at the next, where it had none for them."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check has found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    """What engine and learner disagree on, and what to do; empty where they agree."""


NOTHING = Found()


class Check:
    """Compares an engine with the learner whose weights it loads. An engine on the learner's own module has nothing to
    be compared.

    Example:
        check = Check(engine, learner, plan, run, temperature=1.0, vocabulary=512, exact=True, longest=4096)
        at_start = await check.begin(version=0)
        await engine.load(learner.publish(), 1)
        found = await check.arrived(1)
    """

    def __init__(
        self,
        engine: Engine,
        learner: AnyLearner,
        plan: Callable[[Sequence[Turn]], list[Plan]],
        run: Callable[..., Awaitable[Any]],
        *,
        temperature: float,
        vocabulary: int,
        exact: bool,
        longest: int = FAR,
        limit: float = 0.0,
        every: int = 1,
    ) -> None:
        """`run` calls the learner, for turns of up to `longest` tokens; `exact` says that both compute in float32; a
        `limit` of 0 takes 1e-5 then, and otherwise what the start shows; every so many versions a load is checked."""
        self.engine = engine
        self.learner = learner
        self.plan = plan
        self.run = run
        self.temperature = temperature
        self.vocabulary = vocabulary
        self.exact = exact
        self.longest = min(longest, engine.context)
        self.limit = limit or (EXACT if exact else 0.0)
        self.every = every
        self.before: list[Turn] = []
        """The probes of the last check."""
        self.patience = PATIENCE

    async def begin(self, version: int) -> Found:
        """Compare with the weights as they are, disturbed, and as they were again; the engine then has the learner's.

        At a small learning rate one step's change hides below the noise of low precision. A disturbance does not, so
        that a tensor which loads leave behind is seen here.
        """
        if self.engine.shares_weights:
            return NOTHING
        plain = await self.sample(version, "plain", AT_START)
        gap = await self.difference(plain)
        far = await self.far(version)
        gap_far = await self.difference(far) if far else 0.0
        tolerated = self.limit or WRONG
        self.limit = self.limit or max(EXACT, ROOM * gap)
        metrics = {"sync/limit": self.limit, "sync/start/gap": gap, "sync/start/gap_far": gap_far}
        if not gap <= tolerated:
            text = f"the engine's logprobs differ from the learner's by {gap:.1e} on average"
            return Found(metrics, f"{text} before anything was trained: it computes another model")
        if not gap_far <= max(self.limit, ROOM_FAR * EXACT if self.exact else WRONG):
            text = f"the engine's logprobs differ from the learner's by {gap_far:.1e} on average"
            longest = max(len(turn.prompt) for turn in far)
            return Found(metrics, f"{text} after prompts of up to {longest} tokens, and by {gap:.1e} after short ones")
        changes, moved = await self.changes(plain)
        gaps = [await self.gap_of(change, version, f"disturbed {place}") for place, change in enumerate(changes)]
        await self.engine.load(self.learner.publish(), version)
        await self.engine.forget()
        self.before = await self.sample(version, "restored", AT_START)
        gap_restored = await self.difference(self.before)
        await self.engine.forget()
        metrics |= {"sync/start/gap_disturbed": max(gaps), "sync/start/moved": moved}
        if not max(gaps) <= self.limit:
            text = f"{self.differ(max(gaps))} after a load that changed every tensor, and by {gap:.1e} before it"
            return Found(metrics, f"{text}: loads leave a part of its weights as they were")
        if not gap_restored <= self.limit:
            return Found(metrics, f"{self.differ(gap_restored)} after a load that changed every tensor back")
        if not moved >= NOTICEABLE * self.limit:
            text = f"a load that changed every tensor moved logprobs by {moved:.1e}, with sync.limit = {self.limit:.1e}"
            return Found(metrics, f"{text}, so that nobody can tell whether a load arrives; lower sync.limit")
        return Found(metrics)

    async def changes(self, plain: Sequence[Turn]) -> tuple[list[Change], float]:
        """(changes that have every tensor between them, by how much the last of them moves logprobs).

        In lower precision those that the model does not notice come first; where it has them, what is left for the last
        is little, and that is made weaker until it moves logprobs by no more than it has to.
        """
        own = await self.run(self.score, plain)
        mirrors: tuple[str, ...] = ()
        for name in () if self.exact else MIRRORS:
            moved, num_new = await self.moved(Change(name, mirrors), plain, own)
            if num_new and moved <= self.limit / ROOM:
                mirrors += (name,)
        change = Change(spared=mirrors)
        moved, _ = await self.moved(change, plain, own)
        for _ in range(0 if self.exact else TRIES):
            weaker = replace(change, stride=2 * change.stride)
            if moved <= STRONG * self.limit:
                break
            less, _ = await self.moved(weaker, plain, own)
            if less < NOTICEABLE * self.limit:
                break
            change, moved = weaker, less
        return [*(Change(name) for name in mirrors), change], moved

    async def moved(self, change: Change, turns: Sequence[Turn], own: Sequence[Any]) -> tuple[float, int]:
        """(by how much a change moves the learner's logprobs of some turns, how many tensors it is the first to
        change)."""
        num_new = self.learner.disturb(change)
        try:
            now = await self.run(self.score, turns) if num_new else own
        finally:
            self.learner.undisturb()
        return float(np.mean(np.abs(np.concatenate(now) - np.concatenate(own)))), num_new

    async def gap_of(self, change: Change, version: int, purpose: str) -> float:
        """The difference between engine and learner after a load of changed weights."""
        self.learner.disturb(change)
        try:
            await self.engine.load(self.learner.publish(), version)
            await self.engine.forget()
            return await self.difference(await self.sample(version, purpose, AT_START))
        finally:
            self.learner.undisturb()

    async def arrived(self, version: int) -> Found:
        """Compare after a load, and say how far it has moved what was sampled before."""
        if self.engine.shares_weights or version % self.every:
            return NOTHING
        turns = await self.sample(version, "load", AT_LOAD, self.patience)
        tokens = sum(len(turn.action) for turn in turns)
        metrics = {"sync/tokens": float(tokens)}
        if not turns:
            self.patience *= 2
            log.warning("version %d was not checked: the engine had no time for it in %.0f s", version, self.patience)
            return Found(metrics)
        self.patience = PATIENCE
        if strangers := {int(v) for turn in turns for v in turn.versions} - {version}:
            return Found(metrics, f"after the load of version {version} the engine samples with {sorted(strangers)}")
        moved = {"sync/moved": await self.difference(self.before)} if self.before else {}
        gap = await self.difference(turns)
        if not gap <= self.limit:
            # A prompt may have begun like one whose keys and values are of older weights and were kept: that is no
            # fault of the load.
            await self.engine.forget()
            turns = await self.sample(version, "again", AT_LOAD)
            gap = await self.difference(turns)
        self.before = turns
        wrong = "" if gap <= self.limit else f"{self.differ(gap)} after the load of version {version}"
        return Found({**metrics, **moved, "sync/gap": gap}, wrong)

    def differ(self, gap: float) -> str:
        return (
            f"the engine's logprobs differ from the learner's by {gap:.1e} on average, more than sync.limit = "
            f"{self.limit:.1e},"
        )

    async def difference(self, turns: Sequence[Turn]) -> float:
        """Mean difference between what the engine said of sampled tokens and what the learner says now."""
        now = await self.run(self.score, turns)
        pairs = zip(turns, now, strict=True)
        return float(np.mean(np.abs(np.concatenate([turn.logprobs - logprobs for turn, logprobs in pairs]))))

    def score(self, turns: Sequence[Turn]) -> list[Any]:
        return self.learner.score(self.plan(turns), len(turns))

    async def sample(self, version: int, purpose: str, count: int, patience: float | None = None) -> list[Turn]:
        """What the engine samples after prompts of random tokens."""
        random = np.random.default_rng([version, *purpose.encode()])
        size = min(PROMPT, self.engine.context // 2)
        prompts = random.integers(0, self.vocabulary, (count, size)).astype(np.int32)
        return await self.continued(list(prompts), f"probe/{purpose}/{version}", patience)

    async def far(self, version: int) -> list[Turn]:
        """What the engine samples after a quarter, a half, three quarters and all of a long prompt."""
        size = min(FAR, self.longest - ACTION)
        if size < 2 * PROMPT:
            return []
        prompt = np.random.default_rng([version, *b"far"]).integers(0, self.vocabulary, size).astype(np.int32)
        return await self.continued([prompt[: size * part // 4] for part in (1, 2, 3, 4)], f"probe/far/{version}")

    async def continued(
        self, prompts: Sequence[NDArray[np.int32]], name: str, patience: float | None = None
    ) -> list[Turn]:
        """What the engine samples after prompts; less, or nothing, where it has no time for it."""
        names = [f"{name}/{number}" for number in range(len(prompts))]
        room = min(self.engine.context - len(prompt) for prompt in prompts)
        sampling = Sampling(min(ACTION, room), self.temperature)
        calls = [
            asyncio.ensure_future(self.engine.generate(prompt, sampling, session=name, seed=number))
            for number, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        try:
            _, late = await asyncio.wait(calls, timeout=patience)
            if late:
                await asyncio.gather(*(self.engine.abort(n) for n, c in zip(names, calls, strict=True) if c in late))
            done = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            for call in calls:
                call.cancel()
        turns = []
        for prompt, completion in zip(prompts, done, strict=True):
            if isinstance(completion, BaseException):
                if patience is None or not isinstance(completion, EngineFailure):
                    raise completion
            elif len(completion.tokens):
                sampled = completion.tokens, completion.logprobs, completion.versions
                turns.append(Turn(prompt, *sampled, completion.stop, 0.0, Message("assistant", "")))
        return turns
