"""What a rollout worker has of the run: its engines, its permits for open environments, its log. Each is asked for over
the worker's line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from turnwise.cluster.worker_line import Message, WorkerLine, fields_of
from turnwise.engines.base import Completion, EngineFailure, Sampling, checked_prompt
from turnwise.engines.places import PLACE
from turnwise.envs.raised import Raised
from turnwise.rollout.failures import Failures
from turnwise.rollout.open_limit import OpenLimit, OpenPermit
from turnwise.tokens import Tokens

ERRORS: dict[str, type[Exception]] = {"refused": ValueError, "failed": EngineFailure}
"""How a call may end without a completion."""


class WorkerDesk:
    """The worker's end of all questions to the run. Answers come in over the line, by the number of the question.

    Example:
        desk = WorkerDesk()
        engine = desk.engine("training", context=4096)
        desk.line = WorkerLine(wire)
    """

    line: WorkerLine
    loop: asyncio.AbstractEventLoop
    """Both are set when the worker's event loop runs."""

    def __init__(self) -> None:
        self.numbers = count()
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.failures = ReportedFailures(self)

    def engine(self, name: str, context: int) -> RunEngine:
        return RunEngine(self, name, context)

    def open_limit(self, label: str) -> OpenLimit:
        return RunLimit(self, label)

    async def ask(self, word: str, *values: Any) -> Any:
        """The run's answer to a question. The run is told where nobody waits for it any more."""
        number = next(self.numbers)
        question = self.questions[number] = asyncio.get_running_loop().create_future()
        self.line.send(word, number, *values)
        try:
            return await question
        except asyncio.CancelledError:
            self.line.send("left", number)
            raise
        finally:
            del self.questions[number]

    def answer(self, number: int, answer: Any) -> None:
        question = self.questions.get(number)
        if question is not None and not question.done():
            question.set_result(answer)


class RunEngine:
    """`Engine` of the run, as a worker sees it. Weights are the run's business."""

    shares_weights = False
    seconds = 0.0
    """The run counts them."""

    def __init__(self, desk: WorkerDesk, name: str, context: int) -> None:
        self.desk = desk
        self.name = name
        self.context = context

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context)
        asked = self.name, tokens, fields_of(sampling), session, seed, PLACE.get()
        error, answer, place = await self.desk.ask("call", *asked)
        PLACE.set(place)
        if error:
            raise ERRORS[error](answer)
        for array in answer[:3]:
            array.flags.writeable = False
        return Completion(*answer)

    async def abort(self, session: str) -> None:
        self.desk.line.send("abort", self.name, session)

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        raise EngineFailure(NOT_HERE)

    async def forget(self) -> None:
        raise EngineFailure(NOT_HERE)

    async def pause(self) -> None:
        raise EngineFailure(NOT_HERE)

    async def resume(self) -> None:
        raise EngineFailure(NOT_HERE)


NOT_HERE = "a rollout worker only samples; the run loads and pauses"


class RunLimit(OpenLimit):
    """Permits that the run gives, so that as many environments are open over all workers as in one process."""

    def __init__(self, desk: WorkerDesk, label: str, *, is_half: bool = False) -> None:
        super().__init__()
        self.desk = desk
        self.label = label
        self.is_half = is_half

    def half(self) -> OpenLimit:
        return RunLimit(self.desk, self.label, is_half=True)

    def permit(self) -> OpenPermit:
        return RunPermit(self)


class RunPermit(OpenPermit):
    """A permit of the run, held from entering to leaving."""

    def __init__(self, limit: RunLimit) -> None:
        super().__init__(())
        self.limit = limit

    async def __aenter__(self) -> None:
        limit = self.limit
        self.number: int = await limit.desk.ask("permit", limit.label, limit.is_half, PLACE.get())

    async def __aexit__(self, *error: object) -> None:
        self.limit.desk.line.send("left", self.number)


class ReportedFailures(Failures):
    """Failures that the run counts and logs: of all workers together."""

    def __init__(self, desk: WorkerDesk) -> None:
        super().__init__()
        self.desk = desk

    def note(self, what: str, raised: Raised, advice: str = "") -> None:
        self.desk.line.send("failure", what, raised, advice)


class LogToRun(logging.Handler):
    """Sends what a worker logs to the run, whose log has it."""

    def __init__(self, desk: WorkerDesk) -> None:
        super().__init__(logging.WARNING)
        self.desk = desk

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record) if record.exc_info else record.getMessage()
        message: Message = ("log", record.name, record.levelno, text)
        with suppress(RuntimeError, AttributeError):  # the loop has ended, or not begun
            self.desk.loop.call_soon_threadsafe(self.desk.line.send, *message)
