"""The log of one attempt while it runs: its turns, its pay and how it ended."""

from __future__ import annotations

from dataclasses import replace

from turnwise.envs.base import Reply
from turnwise.envs.raised import Raised
from turnwise.messages import Message, ToolSpec
from turnwise.rollout.deadline import is_deadline
from turnwise.rollout.failures import Failures
from turnwise.runs.describe import PROMPT_TOKENS
from turnwise.types import Status, Trajectory, Turn

FIRST_PROMPT_TOO_LONG = (
    "the first prompt does not fit: %sraise rollout.max_prompt_tokens or rollout.max_trajectory_tokens"
)


class AttemptLog:
    """Collects what an attempt produces, and becomes its trajectory at the end.

    It starts as failed: an attempt that ends without a status has failed.

    Example:
        log = AttemptLog("train/hops/t-1/0/0/0", Failures())
        log.turns.append(turn)
        log.pay(reply)
        log.status = Status.finished
        log.trajectory()
    """

    def __init__(self, session: str, failures: Failures) -> None:
        self.session = session
        self.failures = failures
        self.turns: list[Turn] = []
        self.status = Status.failed
        self.failure = ""
        self.outcome = 0.0
        self.marks: dict[str, float] = {}
        self.refused = 0
        """Tokens of a prompt that did not fit."""
        self.opening: tuple[Message, ...] = ()
        self.tools: tuple[ToolSpec, ...] = ()
        """What the first prompt shows."""

    def pay(self, reply: Reply) -> None:
        """Add what a reply pays for the whole attempt, and count the errors the environment survived."""
        self.outcome += reply.outcome
        self.marks.update(reply.marks)
        for raised in reply.raised:
            self.failures.note(f"{self.session} went on after an error", raised)

    def refuse(self, prompt_tokens: int) -> None:
        """Remember the length of a prompt that does not fit; the attempt ends."""
        self.refused = prompt_tokens

    def fail(self, status: Status, how: str, error: BaseException, advice: str = "") -> None:
        """Mark the attempt as one that does not count. Only the first failure becomes the reason."""
        raised = Raised.of(error)
        if is_deadline(error):  # the line it waited in says it all
            raised = replace(raised, traceback="")
        self.failures.note(f"{self.session} {how}", raised, advice)
        if self.status.counts or (self.status is Status.failed and not self.failure):
            self.status, self.failure = status, raised.line

    def trajectory(self) -> Trajectory:
        """The attempt as it ended. It has failed if its pay does not add up to a finite number."""
        turns, failure, marks = tuple(self.turns), self.failure, self.marks
        if self.status is Status.prompt_too_long:
            length = f"it has {self.refused} tokens; " if self.refused else ""
            failure = FIRST_PROMPT_TOO_LONG % length
            marks = {**marks, PROMPT_TOKENS: float(self.refused)} if self.refused else marks
        try:
            return Trajectory(turns, self.status, self.outcome, marks, failure, opening=self.opening, tools=self.tools)
        except ValueError as error:
            self.fail(Status.failed, "failed", error)
            return Trajectory((), Status.failed, failure=self.failure)
