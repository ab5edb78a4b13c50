"""A load really arrives in vLLM: every tensor of it, a head that is tied to the embedding too."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engines.conformance import CONTEXT, END, prompts, stock, tokenizer_of_letters
from engines.vllm.serving import local
from support.acting import full_logprobs
from support.paths import TESTS
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.engines.vllm import local as vllm_local


async def gaps_after(loads, **settings):
    """Mean gaps between vLLM's logprobs and the model's before and after each load."""
    engine = local(stock(0), tokenizer_of_letters(), slots=8, context=CONTEXT, end_tokens=[END], **settings)
    asked, found = prompts(5, 20, 40, 70), []
    try:
        for version, model in enumerate([stock(0), *loads]):
            if version:
                await engine.load(model.state_dict(), version)
            calls = (engine.generate(p, Sampling(20), session=f"s{i}", seed=i) for i, p in enumerate(asked))
            done = zip(asked, await asyncio.gather(*calls), strict=True)
            gaps = [np.abs(full_logprobs(model, p, c.tokens) - c.logprobs) for p, c in done]
            found.append(float(np.concatenate(gaps).mean()))
    finally:
        await engine.close()
    return found


def nudged(scale):
    """The stock model with every tensor changed."""
    import copy

    model = copy.deepcopy(stock(0))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for tensor in model.parameters():
            tensor.add_(scale * torch.randn_like(tensor))
    return model


def test_logprobs_are_those_of_the_weights_that_were_loaded():
    gaps = asyncio.run(gaps_after([stock(1), nudged(0.03), stock(0)]))
    assert max(gaps) < 1e-5, gaps


def test_bfloat16_is_near():
    """The model itself computes in float32 here."""
    gaps = asyncio.run(gaps_after([stock(1)], dtype="bfloat16"))
    assert 1e-4 < max(gaps) < 5e-2, gaps


def test_without_the_repair_the_tied_head_is_stale(monkeypatch):
    """What `pack_again` is for: if this fails, vLLM has learned to do it itself."""
    original = vllm_local.engine_arguments
    changes = {"weight_transfer_config": {"backend": "stale"}, "worker_extension_cls": "engines.vllm.stale.Extension"}
    monkeypatch.setattr(vllm_local, "engine_arguments", lambda settings, context: original(settings, context) | changes)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    before, after = asyncio.run(gaps_after([stock(1)]))
    assert before < 1e-5
    assert after > 0.05


def test_a_load_that_cannot_be_read_is_a_failure_and_another_mends_it(tmp_path):
    async def scene():
        engine = local(stock(0), tokenizer_of_letters(), slots=8, context=CONTEXT, end_tokens=[END])
        prompt = prompts(9)[0]
        try:
            before = await engine.generate(prompt, Sampling(5), session="s", seed=0)
            whole = engine.transfer.write

            def write(weights, version):
                published = whole(weights, version)
                published.path.write_text("nothing")
                return published

            engine.transfer.write = write
            with pytest.raises(EngineFailure, match="could not load version 1"):
                await engine.load(stock(1).state_dict(), 1)
            call = asyncio.create_task(engine.generate(prompt, Sampling(5), session="s", seed=0))
            await asyncio.sleep(0.3)
            assert not call.done(), "it samples with weights that nobody knows"
            engine.transfer.write = whole
            await engine.load(stock(1).state_dict(), 2)
            return prompt, before, await call
        finally:
            await engine.close()

    prompt, before, after = asyncio.run(scene())
    assert (before.versions == 0).all()
    assert (after.versions == 2).all()
    assert np.abs(full_logprobs(stock(1), prompt, after.tokens) - after.logprobs).max() < 1e-5


def test_a_vllm_that_has_slept_samples_with_the_weights_of_the_next_load():
    """On a CPU vLLM gives no memory back, and goes through the same states."""
    model, tokenizer = stock(0), tokenizer_of_letters()

    async def scene():
        engine = local(model, tokenizer, slots=4, context=CONTEXT, end_tokens=[END], sleeps=True)
        ask = lambda: engine.generate(np.arange(1, 20, dtype=np.int32), Sampling(20), session="s", seed=1)
        try:
            first = await ask()
            found = []
            for version in (1, 2):
                await engine.sleep()
                assert await engine.service.llm.is_sleeping()
                late = asyncio.create_task(ask())
                await asyncio.sleep(0.2)
                assert not late.done()
                await engine.load(stock(version).state_dict(), version)
                assert not await engine.service.llm.is_sleeping()
                found += [(version, await late), (version, await ask())]
            return first, found
        finally:
            await engine.close()

    first, found = asyncio.run(scene())
    prompt = np.arange(1, 20, dtype=np.int32)
    for version, completion in [(0, first), *found]:
        assert set(completion.versions.tolist()) == {version}
        expected = full_logprobs(stock(version), prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
