"""One attempt from its start to its end: made within its deadlines, with every failure turned into a status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turnwise.envs.base import Environment
from turnwise.rollout.agent import play
from turnwise.rollout.attempt_log import AttemptLog
from turnwise.rollout.blame import blamed_task, border
from turnwise.rollout.calls import call, checked, is_from_outside
from turnwise.rollout.deadline import Blocked, Deadline
from turnwise.rollout.leaving import leave_behind
from turnwise.rollout.limits import Limits
from turnwise.rollout.open_limit import EnvironmentMaker, with_open_limit
from turnwise.rollout.scene import Attempt, Play, RunningAttempt, Scene
from turnwise.types import Status, Trajectory

TOO_SOON = "raise rollout.limits.call_seconds or rollout.limits.attempt_seconds if that is too soon"


async def run_attempt(
    which: Attempt, make: Callable[[], Environment], scene: Scene, make_turns: Play = play
) -> Trajectory:
    """One attempt at a task, in the environment that `make` returns. The agent loop makes the turns, unless
    `make_turns` is another Play. Nothing of the attempt starts before fewer environments than allowed are open."""
    maker = with_open_limit(make)
    async with maker.open_limit.permit():
        return await run_now(which, maker, scene, make_turns)


async def run_now(which: Attempt, make: EnvironmentMaker, scene: Scene, make_turns: Play) -> Trajectory:
    """The attempt once it may start. Never raises for what an environment or an engine does: that becomes a status.

    If the environment ignores even its cancellation, the attempt has timed out. It is left behind in a task that nobody
    waits for."""
    log, deadline = AttemptLog(which.session, make.failures), Deadline(scene.limits)
    work = run_within_deadline(which, make, scene, make_turns, deadline, log)
    task = asyncio.create_task(work, name=which.session)
    try:
        await asyncio.wait((task, deadline.overdue), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        deadline.hurry()
        await asyncio.wait((task, deadline.overdue), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            leave_behind(task)
        raise
    finally:
        task.cancel()
        deadline.cancel_timer()
    if not task.done():
        leave_behind(task)
        log.status, log.failure = Status.timed_out, f"not cancelled at {blamed_task(task)}: it is left behind"
    elif not task.cancelled():
        task.result()
    return log.trajectory()


async def run_within_deadline(
    which: Attempt, make: EnvironmentMaker, scene: Scene, make_turns: Play, deadline: Deadline, log: AttemptLog
) -> None:
    """Make the environment, make the turns and close the environment. The log says how that went."""
    environment: Environment | None = None
    try:
        async with deadline:
            environment = make_environment(make)
            log.status = await make_turns(scene, RunningAttempt(which, environment, deadline, log))
    except TimeoutError as error:
        log.fail(Status.timed_out, "timed out", error, TOO_SOON)
    except Blocked as error:
        log.fail(Status.timed_out, "timed out", error)
    except BaseException as error:  # the one place where a failure becomes a failed trajectory
        if is_from_outside(error):
            raise
        log.fail(Status.failed, "failed", error)
    finally:
        if environment is not None:
            deadline.start_closing()
            await close(environment, scene.limits, log)


@border
def make_environment(make: Callable[[], Environment]) -> Environment:
    return make()


async def close(environment: Environment, limits: Limits, log: AttemptLog) -> None:
    """Close the environment whatever happened; its last reply may still pay."""
    try:
        async with asyncio.timeout(limits.call_seconds):
            answer = await call(environment.close)
        if answer is not None:
            reply = checked(answer, environment.close)
            log.pay(reply)
            log.outcome += reply.reward
    except BaseException as error:
        if is_from_outside(error):
            raise
        log.fail(Status.failed, "failed to close its environment", error)
