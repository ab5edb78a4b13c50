"""Routes of the slot engine: of every token that it computed, whichever request computed it first."""

import asyncio
import copy

import numpy as np
import pytest

from support.acting import CONTEXT, run, slot_engine, tiny_model
from support.making import make_turn
from support.mixture import OwnRoutes, tiny_mixture
from turnwise.engines.base import Sampling
from turnwise.learn.router_checks import known_routers


def mixture_engine(model, **settings):
    own = copy.deepcopy(model)
    known_routers(own)
    return slot_engine(own, record_routes=True, **settings)


def prompts(*sizes, shared=0, seed=0):
    random = np.random.default_rng(seed)
    stem = random.integers(0, 64, shared)
    return [np.concatenate([stem, random.integers(0, 64, size)]).astype(np.int32) for size in sizes]


async def asked(engine, asked_prompts, max_tokens=8, start=0):
    calls = (
        engine.generate(prompt, Sampling(max_tokens, routes=start), session=f"s{i}", seed=i)
        for i, prompt in enumerate(asked_prompts)
    )
    return await asyncio.gather(*calls)


def check(model, prompt, completion, start=0):
    """The completion has the routes that the model chooses when it reads everything at once."""
    own = OwnRoutes(model).of(make_turn(prompt, completion.tokens))[start:-1]
    assert completion.routes.dtype == np.uint8
    np.testing.assert_array_equal(completion.routes, own)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 4},
        {"slots": 2, "pass_tokens": 7},  # prefill in pieces, and requests that wait
    ],
)
def test_routes_are_those_of_a_full_forward(settings):
    model, engine_prompts = tiny_mixture(), prompts(3, 9, 20, 1, shared=40)

    async def work():
        engine = mixture_engine(model, **settings)
        first = await asked(engine, engine_prompts)
        again = [np.concatenate([p, c.tokens, p[:3]]) for p, c in zip(engine_prompts, first, strict=True)]
        second = await asked(engine, again)  # their prefixes are cached
        cached = [completion.cached for completion in second]
        await engine.close()
        return first, again, second, cached

    first, again, second, cached = run(work())
    assert min(cached) > 40
    for prompt, completion in [*zip(engine_prompts, first, strict=True), *zip(again, second, strict=True)]:
        check(model, prompt, completion)


def test_only_new_tokens_are_told():
    model, [prompt] = tiny_mixture(), prompts(12)

    async def work():
        engine = mixture_engine(model)
        found = [(await asked(engine, [prompt], start=start))[0] for start in (0, 5, 11, 12)]
        await engine.close()
        return found

    for start, completion in zip((0, 5, 11, 12), run(work()), strict=True):
        check(model, prompt, completion, start)


def test_a_preempted_request_has_all_its_routes():
    """A small cache: requests lose their rows and compute again."""
    model, engine_prompts = tiny_mixture(), prompts(30, 34, 38, 31)

    async def work():
        engine = mixture_engine(model, slots=4)
        engine.scheduler.radix.capacity = 2 * CONTEXT
        preempted, preempt = [], engine.scheduler.preempt
        engine.scheduler.preempt = lambda request: (preempted.append(request), preempt(request))
        found = await asked(engine, engine_prompts, max_tokens=40)
        await engine.close()
        return found, preempted

    found, preempted = run(work())
    assert preempted
    for prompt, completion in zip(engine_prompts, found, strict=True):
        check(model, prompt, completion)


def test_an_aborted_call_has_the_routes_of_what_was_read():
    model, [prompt] = tiny_mixture(), prompts(6)

    async def work():
        engine = mixture_engine(model)
        call = asyncio.create_task(engine.generate(prompt, Sampling(60, routes=0), session="s", seed=0))
        while engine.model.sampled_tokens < 3:
            await asyncio.sleep(0)
        await engine.abort("s")
        found = await call
        await engine.close()
        return found

    found = run(work())
    assert 3 <= len(found.tokens) < 60
    check(model, prompt, found)


def test_routes_after_a_load_are_those_of_the_new_weights():
    model, other, [prompt] = tiny_mixture(), tiny_mixture(seed=1), prompts(20)

    async def work():
        engine = mixture_engine(model)
        before = await asked(engine, [prompt])
        await engine.load(other.state_dict(), 1)
        after = await asked(engine, [prompt])
        await engine.close()
        return before[0], after[0]

    before, after = run(work())
    check(model, prompt, before)
    check(other, prompt, after)


def test_more_than_256_experts_have_16_bits():
    model, [prompt] = tiny_mixture(num_experts=300, num_local_experts=300), prompts(10)

    async def work():
        engine = mixture_engine(model)
        [found] = await asked(engine, [prompt])
        await engine.close()
        return found

    routes = run(work()).routes
    assert routes.dtype == np.uint16
    assert routes.max() >= 256


def test_routes_that_nobody_records_are_refused():
    async def work():
        engine = slot_engine(tiny_model())
        with pytest.raises(ValueError, match=r"set model.router_replay = true"):
            await engine.generate(np.array([1, 2]), Sampling(2, routes=0), session="s", seed=0)
        await engine.close()

    run(work())
    with pytest.raises(ValueError, match="has no routers"):
        slot_engine(tiny_model(), record_routes=True)


def test_a_call_that_asks_for_none_gets_none():
    async def work():
        engine = mixture_engine(tiny_mixture())
        found = await engine.generate(np.array([1, 2]), Sampling(2), session="s", seed=0)
        await engine.close()
        return found

    assert run(work()).routes is None
