"""The check that weights have arrived: engine and learner must give sampled tokens the same logprobs.

An engine has its own layout of the weights. A load may leave a part of them unchanged, and nothing shows it: the output
changes, and no call fails. So the engine samples a few tokens after random prompts, and the learner scores them. Of an
engine with several copies of the weights, such as servers, every copy samples and is compared by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.base import Engine, EngineFailure, Sampling, copies_of
from turnwise.learn.base import AnyLearner
from turnwise.learn.perturbation import MIRRORS, Change, kind_of
from turnwise.messages import Message
from turnwise.plan.plan import Plan
from turnwise.training.check_budget import CheckBudget
from turnwise.types import Turn

log = logging.getLogger(__name__)

PROMPT, ACTION = 24, 8
"""Tokens of a probe."""
AT_START, AT_LOAD = 16, 4
"""How many probes."""
EXACT = 1e-5
"""Mean difference that float32 allows."""
ROOM = 4.0
"""In lower precision: how many times the difference at the start a later difference may be."""
WRONG = 0.1
"""No precision excuses a mean difference of this."""
FAR = 2048
"""Tokens of the longest prompt at the start, if the context has room for it: some differences show only far into it."""
ROOM_FAR = 10.0
"""How many times the limit a difference may be after such a prompt, in float32."""
NOTICEABLE, STRONG = 4.0, 16.0
"""How many times the limit a disturbance must move the logprobs for the check at the start to mean anything, and, in
lower precision, how many times it may: rounding errors grow as a disturbance destroys what the model has learned."""
TRIES = 6
"""How often a disturbance is made weaker."""
PROBE_TIMEOUT = 2.0
"""Seconds that a busy engine gets for the probes of a load; doubled for the next load if it finished none."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    """How engine and learner disagree, and what to do; empty where they agree."""


NOT_CHECKED = CheckResult()


@dataclass(frozen=True, slots=True)
class Probes:
    """Turns that were sampled for a check, by the copy of the weights that sampled them."""

    by_copy: Mapping[str, Sequence[Turn]] = field(default_factory=dict)

    @property
    def turns(self) -> list[Turn]:
        return [turn for turns in self.by_copy.values() for turn in turns]


@dataclass(frozen=True, slots=True)
class LargestGap:
    """The largest mean difference of a copy's logprobs from the learner's, and whose it is."""

    size: float
    name: str

    def __str__(self) -> str:
        return f"{self.name}'s logprobs differ from the learner's by {self.size:.1e} on average"


class WeightCheck:
    """Compares an engine with the learner whose weights it loads. An engine that shares the learner's module is not
    checked.

    Example:
        check = WeightCheck(engine, learner, plan, run, temperature=1.0, vocabulary=512, exact=True, longest=4096)
        at_start = await check.begin(version=0)
        await engine.load(learner.publish(), 1)
        result = await check.arrived(1)
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
        every: int = 0,
    ) -> None:
        """`run` calls the learner, for turns of up to `longest` tokens. `exact`: both compute in float32. A `limit` of
        0 is 1e-5 in float32 and otherwise a multiple of the difference at the start. `every` so many versions a load is
        checked; 0 checks as many as the budget allows."""
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
        self.last_probes = Probes()
        """The probes of the last check."""
        self.probe_timeout = PROBE_TIMEOUT
        self.budget = CheckBudget()
        self.compared: tuple[int, int] | None = None
        """(version, how often engines had started) of the last load after which all was well; None before the first."""
        self.first_unknown = 0
        """The first version that was loaded since."""

    async def begin(self, version: int) -> CheckResult:
        """Compare before the first step: with the present weights, after loads of disturbed weights, and after a load
        of the present weights again, which the engine then has.

        At a small learning rate the change of one step hides below the noise of low precision. A disturbance does not,
        so that a tensor which loads leave unchanged is found here.
        """
        if self.engine.shares_weights:
            return NOT_CHECKED
        found = await self.compare_at_start(version)
        self.first_unknown, self.budget = version + 1, CheckBudget()
        return found

    async def compare_at_start(self, version: int) -> CheckResult:
        probes = await self.sample(version, "plain", AT_START)
        gap = await self.difference(probes)
        far_probes = await self.sample_far(version)
        gap_far = await self.difference(far_probes) if far_probes.turns else LargestGap(0.0, "nobody")
        max_gap = self.limit or WRONG
        self.limit = self.limit or max(EXACT, ROOM * gap.size)
        metrics = {
            "weight_check/limit": self.limit,
            "weight_check/start/gap": gap.size,
            "weight_check/start/gap_far": gap_far.size,
        }
        if not gap.size <= max_gap:
            return CheckResult(metrics, f"{gap} before anything was trained: it computes another model")
        if not gap_far.size <= max(self.limit, ROOM_FAR * EXACT if self.exact else WRONG):
            longest = max(len(turn.prompt) for turn in far_probes.turns)
            text = f"{gap_far} after prompts of up to {longest} tokens, and by {gap.size:.1e} after short ones"
            return CheckResult(metrics, text)
        gap_disturbed, gap_restored, moved = await self.load_disturbed(version, probes)
        metrics |= {"weight_check/start/gap_disturbed": gap_disturbed.size, "weight_check/start/moved": moved}
        if not gap_disturbed.size <= self.limit:
            before = f"and by {gap.size:.1e} before it"
            text = f"{self.differ(gap_disturbed)} after a load that changed every tensor, {before}"
            return CheckResult(metrics, f"{text}: loads leave a part of its weights as they were")
        if not gap_restored.size <= self.limit:
            return CheckResult(metrics, f"{self.differ(gap_restored)} after a load that changed every tensor back")
        if not moved >= NOTICEABLE * self.limit:
            limit = f"weight_check.limit = {self.limit:.1e}"
            text = f"a load that changed every tensor moved logprobs by {moved:.1e}, with {limit}"
            return CheckResult(
                metrics, f"{text}, so that nobody can tell whether a load arrives; lower weight_check.limit"
            )
        return CheckResult(metrics)

    async def load_disturbed(self, version: int, probes: Probes) -> tuple[LargestGap, LargestGap, float]:
        """(largest difference after loads of disturbed weights, difference after a load of the present ones, by how
        much the last disturbance moves the learner's logprobs)."""
        changes, moved = await self.changes(next(iter(probes.by_copy.values())))
        gaps = [await self.gap_of(change, version, f"disturbed {index}") for index, change in enumerate(changes)]
        await self.engine.load(self.learner.publish(), version)
        await self.engine.forget()
        self.last_probes = await self.sample(version, "restored", AT_START)
        gap_restored = await self.difference(self.last_probes)
        await self.engine.forget()
        return max(gaps, key=size_of), gap_restored, moved

    async def changes(self, probes: Sequence[Turn]) -> tuple[list[Change], float]:
        """(changes that cover every tensor between them, by how much the last of them moves logprobs).

        In lower precision, mirrors that do not move the logprobs come first. What is left, the experts of a mixture for
        instance, is changed by kind, as far as that shows: all kinds together would have to change so little each that
        one of them could stay behind unseen. The last change covers all that is left. Each of these is made weaker
        until it moves logprobs by no more than it has to.
        """
        logprobs = await self.run(self.score, probes)
        if self.exact:
            return [Change()], (await self.moved(Change(), probes, logprobs))[0]
        mirrors: tuple[str, ...] = ()
        for name in MIRRORS:
            moved, num_new = await self.moved(Change(name, mirrors), probes, logprobs)
            if num_new and moved <= self.limit / ROOM:
                mirrors += (name,)
        each = [Change(spared=mirrors, kind=kind) for kind in dict.fromkeys(map(kind_of, self.learner.publish()))]
        left = [change for change in each if self.num_new(change)]
        found = [await self.weakened(change, probes, logprobs) for change in (left if len(left) > 1 else ())]
        by_kind = [change for change, moved in found if moved >= NOTICEABLE * self.limit]
        last, moved = await self.weakened(Change(spared=mirrors), probes, logprobs)
        return [*(Change(name) for name in mirrors), *by_kind, last], moved

    def num_new(self, change: Change) -> int:
        """How many tensors a change is the first to change."""
        try:
            return self.learner.disturb(change)
        finally:
            self.learner.undisturb()

    async def weakened(self, change: Change, probes: Sequence[Turn], logprobs: Sequence[Any]) -> tuple[Change, float]:
        """(the change, with as few flips as are noticed, by how much it moves logprobs)."""
        moved, _ = await self.moved(change, probes, logprobs)
        for _ in range(TRIES):
            weaker = replace(change, stride=2 * change.stride)
            if moved <= STRONG * self.limit:
                break
            moved_weaker, _ = await self.moved(weaker, probes, logprobs)
            if moved_weaker < NOTICEABLE * self.limit:
                break
            change, moved = weaker, moved_weaker
        return change, moved

    async def moved(self, change: Change, turns: Sequence[Turn], logprobs: Sequence[Any]) -> tuple[float, int]:
        """(by how much a change moves the learner's logprobs of some turns, how many tensors it is the first to
        change)."""
        num_new = self.learner.disturb(change)
        try:
            disturbed = await self.run(self.score, turns) if num_new else logprobs
        finally:
            self.learner.undisturb()
        return float(np.mean(np.abs(np.concatenate(disturbed) - np.concatenate(logprobs)))), num_new

    async def gap_of(self, change: Change, version: int, purpose: str) -> LargestGap:
        """The difference between engine and learner after a load of disturbed weights."""
        self.learner.disturb(change)
        try:
            await self.engine.load(self.learner.publish(), version)
            await self.engine.forget()
            return await self.difference(await self.sample(version, purpose, AT_START))
        finally:
            self.learner.undisturb()

    async def arrived(self, version: int) -> CheckResult:
        """Compare after a load, if it is due, and measure how far loads have moved the logprobs of the last probes."""
        if self.engine.shares_weights or not self.is_due(version):
            return NOT_CHECKED
        with self.budget.spending():
            return await self.compare(version)

    def is_due(self, version: int) -> bool:
        """Whether a load is checked: always the first, and the first after an engine was started again."""
        if self.compared is None or self.compared[1] != self.num_starts:
            return True
        return not version % self.every if self.every else self.budget.is_due

    @property
    def num_starts(self) -> int:
        """How often engines have started, where the engine is one that starts others."""
        return int(getattr(self.engine, "num_starts", 1))

    async def compare(self, version: int) -> CheckResult:
        num_starts = self.num_starts
        probes = await self.sample(version, "load", AT_LOAD, self.probe_timeout)
        num_tokens = sum(len(turn.action) for turn in probes.turns)
        metrics = {"weight_check/tokens": float(num_tokens)}
        if not probes.turns:
            self.probe_timeout *= 2
            log.warning(
                "version %d was not checked: the engine had no time for it in %.0f s", version, self.probe_timeout
            )
            return CheckResult(metrics)
        self.probe_timeout = PROBE_TIMEOUT
        for name, turns in probes.by_copy.items():
            if others := {int(v) for turn in turns for v in turn.versions} - {version}:
                return CheckResult(metrics, f"after {self.loads(version)} {name} samples with {sorted(others)}")
        moved = {}
        if self.last_probes.turns:
            moved = {"weight_check/moved": (await self.difference(self.last_probes)).size}
        gap = await self.difference(probes)
        if not gap.size <= self.limit:
            # A prompt may share its beginning with one whose keys and values were computed by older weights and kept:
            # that is no fault of the load.
            await self.engine.forget()
            probes = await self.sample(version, "again", AT_LOAD)
            gap = await self.difference(probes)
        self.last_probes = probes
        metrics |= {**moved, "weight_check/gap": gap.size}
        if not gap.size <= self.limit:
            return CheckResult(metrics, f"{self.differ(gap)} after {self.loads(version)}")
        self.compared, self.first_unknown = (version, num_starts), version + 1
        return CheckResult(metrics)

    def loads(self, version: int) -> str:
        """The loads of which one or more may have failed."""
        first = self.first_unknown
        if first >= version:
            return f"the load of version {version}"
        return (
            f"the load of version {version}, the first that was checked since version {first - 1}: versions {first} to "
            f"{version} may have sampled with other weights"
        )

    def differ(self, gap: LargestGap) -> str:
        return f"{gap}, more than weight_check.limit = {self.limit:.1e},"

    async def difference(self, probes: Probes) -> LargestGap:
        """Mean absolute difference between a copy's logprobs of the tokens it sampled and the learner's present ones,
        of the copy with the largest."""
        scores = iter(await self.run(self.score, probes.turns))
        gaps = []
        for name, turns in probes.by_copy.items():
            apart = [turn.logprobs - next(scores) for turn in turns]
            if apart:
                gaps.append(LargestGap(float(np.mean(np.abs(np.concatenate(apart)))), name))
        return max(gaps, key=size_of)

    def score(self, turns: Sequence[Turn]) -> list[Any]:
        return self.learner.score(self.plan(turns), len(turns))

    async def sample(self, version: int, purpose: str, count: int, timeout: float | None = None) -> Probes:
        """Turns that every copy samples after prompts of random tokens."""
        random = np.random.default_rng([version, *purpose.encode()])
        size = min(PROMPT, self.engine.context // 2)
        prompts = random.integers(0, self.vocabulary, (count, size)).astype(np.int32)
        return await self.ask_copies(list(prompts), f"probe/{purpose}/{version}", timeout)

    async def sample_far(self, version: int) -> Probes:
        """Turns that every copy samples after a quarter, a half, three quarters and all of a long prompt."""
        size = min(FAR, self.longest - ACTION)
        if size < 2 * PROMPT:
            return Probes()
        prompt = np.random.default_rng([version, *b"far"]).integers(0, self.vocabulary, size).astype(np.int32)
        return await self.ask_copies([prompt[: size * part // 4] for part in (1, 2, 3, 4)], f"probe/far/{version}")

    async def ask_copies(self, prompts: Sequence[NDArray[np.int32]], name: str, timeout: float | None = None) -> Probes:
        """Turns that every copy samples after prompts; fewer and shorter ones, or none, where the time runs out."""
        copies = copies_of(self.engine)
        found = await asyncio.gather(*(self.generate_all(each, prompts, name, timeout) for each in copies.values()))
        return Probes(dict(zip(copies, found, strict=True)))

    async def generate_all(
        self, engine: Engine, prompts: Sequence[NDArray[np.int32]], name: str, timeout: float | None
    ) -> list[Turn]:
        """The turns of one copy."""
        sessions = [f"{name}/{number}" for number in range(len(prompts))]
        room = min(engine.context - len(prompt) for prompt in prompts)
        sampling = Sampling(min(ACTION, room), self.temperature)
        calls = [
            asyncio.ensure_future(engine.generate(prompt, sampling, session=session, seed=number))
            for number, (session, prompt) in enumerate(zip(sessions, prompts, strict=True))
        ]
        try:
            _, late = await asyncio.wait(calls, timeout=timeout)
            if late:
                late_sessions = [session for session, call in zip(sessions, calls, strict=True) if call in late]
                await asyncio.gather(*(engine.abort(session) for session in late_sessions))
            completions = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            for call in calls:
                call.cancel()
        turns = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if isinstance(completion, BaseException):
                if timeout is None or not isinstance(completion, EngineFailure):
                    raise completion
            elif len(completion.tokens):
                sampled = completion.tokens, completion.logprobs, completion.versions
                turns.append(Turn(prompt, *sampled, completion.stop, 0.0, Message("assistant", "")))
        return turns


def size_of(gap: LargestGap) -> float:
    """Of a gap that is no number: infinite."""
    return gap.size if gap.size == gap.size else float("inf")
