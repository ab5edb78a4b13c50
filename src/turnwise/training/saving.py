"""The saving of checkpoints beside training: one at a time, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turnwise.learn.base import AnyLearner, AnyStaged
from turnwise.pretrained import ChatTokenizer
from turnwise.runs.checkpoint import Checkpoint
from turnwise.schedule.workers import Worker

Write = Callable[[AnyStaged], Checkpoint]
"""Writes what a learner has staged, and all else that a checkpoint has."""


class Saving:
    """Saves checkpoints: training waits while one is staged, and goes on while it is written. The event loop waits for
    neither."""

    def __init__(self, run: Worker) -> None:
        self.run = run
        """Makes the calls, one after the other."""
        self.writing: asyncio.Task[Checkpoint] | None = None

    async def save(self, learner: AnyLearner, tokenizer: ChatTokenizer, write: Write) -> Checkpoint | None:
        """Stage a checkpoint and begin to write it. Returns the one before, if it has been written meanwhile: host
        memory holds one at a time."""
        before = await self.settled()
        staged = await self.run(learner.stage, tokenizer)
        self.writing = asyncio.ensure_future(self.written(write, staged))
        return before

    async def written(self, write: Write, staged: AnyStaged) -> Checkpoint:
        made: Checkpoint = await self.run(write, staged)
        return made

    def ended(self) -> Checkpoint | None:
        """The checkpoint that has been written since the last question; raises what went wrong with it."""
        if self.writing is None or not self.writing.done():
            return None
        made, self.writing = self.writing, None
        return made.result()

    async def settled(self) -> Checkpoint | None:
        """`ended`, once no checkpoint is being written."""
        await self.quiet()
        return self.ended()

    async def quiet(self) -> None:
        """Wait until no checkpoint is being written, however it ends."""
        if self.writing is not None:
            await asyncio.wait([self.writing])
            self.writing.exception()  # or it would be called forgotten
