"""A recorded attempt played again: an environment hears the recorded messages in their order, and pays for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from turnwise.messages import Message
from turnwise.rollout.agent import open_environment, shortened
from turnwise.rollout.calls import ask
from turnwise.rollout.faults import reply_to
from turnwise.rollout.scene import RunningAttempt, Scene
from turnwise.types import Status, Trajectory

Opening = Callable[[Trajectory, tuple[Message, ...]], bool]
"""Whether an attempt may have begun with these messages."""


class StillFailed(RuntimeError):
    """The recorded attempt failed, and the environment, which does not fail any more, has not finished it either."""


@dataclass(slots=True)
class ReplayedAttempt:
    """Makes the turns of a recorded attempt, a `Play`: no model is asked; tokens and logprobs are the recorded ones.

    An environment that finishes earlier than recorded gets no further messages. One that does not finish where the
    recorded attempt did has cut it short.

    Example:
        replayed = ReplayedAttempt(trajectory)
        await run_attempt(which, make, scene, replayed)
        replayed.difference == "turn 2 was answered otherwise"
    """

    recorded: Trajectory
    is_opening: Opening = lambda recorded, messages: True
    difference: str = field(default="", init=False)
    """Where the environment first answered otherwise than recorded, so that the policy might have said something else;
    empty where it did not."""

    async def __call__(self, scene: Scene, running: RunningAttempt) -> Status:
        self.difference = ""  # of an earlier try
        reply = await open_environment(running)
        if not self.is_opening(self.recorded, reply.history or reply.messages):
            self.differs("the attempt opened otherwise")
        running.log.opening, running.log.tools = self.recorded.opening, self.recorded.tools
        step, last = partial(ask, running.deadline, running.environment.step), len(self.recorded.turns)
        for number, turn in enumerate(self.recorded.turns, 1):
            try:
                reply = await reply_to(turn.said, reply, step)
            except BaseException:  # a penalty for breaking the environment must reach the action that did
                running.log.turns.append(replace(turn, reward=0.0, heard=()))
                raise
            running.log.pay(reply)
            heard = shortened(reply, scene.limits).messages
            running.log.turns.append(replace(turn, reward=reply.reward, heard=heard))
            was_finished = number == last and self.recorded.status is Status.finished
            if reply.finished:
                if not was_finished:
                    self.differs(f"turn {number} of {last} finished it")
                return Status.finished
            if was_finished:
                self.differs(f"turn {number} did not finish it")
            elif number < last and heard != turn.heard:  # nothing was said after the last
                self.differs(f"turn {number} was answered otherwise")
        return self.unfinished()

    def differs(self, how: str) -> None:
        self.difference = self.difference or how

    def unfinished(self) -> Status:
        """How an attempt ended that the environment has not finished."""
        status = self.recorded.status
        if status is Status.penalised or not status.counts:
            raise StillFailed(self.recorded.failure or str(status))
        return Status.too_many_turns if status is Status.finished else status
