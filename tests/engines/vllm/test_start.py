"""The check at the start with vLLM in bfloat16, on a model that was trained if it is here, and on a tiny one."""

from __future__ import annotations

import asyncio

import pytest

from engines.conformance import stock, tokenizer_of_letters
from engines.vllm.serving import local
from support.acting import inline
from training.checking import learner_of
from turnwise.data.catalogue import model_folder
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.plan.pack import pack
from turnwise.training.weight_check import WeightCheck


@pytest.fixture(scope="module")
def trained():
    """SmolLM2 and its tokenizer; of the module, because each test has a cache of its own."""
    try:
        folder = model_folder("smollm2-135m")
    except ValueError as missing:
        pytest.skip(str(missing))
    return load_model(folder), load_tokenizer(folder)


class Behind:
    """A learner whose publications have one tensor as it was at first: what an engine that leaves it behind shows."""

    def __init__(self, learner, *names):
        self.learner = learner
        self.first = {name: learner.publish()[name].clone() for name in names}

    def publish(self):
        return {**self.learner.publish(), **self.first}

    def __getattr__(self, name):
        return getattr(self.learner, name)


def begun(model, tokenizer, *behind):
    learner = Behind(learner_of(model, "bfloat16"), *behind)

    async def scene():
        engine = local(model, tokenizer, slots=16, context=160, end_tokens=[], dtype="bfloat16")
        check = WeightCheck(
            engine,
            learner,
            lambda turns: pack(turns, 4096),
            inline,
            temperature=1.0,
            vocabulary=len(tokenizer),
            exact=False,
            longest=160,
        )
        try:
            return await check.begin(0)
        finally:
            await engine.close()

    return asyncio.run(scene())


def test_a_right_engine_passes_in_bfloat16():
    result = begun(stock(0), tokenizer_of_letters())
    assert result.problem == ""


def test_a_right_engine_of_a_trained_model_passes_in_bfloat16(trained):
    result = begun(*trained)
    print(result)
    assert result.problem == ""


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"])
def test_a_tensor_left_behind_is_caught_in_bfloat16(trained, layer):
    model, _ = trained
    last = model.config.num_hidden_layers - 1
    result = begun(*trained, f"model.layers.{last}.{layer}.weight")
    print(layer, result)
    assert "loads leave a part of its weights as they were" in result.problem
