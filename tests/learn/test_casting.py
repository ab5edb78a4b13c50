"""In bfloat16 everything that a layer multiplies is in bfloat16, master weights stay what they are, and copies of them
are gone when their layer has computed."""

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.making import distance, gradients, make_model
from turnwise.learn.casting import Casting
from turnwise.learn.model_checks import short_turns
from turnwise.learn.policy import Policy
from turnwise.plan.cut import cut

PRODUCTS = ("mm.default", "addmm", "bmm", "_grouped_mm", "grouped_mm_fallback", "baddbmm")


class Products(TorchDispatchMode):
    """Counts products by name and the dtypes of what is multiplied."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), named=None):
        if any(name in str(function) for name in PRODUCTS):
            self.found[str(function), tuple(x.dtype for x in args if isinstance(x, torch.Tensor))] += 1
        return function(*args, **(named or {}))


class Copies(TorchDispatchMode):
    """The most bytes of bfloat16 copies of float32 weights that were alive at once."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.alive, self.most = shapes, [], 0

    def __torch_dispatch__(self, function, types, args=(), named=None):
        out = function(*args, **(named or {}))
        cast = "_to_copy" in str(function) and args[0].dtype == torch.float32 and out.dtype == torch.bfloat16
        if cast and tuple(out.shape) in self.shapes:
            self.alive.append((weakref.ref(out.untyped_storage()), out.nbytes))
            self.most = max(self.most, sum(size for storage, size in self.alive if storage() is not None))
        return out


def update(policy):
    [plan] = cut(short_turns(policy.vocabulary), 64)
    for _, logprobs, _ in policy.passes(plan):
        (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
    return logprobs.detach()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_product_is_in_bfloat16(kind, checkpointing):
    policy = Policy(make_model(kind), dtype=torch.bfloat16, checkpointing=checkpointing)
    with Products() as seen:
        update(policy)
    experts = [name for (name, _), count in seen.found.items() if "grouped" in name and count]
    assert bool(experts) == (kind == "qwen3_moe")
    assert {dtype for _, dtypes in seen.found for dtype in dtypes if dtype.is_floating_point} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
def test_it_is_as_near_to_float32_as_its_rounding(kind):
    truth, cast = Policy(model := make_model(kind)), Policy(copy.deepcopy(model), dtype=torch.bfloat16)
    wanted, found = update(truth), update(cast)
    assert 1e-4 < float((found - wanted).abs().max()) < 0.3
    for name, gradient in gradients(truth.model).items():
        assert distance(gradients(cast.model)[name], gradient) < 0.15, name
    assert {p.dtype for p in cast.model.parameters()} == {p.grad.dtype for p in cast.model.parameters()}


def test_nothing_stays_with_the_model():
    model = make_model("qwen3_moe")
    before, kept = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="stop"), Casting(model, torch.bfloat16).on():
        model.model.layers[1].mlp.register_forward_hook(stop)
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert {name: id(p) for name, p in before.items()} == {name: id(p) for name, p in model.named_parameters()}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def stop(*_):
    raise RuntimeError("stop")


def test_copies_of_two_layers_at_most_are_alive():
    model = make_model(num_hidden_layers=6)
    weights = [p for p in model.model.layers[0].parameters() if p.dim() == 2]
    layer = sum(2 * p.numel() for p in weights)
    policy = Policy(model, dtype=torch.bfloat16, checkpointing=True)
    with Copies({tuple(p.shape) for p in weights}) as copies:
        update(policy)
    assert layer <= copies.most <= 2 * layer
