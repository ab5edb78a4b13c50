"""What can happen to an engine in a process of its own; that it is an engine is said by the conformance suite."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.remote.processes import start_process
from support.acting import full_logprobs, tiny_model, until
from support.paths import TESTS
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.engines.remote.process import ProcessEngine
from turnwise.weights.publisher import Publisher
from turnwise.weights.skeleton import model_of_skeleton, skeleton_of

PROMPT = np.arange(1, 10, dtype=np.int32)


def run(coroutine, seconds=400.0):
    async def bounded():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())


def ask(engine, seed=0, max_tokens=6):
    return engine.generate(PROMPT, Sampling(max_tokens), session=f"s{seed}", seed=seed)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("tied", [True, False])
def test_the_skeleton_of_a_model_is_small_and_makes_the_same_model(tied):
    model = tiny_model(tied=tied)
    skeleton = skeleton_of(model)
    again: Any = model_of_skeleton(skeleton, model.state_dict())
    assert len(skeleton) < 40_000
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    again.lm_head.weight.data.zero_()
    assert model.lm_head.weight.any()  # it has a copy


def test_weights_are_loaded_and_a_killed_process_is_a_failure_that_names_it(tmp_path):
    old, new = tiny_model(tied=True), tiny_model(seed=1, tied=True)

    async def scene():
        engine = start_process(old, tmp_path, name="replica 3")
        first = await ask(engine)
        await engine.load(new.state_dict(), 1)
        second = await ask(engine)
        await engine.pause()
        waiting = [asyncio.create_task(ask(engine, seed)) for seed in range(3)]
        await asyncio.sleep(0.01)
        os.kill(engine.process.pid, signal.SIGKILL)
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(EngineFailure, match="replica 3 is gone"):
            await ask(engine)
        with pytest.raises(EngineFailure, match="replica 3 is gone"):
            await engine.check()
        await engine.close()
        engine.publisher.close()
        return first, second, failed, engine.process.pid

    first, second, failed, pid = run(scene())
    for model, completion, version in ((old, first, 0), (new, second, 1)):
        expected = full_logprobs(model, PROMPT, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert (completion.versions == version).all()
        assert not completion.tokens.flags.writeable
    assert [type(error) for error in failed] == [EngineFailure] * 3
    assert str(failed[0]) == f"replica 3 is gone: process {pid} of it ended with code -9"
    assert not is_alive(pid)
    assert list(tmp_path.iterdir()) == []


def test_killed_processes_leave_no_thread_behind(tmp_path):
    model = tiny_model(tied=True)

    async def scene():
        engines = [start_process(model, tmp_path / str(number)) for number in range(3)]
        await asyncio.gather(*(engine.open() for engine in engines))
        before = threading.enumerate()
        for engine in engines:
            os.kill(engine.process.pid, signal.SIGKILL)
        await until(lambda: all(engine.failure for engine in engines))
        await asyncio.gather(*(engine.close() for engine in engines))
        for engine in engines:
            engine.publisher.close()
        return before, threading.enumerate(), [engine.process.pid for engine in engines]

    before, after, pids = run(scene())
    assert after == before
    assert not any(is_alive(pid) for pid in pids)


def fail_to_make(model, version):
    raise RuntimeError("no such accelerator")


def test_a_process_that_does_not_start_says_why(tmp_path, capfd):
    async def scene():
        publisher = Publisher(tmp_path)
        publisher.publish({"a": torch.zeros(1)}, 0)
        engine = ProcessEngine(fail_to_make, skeleton_of(torch.nn.Identity()), publisher, context=96)
        with pytest.raises(EngineFailure, match="ended with code 1: RuntimeError: no such accelerator"):
            await ask(engine)
        await engine.close()
        publisher.close()

    run(scene())
    assert "no such accelerator" in capfd.readouterr().err


PARENT = """
import asyncio, sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from support.acting import tiny_model
from engines.remote.processes import start_process

async def main():
    engine = start_process(tiny_model(tied=True), Path({folder!r}))
    await engine.check()
    print(engine.process.pid, flush=True)
    await asyncio.sleep(100)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it_however_that_ends(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(TESTS), folder=str(tmp_path / "shared")))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 600
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_caller_that_goes_away_frees_its_place(tmp_path):
    """With one slot, a call that was cancelled would keep the next waiting for its 80 tokens."""

    async def scene():
        engine = start_process(tiny_model(tied=True), tmp_path, slots=1)
        await engine.pause()
        gone = asyncio.create_task(ask(engine, max_tokens=80))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert engine.calls == {}
        await engine.resume()
        await until(lambda: not engine.calls)
        completion = await ask(engine, 1)
        await engine.close()
        engine.publisher.close()
        return completion

    assert len(run(scene()).tokens) == 6
