"""Which calls share a step of a deterministic engine, and in which order, is no matter of timing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from turnwise.engines.base import Sampling, nothing
from turnwise.engines.places import MOST_ROUNDS, PLACE, UNKNOWN, place_after, place_of_new
from turnwise.engines.slots.engine import SlotEngine
from turnwise.types import StopReason

PROMPT = np.array([1, 2], np.int32)


class StubModel:
    """A slot model, its own scheduler, that answers all calls of a step at once and keeps their sessions."""

    vocabulary, context, routers, guidance, model_seconds = 9, 99, None, None, 0.0

    def __init__(self) -> None:
        self.scheduler = self
        self.waiting: list[Any] = []
        self.steps: list[list[str]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Any) -> None:
        self.waiting.append(request)

    def cancel(self, request: Any) -> None:
        self.waiting.remove(request)

    def step(self) -> list[Any]:
        requests, self.waiting = self.waiting, []
        self.steps.append([request.session for request in requests])
        return [(request, nothing(StopReason.length)) for request in requests]

    def drop_all(self) -> list[Any]:
        return []


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


async def after_rounds(rounds: int, engine: SlotEngine, session: str, place: Any = UNKNOWN) -> tuple[int, ...]:
    """The caller's next place, after a call that comes so many rounds of the loop late."""
    PLACE.set(place)
    for _ in range(rounds):
        await asyncio.sleep(0)
    await engine.generate(PROMPT, Sampling(1), session=session, seed=0)
    return PLACE.get()


def steps_of(calls: Any, **settings: Any) -> tuple[list[list[str]], list[Any]]:
    async def scene() -> tuple[list[list[str]], list[Any]]:
        model = StubModel()
        engine = SlotEngine(model, run=inline, **settings)
        places = await asyncio.gather(*(after_rounds(rounds, engine, *rest) for rounds, *rest in calls))
        await engine.close()
        return model.steps, places

    return asyncio.run(scene())


LATE = [(0, "early"), (20, "late")]


def test_a_deterministic_step_waits_for_everyone_who_can_run() -> None:
    assert steps_of(LATE, shares_weights=True)[0] == [["early", "late"]]
    assert steps_of(LATE, shares_weights=False)[0] == [["early"], ["late"]]
    assert steps_of(LATE, shares_weights=False, is_deterministic=True)[0] == [["early", "late"]]


def test_code_that_spins_for_ever_holds_up_no_step() -> None:
    async def scene() -> list[list[str]]:
        async def spin() -> None:
            while True:
                await asyncio.sleep(0)

        spinning = asyncio.create_task(spin())
        model = StubModel()
        engine = SlotEngine(model, run=inline, shares_weights=True)
        async with asyncio.timeout(60):
            await engine.generate(PROMPT, Sampling(1), session="a", seed=0)
        spinning.cancel()
        await engine.close()
        return model.steps

    assert MOST_ROUNDS < 1000
    assert asyncio.run(scene()) == [["a"]]


def test_calls_of_a_step_are_taken_by_their_places() -> None:
    calls = [
        (0, "nobody"),
        (1, "group 7, attempt 0", place_of_new(7, 0)),
        (2, "group 3, attempt 1", place_of_new(3, 1)),
        (3, "group 3, attempt 0", place_of_new(3, 0)),
        (4, "answered second", place_after(11)),
        (5, "answered first", place_after(10)),
    ]
    [step], places = steps_of(calls, shares_weights=True)
    assert step == [session for _, session, *_ in calls[:0:-1]] + ["nobody"]
    order = [place for _, place in sorted(zip(step, places[:0:-1] + places[:1], strict=True), key=lambda x: x[1])]
    assert order == [place_after(number) for number in range(6)]


def test_a_step_waits_for_what_may_still_bring_calls() -> None:
    async def scene() -> list[list[str]]:
        model = StubModel()
        engine = SlotEngine(model, run=inline, shares_weights=True)
        coming = asyncio.get_running_loop().create_future()
        engine.coming.add(coming)
        first = asyncio.create_task(after_rounds(0, engine, "first"))
        await asyncio.sleep(0.02)
        assert model.steps == []
        second = asyncio.create_task(after_rounds(0, engine, "second", place_after(0)))
        engine.coming.discard(coming)
        coming.set_result(None)
        await asyncio.gather(first, second)
        await engine.close()
        return model.steps

    assert asyncio.run(scene()) == [["second", "first"]]


@pytest.mark.parametrize("shares", [True, False])
def test_a_refused_call_keeps_its_place(shares: bool) -> None:
    async def scene() -> tuple[int, ...]:
        engine = SlotEngine(StubModel(), run=inline, shares_weights=shares)
        PLACE.set(place_of_new(1, 2))
        with pytest.raises(ValueError, match="at least one token"):
            await engine.generate(PROMPT[:0], Sampling(1), session="a", seed=0)
        return PLACE.get()

    assert asyncio.run(scene()) == place_of_new(1, 2)
