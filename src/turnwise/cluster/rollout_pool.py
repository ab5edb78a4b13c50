"""The rollout workers of a run: groups are made by other processes, and one that is lost costs time and no group."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from turnwise.cluster.call_gate import CallGate
from turnwise.cluster.worker_host import WorkerHost
from turnwise.cluster.worker_link import RunServices, WorkerLink
from turnwise.engines.base import Engine
from turnwise.envs.raised import Raised
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.environments import Environments
from turnwise.rollout.group import SERIALS, GroupRequest
from turnwise.schedule.stopping import RunStopped
from turnwise.types import Group, Status, Task, Trajectory

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
"""Between two questions to each worker whether it is there."""
STALL_SECONDS = 15.0
"""How much longer than an environment may block its event loop a worker may take to say so."""
STARTS = 3
"""How often in a row a worker may fail to start before its slot is given up."""
LOSSES = 3
"""How often the worker of a group may be lost before its attempts have failed: the task may be what kills them."""
GRACE = 5.0
"""Seconds that a worker has to end by itself, and a cancelled group to close its environments."""
LARGE = 1 << 20
"""Bytes of a group that is read in a thread, where nothing depends on the order."""


@dataclass(eq=False, slots=True)
class GroupJob:
    """A group that is being made, or waits for a worker."""

    kind: str
    request: GroupRequest
    attempts: int
    made: asyncio.Future[Group]
    link: WorkerLink | None = None
    """Who makes it."""


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """One worker, and after its death the next one with the same number."""

    number: int
    link: WorkerLink | None = None
    """None while it starts."""
    num_starts: int = 0
    jobs: dict[int, GroupJob] = field(default_factory=dict)
    """By serial number."""
    life: asyncio.Task[None] | None = None
    given_up: str = ""
    """Why no worker is started any more."""


class RolloutPool:
    """Workers that make groups. A group goes to the worker with the fewest; if that is lost, another makes it anew,
    with the noise of a retry.

    Example:
        async with RolloutPool(start, 2, make, {"training": engine}, environments) as pool:
            group = await pool.attempts("train", 8).group(task, epoch=0)
    """

    def __init__(
        self,
        start: Callable[[int], WorkerHost],
        count: int,
        make: bytes,
        engines: Mapping[str, Engine],
        environments: Environments,
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`start` starts the process of a worker by its number; `make` is a pickled `MakeParts` for each of them."""
        self.start = start
        self.make = make
        self.gate = CallGate(engines.values())
        self.services = RunServices(engines, environments, self.gate)
        self.environments = environments
        self.stall_seconds = stall_seconds
        self.slots = [WorkerSlot(number) for number in range(count)]
        self.waiting: list[GroupJob] = []
        """Jobs that no worker can take yet."""
        self.ticking: asyncio.Task[None] | None = None
        self.closed = False

    def attempts(self, kind: str, count: int) -> PooledAttempts:
        """Makes groups of `count` attempts of a kind."""
        return PooledAttempts(self, kind, count)

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> RolloutPool:
        """All workers are ready; RunStopped where one does not start."""
        try:
            await all_of(self.connect(slot) for slot in self.slots)
        except BaseException:
            await self.close()
            raise
        for slot in self.slots:
            slot.life = asyncio.create_task(self.keep_alive(slot), name=f"rollout worker {slot.number}")
        self.ticking = asyncio.create_task(self.tick(), name="rollout workers")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers; groups that they make are given up, and their environments closed."""
        self.closed = True
        tasks = [task for task in (self.ticking, *(slot.life for slot in self.slots)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.link.end(GRACE) for slot in self.slots if slot.link is not None))

    async def connect(self, slot: WorkerSlot) -> None:
        """Start a worker and give it what waits. RunStopped if it does not start in `STARTS` tries."""
        reason = ""
        for _ in range(STARTS):
            slot.num_starts += 1
            link = WorkerLink(self.start(slot.number), self.services)
            try:
                await link.open(self.make)
            except (EOFError, OSError) as error:
                reason = str(error)
                log.warning("rollout worker %d did not start: %s", slot.number, reason)
                await link.end(0.0)
            except BaseException:
                await link.end(0.0)
                raise
            else:
                slot.link = link
                for job in self.take_waiting():
                    self.assign(job)
                return
        raise RunStopped(f"rollout worker {slot.number} did not start: {reason}; mend that and start again")

    async def keep_alive(self, slot: WorkerSlot) -> None:
        """Hear a worker, and start another when it is gone."""
        while True:
            link = slot.link
            assert link is not None
            self.lose(slot, await self.hear(slot, link))
            await link.end(GRACE)
            try:
                await self.connect(slot)
            except RunStopped as error:
                slot.given_up = str(error)
                self.give_up(error)
                return

    async def tick(self) -> None:
        """Ask workers whether they are there, and kill those that do not say so. The clock stands still while the run
        itself is held up."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for slot in self.slots:
                if slot.link is not None and not slot.link.tick(self.stall_seconds):
                    slot.link.kill(f"it said nothing for {self.stall_seconds:g} s")

    async def hear(self, slot: WorkerSlot, link: WorkerLink) -> str:
        """Serve a worker until it is gone: why."""
        try:
            while True:
                for word, *values in await link.receive():
                    if word == "made":
                        await self.finish(slot, *values)
                    elif word == "ended" and (job := slot.jobs.pop(values[0], None)) is not None:
                        assert job.made.done(), "only a group that nobody waits for is given up"
                    elif word == "broken":
                        raise EOFError(values[0])
        except EOFError as error:
            return str(error)
        except Exception as error:  # whatever a worker sends, it must not leave groups waiting for ever
            return f"it sent what cannot be read: {type(error).__name__}: {error}"

    # ------------------------------------------------------------ groups

    async def group(self, kind: str, attempts: int, task: Task, epoch: int) -> Group:
        """A group, whichever workers it takes."""
        made: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        job = GroupJob(kind, GroupRequest(task, epoch, next(SERIALS)), attempts, made)
        self.assign(job)
        try:
            return await made
        except asyncio.CancelledError:
            await self.cancel(job)
            raise

    def assign(self, job: GroupJob) -> None:
        """Give a job to the worker with the fewest, or keep it until there is one."""
        if all(slot.given_up for slot in self.slots):
            job.made.set_exception(RunStopped(f"no rollout worker is left: {self.slots[0].given_up}"))
            return
        ready = [slot for slot in self.slots if slot.link is not None]
        if not ready:
            self.waiting.append(job)
            return
        slot = min(ready, key=lambda slot: len(slot.jobs))
        slot.jobs[job.request.serial] = job
        job.link = slot.link
        assert slot.link is not None
        slot.link.tell("make", job.kind, job.request)

    async def finish(self, slot: WorkerSlot, serial: int, data: bytes, report: Mapping[str, float]) -> None:
        job = slot.jobs.pop(serial, None)
        if report:
            self.environments.reported.append(report)
        if job is not None and not job.made.done():
            in_thread = len(data) > LARGE and not self.gate.is_ordered
            group = await asyncio.to_thread(pickle.loads, data) if in_thread else pickle.loads(data)
            if not job.made.done():
                job.made.set_result(group)

    async def cancel(self, job: GroupJob) -> None:
        """Give up a job. Returns when its environments are closed, or had time enough for that."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job.link is None or self.closed:
            return
        job.link.tell("cancel", job.request.serial)
        slot = next((slot for slot in self.slots if slot.link is job.link), None)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                while slot is not None and slot.link is job.link and job.request.serial in slot.jobs:
                    await asyncio.sleep(0.01)

    # ------------------------------------------------------------ losses

    def lose(self, slot: WorkerSlot, reason: str) -> None:
        """A worker is gone: its groups begin anew, elsewhere or later."""
        link, slot.link = slot.link, None
        jobs, slot.jobs = [job for job in slot.jobs.values() if not job.made.done()], {}
        log.warning(
            "rollout worker %d is started again: %s; %d groups of it begin anew", slot.number, reason, len(jobs)
        )
        for job in jobs:
            job.link, job.request = None, replace(job.request, losses=job.request.losses + 1)
            if job.request.losses < LOSSES:
                self.assign(job)
            else:
                self.fail(job, reason)
        if link is not None:
            link.forget()

    def fail(self, job: GroupJob, reason: str) -> None:
        """The attempts of a group have failed: its worker was lost every time."""
        first_line = reason.splitlines()[0] if reason else "its worker is gone"
        text = f"the rollout worker that made it was lost {LOSSES} times: {first_line}"
        self.environments.failures.note(f"group {job.request.task.id} failed", Raised("WorkerLost", "", text, ""))
        failed = Trajectory((), Status.failed, failure=text)
        job.made.set_result(Group(job.request.task, (), (failed,) * job.attempts))

    def give_up(self, error: RunStopped) -> None:
        """Go on with the workers that are left; without one, no group can be made."""
        log.warning("%s", error)
        if all(slot.given_up for slot in self.slots):
            for job in self.take_waiting():
                job.made.set_exception(RunStopped(str(error)))

    def take_waiting(self) -> list[GroupJob]:
        jobs, self.waiting = self.waiting, []
        return [job for job in jobs if not job.made.done()]


@dataclass(frozen=True, slots=True)
class PooledAttempts:
    """Makes groups of one kind in rollout workers. A `GroupMaker`."""

    pool: RolloutPool
    kind: str
    attempts: int

    async def group(self, task: Task, epoch: int) -> Group:
        return await self.pool.group(self.kind, self.attempts, task, epoch)
