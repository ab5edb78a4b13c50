"""Weights of several ranks into vLLM: dense models, mixtures and merged adapters, by files and as over nccl."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from cluster.pool import Pool
from cluster.test_transports import leave_in_rank, remember_in_rank, step
from engines.conformance import tokenizer_of_letters
from engines.vllm.serving import local
from support.paths import TESTS
from turnwise.engines.vllm import local as vllm_local
from turnwise.training.weight_check import AT_START
from turnwise.weights import vllm_native
from turnwise.weights.vllm_native import NativeTransfer
from weights.conformance import (
    CONTEXT,
    LEARNERS,
    arrives,
    assert_at_floor,
    check_of,
    not_caught,
    some_of,
)

SENDER = "engines.vllm.gloo_transfer"
CASES = [
    ("dense-fsdp2-tp2", "float32", "file"),
    ("dense-fsdp2", "bfloat16", "file"),
    ("mixture-fsdp2", "float32", "file"),
    ("mixture-fsdp2", "bfloat16", "file"),
    ("lora-fsdp2", "float32", "file"),
    ("dense-fsdp2", "float32", "native"),
    ("mixture-fsdp2", "bfloat16", "native"),
]


@pytest.fixture(scope="module")
def pools():
    made = {size: Pool(size) for size in (2, 4)}
    yield made
    for each in made.values():
        each.close()


def play_nccl():
    """In a rank: send through vLLM's factory by a backend that needs no GPU."""
    setattr(vllm_native, "trainer_of", importlib.import_module(SENDER).trainer_of)  # noqa: B010


@pytest.fixture
def native(monkeypatch):
    original = vllm_local.engine_arguments
    changes = {"weight_transfer_config": {"backend": "played_nccl"}, "worker_extension_cls": f"{SENDER}.Extension"}
    monkeypatch.setattr(vllm_local, "engine_arguments", lambda settings, context: original(settings, context) | changes)
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")


@pytest.mark.parametrize(("learner", "dtype", "way"), CASES)
def test_loads_arrive_whole_and_what_is_left_behind_is_caught(pools, request, learner, dtype, way):
    learned = LEARNERS[learner]
    if learned.more:
        pytest.importorskip("peft")
    if way == "native":
        request.getfixturevalue("native")
    pool = pools[learned.shape.ranks]
    spread = pool.learner(learned.made(dtype), learned.shape)
    number = [spread.ranks.number] * pool.size
    named = {"slots": AT_START, "context": CONTEXT, "end_tokens": [], "dtype": dtype}

    async def scene():
        engine = local(learned.model(), tokenizer_of_letters(), **named)
        if way == "native":
            pool.run(play_nccl)
            engine.transfer = NativeTransfer("nccl", getattr(torch, dtype))
        try:
            check = check_of(engine, spread, dtype)
            assert_at_floor(check, await arrives(check, step), dtype)
            pool.run(remember_in_rank, number)
            names = some_of(spread.outline.shapes)
            leave = lambda name: pool.run(leave_in_rank, number, [name] * pool.size)
            return await not_caught(check, leave, names)
        finally:
            await engine.close()

    assert asyncio.run(scene()) == []
    spread.close()
