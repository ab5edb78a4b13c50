"""The simulation: the real training loop, stream and slots under the virtual clock, with parts that only wait."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.messages import Message
from turnwise.rollout.concurrently import all_of
from turnwise.runs.archive import Record
from turnwise.schedule.resting import Heard
from turnwise.schedule.tasks import Draw
from turnwise.simulate.engine import Call, Replica, SimulatedEngine
from turnwise.simulate.outcome import SimulatedRun
from turnwise.simulate.pace import EnginePace, LearnerPace
from turnwise.simulate.workload import SimulatedAttempt, Workload
from turnwise.testing import clock
from turnwise.training.loop import LoopParts, Progress, Settings, Stages, train, train_step
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn

UNLIMITED = 1e18
SAID = Message("assistant", "")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: engines, a learner, the process that runs the agent loop, and attempts."""

    engine: EnginePace
    learner: LearnerPace
    workload: Workload
    replicas: int = 1
    max_sequences: int = 1024
    """Calls that a replica decodes together."""
    room: float = UNLIMITED
    """Tokens whose keys and values a replica can hold."""
    turn_seconds: float = 0.0
    """That the agent loop computes for a turn."""
    drivers: int = 1
    """Processes that run agent loops."""


class SimulatedTasks:
    """Tasks without end, each with a name of its own."""

    def __init__(self) -> None:
        self.number = 0

    def draw(self) -> Draw:
        self.number += 1
        return Draw(self.number - 1, Task(f"{self.number - 1}", "simulated"), 0)

    def skip(self, count: int, heard: Sequence[Heard] = ()) -> None:
        self.number += count

    def hear(self, groups: Sequence[Group]) -> Sequence[Heard]:
        return ()

    def metrics(self, num_draws: int) -> dict[str, float]:
        return {}


class NoLearner:
    """In the place of a learner; its calls only take time (`Simulation.run`)."""

    num_skipped_in_a_row = 0

    def publish(self) -> dict[str, Any]:
        return {}


@dataclass(slots=True)
class Moment:
    """Sums over the time so far."""

    time: float
    engines: float
    learner: float
    driver: float
    sampling: float
    environment: float
    attempts: float
    decoded: float
    tokens: float


@dataclass(slots=True)
class Simulation:
    """One run of a setup."""

    setup: Setup
    settings: Settings
    random: Random
    engine: SimulatedEngine = field(init=False)
    driver: asyncio.Semaphore = field(init=False)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sizes: dict[str, int] = field(default_factory=dict)
    """By task: unique tokens of its group."""
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By task: [version, tokens] of all actions of its group."""
    moments: list[Moment] = field(default_factory=list)
    lags: dict[int, dict[int, float]] = field(default_factory=dict)
    """By step: tokens of each lag."""
    groups: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    """[2] kept and dropped."""
    fair_turns: float = 1.0

    async def to_end(self) -> None:
        setup = self.setup
        self.engine = SimulatedEngine(setup.engine, setup.replicas, setup.max_sequences, setup.room, setup.learner.load)
        self.driver = asyncio.Semaphore(setup.drivers)
        self.engine.open()
        try:
            await train(self.parts(), Progress(), self.after, asyncio.Event())
        finally:
            await self.engine.close()

    def parts(self) -> LoopParts:
        nothing: Callable[..., Any] = lambda *given: None
        stages = Stages(
            make_group=self.make_group,
            keep=lambda group: True,
            plan=nothing,
            estimate=nothing,
            correct=nothing,
            targets=None,
            weigh=nothing,
            anchor=nothing,
            objective=nothing,  # type: ignore[arg-type]
            run=self.run,
        )
        learner: Any = NoLearner()
        engine: Any = self.engine
        return LoopParts(settings=self.settings, stages=stages, learner=learner, engine=engine, tasks=SimulatedTasks())

    # ------------------------------------------------------------ the learner

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """In the place of a worker: the calls of the learner take their time and compute nothing."""
        if function is not train_step:
            await self.learn(self.setup.learner.publish)
            return {}
        _, _, _, taken, step = arguments
        tokens = sum(self.sizes[group.task.id] for group in taken.kept)
        self.lags[step] = defaultdict(float)
        for group in taken.kept:
            for version, count in self.spans.pop(group.task.id):
                self.lags[step][step - version] += count
        await self.learn(self.setup.learner.seconds(tokens))
        self.spent["tokens"] += tokens
        self.groups += np.array([len(taken.kept), len(taken.dropped)])
        return {"lag/max": float(max(self.lags[step], default=0))}, []

    async def learn(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.spent["learner"] += seconds

    async def after(
        self, progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Mapping[int, Group]
    ) -> None:
        self.fair_turns = metrics["fair/turns"]
        self.moments.append(self.moment())

    def moment(self) -> Moment:
        replicas = self.engine.replicas
        return Moment(
            time=asyncio.get_running_loop().time(),
            engines=sum(replica.busy for replica in replicas) / len(replicas),
            learner=self.spent["learner"],
            driver=self.spent["driver"] / self.setup.drivers,
            sampling=self.spent["sampling"],
            environment=self.spent["environment"],
            attempts=self.spent["attempts"],
            decoded=sum(replica.decoded for replica in replicas),
            tokens=self.spent["tokens"],
        )

    # ------------------------------------------------------------ attempts

    async def make_group(self, draw: Draw) -> Group:
        name = draw.task.id
        drawn = self.setup.workload(self.random)
        self.spans[name] = []
        self.sizes[name] = drawn[0][0].prompt + sum(
            sum(turn.prompt + turn.action for turn in attempt) - attempt[0].prompt for attempt in drawn
        )
        attempts = [self.attempt(f"{name}.{number}", name, attempt) for number, attempt in enumerate(drawn)]
        return Group(draw.task, tuple(await all_of(attempts)), ())

    async def attempt(self, session: str, group: str, turns: SimulatedAttempt) -> Trajectory:
        loop = asyncio.get_running_loop()
        began = loop.time()
        replica = self.engine.route()
        made: list[Turn] = []
        length = 0
        for turn in turns:
            length += turn.prompt
            await self.in_driver()
            call = Call(session, f"{group} first", length, not made, turn.action, loop.create_future())
            made.append(await self.sampled(replica, call))
            self.spans[group] += call.spans
            length += turn.action
            await asyncio.sleep(turn.environment)
            self.spent["environment"] += turn.environment
        replica.forget(session)
        replica.sessions -= 1
        self.spent["attempts"] += loop.time() - began
        return Trajectory(tuple(made), Status.finished)

    async def in_driver(self) -> None:
        """What the agent loop computes for a turn."""
        if self.setup.turn_seconds:
            async with self.driver:
                await asyncio.sleep(self.setup.turn_seconds)
            self.spent["driver"] += self.setup.turn_seconds

    async def sampled(self, replica: Replica, call: Call) -> Turn:
        """A turn with one token for each version that sampled it: lag and fairness need no more."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        replica.submit(call)
        await call.done
        self.spent["sampling"] += loop.time() - began
        versions = np.array([version for version, _ in call.spans], np.int32)
        size = len(versions)
        tokens, logprobs = np.zeros(size, np.int32), np.zeros(size, np.float32)
        return Turn(np.zeros(1, np.int32), tokens, logprobs, versions, StopReason.end_token, 0.0, SAID)

    # ------------------------------------------------------------ what came of it

    def outcome(self, skip: int) -> SimulatedRun:
        """Of the steps after the first `skip`."""
        first, last = self.moments[skip - 1], self.moments[-1]
        seconds, steps = last.time - first.time, len(self.moments) - skip
        attempts = max(last.attempts - first.attempts, 1e-9)
        busy = last.engines - first.engines
        counts: dict[int, float] = defaultdict(float)
        for step, of_step in self.lags.items():
            for lag, count in of_step.items():
                counts[lag] += count * (step >= skip)
        total = sum(counts.values())
        return SimulatedRun(
            seconds_per_step=seconds / steps,
            engines_busy=busy / seconds,
            learner_busy=(last.learner - first.learner) / seconds,
            driver_busy=(last.driver - first.driver) / seconds,
            sampling=(last.sampling - first.sampling) / attempts,
            in_environment=(last.environment - first.environment) / attempts,
            engine_tokens=(last.decoded - first.decoded) / self.setup.replicas / max(busy, 1e-9),
            tokens_per_step=(last.tokens - first.tokens) / steps,
            lags={lag: counts[lag] / total for lag in sorted(counts) if counts[lag]},
            dropped=float(self.groups[1] / self.groups.sum()),
            fair_turns=self.fair_turns,
        )


def simulate(setup: Setup, settings: Settings, *, seed: int = 0, skip: int | None = None) -> SimulatedRun:
    """The outcome of a setup under the settings of a loop; the first steps, in which the pipeline fills, are left
    out."""
    skip = settings.max_lag + 1 if skip is None else skip
    if settings.steps <= skip:
        raise ValueError(f"{settings.steps} steps leave none after the first {skip}, in which the pipeline fills")
    simulation = Simulation(setup, replace(settings, patience=1e9), Random(seed))
    clock.run(simulation.to_end())
    return simulation.outcome(skip)
