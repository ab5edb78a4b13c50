"""The check that weights have arrived: engine and learner must say the same of what the engine samples.

An engine has its own layout of the weights, and a load may leave a part of it as it was while everything looks well:
the output changes, and no call fails. So the engine samples a few tokens after random prompts, and the learner scores
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.engines.base import Engine, EngineFailure, Sampling
from turnwise.learn.base import AnyLearner
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
NOTICEABLE = 4.0
"""How many times the limit a disturbed model must differ from itself for the test at the start to say anything."""
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
        check = Check(engine, learner, plan, run, temperature=1.0, vocabulary=512, exact=True)
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
        limit: float = 0.0,
        every: int = 1,
    ) -> None:
        """`run` calls the learner; `exact` says that both compute in float32; a `limit` of 0 takes 1e-5 then, and
        otherwise what the start shows; loads of every so many versions are checked."""
        self.engine = engine
        self.learner = learner
        self.plan = plan
        self.run = run
        self.temperature = temperature
        self.vocabulary = vocabulary
        self.exact = exact
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
        tolerated = self.limit or WRONG
        self.limit = self.limit or max(EXACT, ROOM * gap)
        self.learner.disturb()
        try:
            await self.engine.load(self.learner.publish(), version)
            await self.engine.forget()
            disturbed = await self.sample(version, "disturbed", AT_START)
            gap_disturbed, moved = await self.difference(disturbed), await self.difference(plain)
        finally:
            self.learner.undisturb()
        await self.engine.load(self.learner.publish(), version)
        await self.engine.forget()
        self.before = await self.sample(version, "restored", AT_START)
        gap_restored = await self.difference(self.before)
        await self.engine.forget()
        metrics = {
            "sync/limit": self.limit,
            "sync/start/gap": gap,
            "sync/start/gap_disturbed": gap_disturbed,
            "sync/start/moved": moved,
        }
        if not gap <= tolerated:
            text = f"the engine's logprobs differ from the learner's by {gap:.1e} on average"
            return Found(metrics, f"{text} before anything was trained: it computes another model")
        if not gap_disturbed <= self.limit:
            text = f"{self.differ(gap_disturbed)} after a load that changed every tensor, and by {gap:.1e} before it"
            return Found(metrics, f"{text}: loads leave a part of its weights as they were")
        if not gap_restored <= self.limit:
            return Found(metrics, f"{self.differ(gap_restored)} after a load that changed every tensor back")
        if moved < NOTICEABLE * self.limit:
            text = f"every tensor was changed and the learner's logprobs moved by no more than {moved:.1e}"
            return Found(metrics, f"{text}, so that nobody can tell whether a load arrives; lower sync.limit")
        return Found(metrics)

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
        room = self.engine.context
        size = min(PROMPT, room // 2)
        prompts = random.integers(0, self.vocabulary, (count, size)).astype(np.int32)
        sampling = Sampling(min(ACTION, room - size), self.temperature)
        names = [f"probe/{purpose}/{version}/{number}" for number in range(count)]
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
