"""Checkpoints that are written while training and everything else go on."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from support.running import SilentScreen, micro_recipe, resume, untimed
from turnwise.assemble import run
from turnwise.learn.learner import Learner
from turnwise.learn.staged import Staged
from turnwise.runs.checkpoint import Checkpoint, latest_checkpoint, written_steps
from turnwise.schedule.workers import in_own_thread
from turnwise.training.saving import Saving

PATIENCE = 60.0


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_test(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run_test


class Gate:
    """A learner whose staging waits to be let through, and a writer that does."""

    def __init__(self) -> None:
        self.staging, self.writing = threading.Event(), threading.Event()
        self.done: list[Any] = []

    def stage(self, tokenizer: Any) -> Any:
        assert self.staging.wait(PATIENCE)
        self.done.append(("staged", tokenizer))
        return self

    def writer(self, step: int, error: Exception | None = None) -> Any:
        def write(staged: Any) -> Checkpoint:
            assert self.writing.wait(PATIENCE)
            if error is not None:
                raise error
            self.done.append(("written", step))
            return Checkpoint(Path(f"step-{step:06d}"), step, {})

        return write


async def once(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()


@in_a_loop
async def test_others_go_on_while_one_is_staged_and_training_while_it_is_written() -> None:
    gate, saving, reached = Gate(), Saving(in_own_thread("checkpoint")), asyncio.Event()

    async def training() -> None:
        assert await saving.save(gate, 1, gate.writer(1)) is None
        reached.set()

    async def others() -> None:  # nothing of this would happen in a loop that is blocked
        for _ in range(3):
            await asyncio.sleep(0)
        assert gate.done == []
        gate.staging.set()
        await once(reached)
        assert gate.done == [("staged", 1)]
        assert saving.ended() is None
        gate.writing.set()

    await asyncio.gather(training(), others())
    made = await saving.settled()
    assert made is not None
    assert made.step == 1
    assert gate.done == [("staged", 1), ("written", 1)]
    assert await saving.settled() is None


@in_a_loop
async def test_the_second_is_staged_once_the_first_is_written() -> None:
    gate, saving = Gate(), Saving(in_own_thread("checkpoint"))
    gate.staging.set()
    await saving.save(gate, 1, gate.writer(1))
    second = asyncio.ensure_future(saving.save(gate, 2, gate.writer(2)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert gate.done == [("staged", 1)]
    gate.writing.set()
    before = await second
    assert before is not None
    assert before.step == 1
    assert (await saving.settled()) is not None
    assert gate.done == [("staged", 1), ("written", 1), ("staged", 2), ("written", 2)]


@pytest.mark.parametrize("by", ["ended", "settled", "save"])
@in_a_loop
async def test_what_goes_wrong_is_raised_once_where_somebody_asks(by: str) -> None:
    gate, saving = Gate(), Saving(in_own_thread("checkpoint"))
    gate.staging.set()
    gate.writing.set()
    await saving.save(gate, 1, gate.writer(1, OSError(28, "No space left on device")))
    await saving.quiet()
    with pytest.raises(OSError, match="No space left"):
        if by == "ended":
            saving.ended()
        elif by == "settled":
            await saving.settled()
        else:
            await saving.save(gate, 2, gate.writer(2))
    assert saving.ended() is None
    assert gate.done == [("staged", 1)]


# ---------------------------------------------------------------- in runs

SMALL = ("sft.updates=0", "steps=3", "checkpoints.every=1", "evaluation.every=0", "evaluation.final_tasks=2")


class Slow:
    """Writes of staged checkpoints from the second on wait for a step that comes after it."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Exception | None = None) -> None:
        self.count, self.gate, self.then = 0, threading.Event(), then
        write = Staged.write

        def slow(staged: Staged, *arguments: Any) -> None:
            self.count += 1
            if self.count == 2:
                assert self.gate.wait(PATIENCE)
                if self.then is not None:
                    raise self.then
            write(staged, *arguments)

        patch.setattr(Staged, "write", slow)


def test_a_run_trains_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    update, updates = Learner.update, []

    def counted(learner: Learner, *arguments: Any) -> Any:
        updates.append(slow.count)
        if len(updates) == 2:  # of the second step, while the checkpoint of the first is not written
            slow.gate.set()
        return update(learner, *arguments)

    monkeypatch.setattr(Learner, "update", counted)
    recipe = micro_recipe(tmp_path, *SMALL, "groups_per_update=2", "groups_per_step=2", "epochs=1")
    assert asyncio.run(run.start(recipe, SilentScreen(), asyncio.Event())) is not None
    assert updates == [1, 2, 3]
    assert written_steps(Path(recipe.out) / "checkpoints")[-1] == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("lost")])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_which_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    whole, broken = (micro_recipe(tmp_path, *SMALL, f"out={tmp_path / name}") for name in ("whole", "broken"))
    asyncio.run(run.start(whole, SilentScreen(), asyncio.Event()))
    with monkeypatch.context() as patch:
        Slow(patch, error).gate.set()
        with pytest.raises(type(error)):
            asyncio.run(run.start(broken, SilentScreen(), asyncio.Event()))
    found = latest_checkpoint(Path(broken.out) / "checkpoints")
    assert found is not None
    assert found.step == 0
    assert [path.name for path in (Path(broken.out) / "checkpoints").glob(".*")] == []
    resume(Path(broken.out))
    assert untimed(Path(broken.out) / "metrics.jsonl") == untimed(Path(whole.out) / "metrics.jsonl")
