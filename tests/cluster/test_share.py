"""A rank has its share of the weights and no more, while it loads and while it computes."""

import os
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.pool import folder_of, policy_of
from learn.test_casting import Products
from support.making import make_model
from turnwise.cluster.mesh import Mesh, MeshShape
from turnwise.cluster.spread import Spread
from turnwise.learn.casting import layers_of
from turnwise.learn.model_checks import short_turns
from turnwise.plan.cut import cut

LAYERS = 8
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 192, "vocab_size": 64}


class Alive(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that something made meanwhile."""

    def __init__(self):
        super().__init__()
        self.storages, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), named=None):
        out = function(*args, **(named or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if type(tensor) is torch.Tensor and tensor.device.type != "meta":
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages and not is_of_file(storage.data_ptr()):
            self.storages[key] = weakref.finalize(storage, self.drop, key, size)
            self.now += size
            self.most = max(self.most, self.now)

    def drop(self, key, size):
        del self.storages[key]
        self.now -= size


def is_of_file(address):
    """Whether memory is that of a file of weights: a slice of a tensor there lies in the whole tensor, of which no more
    is read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


def loaded(folder, dtype=torch.float32):
    return Spread(Mesh(MeshShape(fsdp=2), "cpu")).load(folder, computed_in=dtype)


def load_counted(folder):
    """(the most bytes alive while a rank loads, bytes of its share, of a layer, of all)."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # other threads are not counted
    with Alive() as alive:
        model = loaded(folder).model
    share = sum(p.to_local().nbytes for p in model.parameters())
    layer, whole = (sum(p.nbytes for p in module.parameters()) for module in (layers_of(model)[0], model))
    return alive.most, share, layer, whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_loading_takes_a_share_and_one_layer(pool, kind):
    folder = folder_of(make_model(kind, **SIZES))
    for most, share, layer, whole in pool.run(load_counted, [folder] * 2):
        assert share <= most <= share + layer
        assert share + layer < 0.75 * whole


def compute_counted(folder):
    """(products by dtype, the most layers that were gathered at once, dtypes of states between layers)."""
    policy = policy_of(loaded(folder, torch.bfloat16), dtype=torch.bfloat16, checkpointing=True)
    layers, most, handed = layers_of(policy.model), 0, set()

    def look(layer, inputs, output):
        nonlocal most
        gathered = [each for each in layers if any(not isinstance(p, DTensor) for p in each.parameters())]
        most = max(most, len(gathered))
        handed.add(output.dtype)

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    [plan] = cut(short_turns(policy.vocabulary), 64)
    with Products() as seen:
        for _, logprobs, _ in policy.passes(plan):
            logprobs.sum().backward()
    masters = {(p.dtype, p.grad.dtype) for p in policy.model.parameters()}
    return dict(seen.found), most, handed, masters


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_a_pass_in_bfloat16_gathers_two_layers_at_most(pool, kind):
    folder = folder_of(make_model(kind, **SIZES))
    for products, most, handed, masters in pool.run(compute_counted, [folder] * 2):
        assert {dtype for _, dtypes in products for dtype in dtypes if dtype.is_floating_point} == {torch.bfloat16}
        assert any("grouped" in name for name, _ in products) == (kind == "qwen3_moe")
        assert 1 <= most <= 2
        assert handed == {torch.bfloat16}
        assert masters == {(torch.float32, torch.float32)}
