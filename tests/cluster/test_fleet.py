import asyncio

import numpy as np
import pytest

from acting import byte_tokenizer, run
from turnwise.cluster.fleet import Fleet
from turnwise.engines.base import Sampling
from turnwise.engines.scripted import ScriptedEngine


def engines(count, script=lambda prompt, session, seed: "yes"):
    tokenizer = byte_tokenizer()
    encode = lambda text: tokenizer.encode(text)
    return [ScriptedEngine(script, encode, end_token=2, context=100 + place) for place in range(count)]


def test_a_session_stays_where_it_is_and_others_go_where_there_is_least_to_do():
    async def slow(prompt, session, seed):
        await asyncio.sleep(0.01)
        return "yes"

    async def work():
        own = engines(2, slow)
        fleet = Fleet(own)
        for _ in range(2):
            calls = [
                fleet.generate(np.array([place + 1]), Sampling(8), session=f"s{place}", seed=0) for place in range(6)
            ]
            await asyncio.gather(*calls)
        return [[int(prompt[0]) for prompt in engine.prompts] for engine in own], fleet.context

    (first, second), context = run(work())
    assert first == [1, 3, 5] * 2
    assert second == [2, 4, 6] * 2
    assert context == 100


def test_weights_go_to_all_and_an_end_is_one_for_all():
    async def work():
        own = engines(3)
        fleet = Fleet(own)
        await fleet.load({}, 7)
        await fleet.pause()
        await fleet.resume()
        await fleet.abort("nobody")
        await fleet.forget()
        await fleet.close()
        return [engine.version for engine in own]

    assert run(work()) == [7, 7, 7]


def test_an_engine_that_fails_fails_its_calls_only():
    def broken(prompt, session, seed):
        raise RuntimeError("no")

    async def work():
        own = [*engines(1, broken), *engines(1)]
        fleet = Fleet(own)
        with pytest.raises(RuntimeError, match="no"):
            await fleet.generate(np.array([1]), Sampling(8), session="a", seed=0)
        fleet.calls[0] += 1  # busy
        done = await fleet.generate(np.array([1]), Sampling(8), session="b", seed=0)
        return len(done.tokens)

    assert run(work()) > 0
