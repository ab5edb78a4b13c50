"""The check at the start on a real model, in bfloat16: `turnwise data smollm2-135m` fetches it."""

import copy

import numpy as np
import pytest
import torch

from support.acting import run
from training.checking import check_of, learner_of
from turnwise.data.catalogue import model_folder
from turnwise.engines.base import Completion
from turnwise.learn.policy import load_model
from turnwise.types import StopReason

LAYERS = (29,)
"""The last, in which attention matters least."""
KINDS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
NAMES = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    *(f"model.layers.{layer}.{kind}.weight" for layer in LAYERS for kind in KINDS),
]


class Whole:
    """An engine that holds its weights and hidden states in bfloat16, as vLLM does, and leaves some tensors behind."""

    shares_weights = False
    context = 96

    def __init__(self, model, *stale):
        self.model = copy.deepcopy(model).to(torch.bfloat16).eval()
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.model.set_attn_implementation("sdpa")
        self.stale = stale

    async def load(self, weights, version):
        own = self.model.state_dict()
        for name, tensor in weights.items():
            if name not in self.stale:
                own[name].copy_(tensor)

    async def forget(self):
        pass

    @torch.inference_mode()
    async def generate(self, prompt, sampling, *, session, seed):
        random = torch.Generator().manual_seed(seed)
        now, past, tokens, logprobs = torch.from_numpy(prompt).long()[None], None, [], []
        for _ in range(sampling.max_tokens):
            out = self.model(input_ids=now, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, table = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
            now = torch.multinomial(table.exp(), 1, generator=random)[None]
            tokens.append(int(now))
            logprobs.append(min(float(table[now]), 0.0))
        zeros = np.zeros(len(tokens), np.int32)
        return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), zeros, StopReason.length)


@pytest.fixture(scope="module")
def model():
    try:
        folder = model_folder("smollm2-135m")
    except ValueError as missing:
        pytest.skip(str(missing))
    return load_model(folder)


def begun(model, *stale, probes):
    """What the start finds with an engine that leaves some tensors behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnwise.training.weight_check.AT_START", probes)
        learner = learner_of(model, "bfloat16")
        check = check_of(Whole(model, *stale), learner, "bfloat16", vocabulary=49000)
        return run(check.begin(0), seconds=3600)


@pytest.mark.slow
def test_an_engine_that_loads_everything_passes(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = begun(model, probes=16)
    assert found.problem == ""
    assert found.metrics["weight_check/start/gap_disturbed"] < 2.5 * found.metrics["weight_check/start/gap"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_left_behind_is_caught(model, name):
    assert "loads leave a part of its weights as they were" in begun(model, name, probes=4).problem
