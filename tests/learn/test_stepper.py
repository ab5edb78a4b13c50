"""One step of every optimizer: that of the package it is from, clipped, skipped where it is not finite, restored."""

import math

import pytest
import torch

from turnwise.learn.optimizers import OPTIMIZERS, OptimizerSettings, has_blocks
from turnwise.learn.snapshot import names_in, read_snapshot, write_snapshot
from turnwise.learn.stepper import Stepper

NAMES = list(OPTIMIZERS)
SHAPES = {
    "model.embed_tokens.weight": (64, 256),
    "model.layers.0.mlp.up_proj.weight": (48, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 48),
    "model.layers.1.experts.gate_up_proj": (2, 16, 256),
    "model.norm.weight": (256,),
}
RATE = 0.01


@pytest.fixture(autouse=True)
def _without_compiling():
    """torchao compiles its step, which takes minutes here and computes the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(named, update):
    generator = torch.Generator().manual_seed(100 + update)
    for place, parameter in enumerate(named.values()):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**-place


def stepper(name, named, **how):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    settings = OptimizerSettings(RATE, (0.8, 0.95), 0.1, **{"clip_norm": 1e9, **how}, name=name)
    return Stepper(named.items(), settings, lambda update: 1.0 / (1 + update))


def walk(stepper, named, updates):
    for update in updates:
        gradient(named, update)
        stepper.step(True, False)


def own(name, named):
    """The optimizers of the packages, as their own documents have one make them."""
    adamw = {"lr": RATE, "betas": (0.8, 0.95), "weight_decay": 0.1}
    if name == "adamw":
        return [torch.optim.AdamW(named.values(), **adamw, fused=True)]
    if name == "muon":
        matrices = [named[f"model.layers.0.mlp.{which}_proj.weight"] for which in ("up", "down")]
        others = [parameter for parameter in named.values() if all(parameter is not matrix for matrix in matrices)]
        how = {"lr": RATE, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        return [torch.optim.Muon(matrices, **how), torch.optim.AdamW(others, **adamw, fused=True)]
    from torchao.optim import AdamW8bit

    large = [parameter for parameter in named.values() if parameter.shape[-1] == 256 and parameter.numel() >= 4096]
    assert len(large) == 3
    others = [parameter for parameter in named.values() if all(parameter is not one for one in large)]
    return [AdamW8bit(large, **adamw), torch.optim.AdamW(others, **adamw, fused=True)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_the_package(name):
    ours, theirs = parameters(), parameters()
    stepped = stepper(name, ours)
    wanted = own(name, theirs)
    walk(stepped, ours, range(3))
    for update in range(3):
        gradient(theirs, update)
        for optimizer in wanted:
            for group in optimizer.param_groups:
                rate = RATE / (1 + update)
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
            optimizer.step()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    start = parameters()
    assert all((ours[key] - start[key]).abs().max() > 1e-3 for key in ours)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_or_idle_changes_nothing(name):
    named = parameters()
    stepped = stepper(name, named)
    walk(stepped, named, range(1))
    before = {key: parameter.detach().clone() for key, parameter in named.items()}
    kept = {key: value.clone() for key, value in stepped.state().items() if "/" in key}
    for broken in (math.nan, math.inf):
        gradient(named, 1)
        named["model.norm.weight"].grad[7] = broken
        assert stepped.step(True, False)["skipped"] == 1.0
    gradient(named, 1)
    assert stepped.step(False, False)["skipped"] == 1.0
    assert stepped.num_skipped_in_a_row == 3
    gradient(named, 1)
    assert stepped.step(True, True)["idle"] == 1.0
    assert all(torch.equal(parameter, before[key]) for key, parameter in named.items())
    assert all(torch.equal(value, kept[key]) for key, value in stepped.state().items() if "/" in key)
    assert stepped.num_updates == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_clipped_before_it_is_stepped(name):
    """A step along a gradient that is clipped is one along what it is clipped to."""
    clipped, small = parameters(), parameters()
    first, second = stepper(name, clipped, clip_norm=0.5), stepper(name, small)
    gradient(clipped, 0)
    norm = first.step(True, False)["gradient_norm"]
    assert norm > 0.5
    gradient(small, 0)
    for parameter in small.values():
        parameter.grad.mul_(torch.clamp(torch.tensor(0.5 / (norm + 1e-6)), max=1.0))
    second.step(True, False)
    for key in clipped:
        torch.testing.assert_close(clipped[key], small[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_one_goes_on_bit_for_bit(tmp_path, name):
    named = parameters()
    stepped = stepper(name, named)
    walk(stepped, named, range(3))
    write_snapshot(tmp_path, stepped.state())
    again = {key: torch.nn.Parameter(parameter.detach().clone()) for key, parameter in named.items()}
    restored = stepper(name, again)
    room = restored.blank(names_in(tmp_path))
    read_snapshot(tmp_path, room)
    restored.restore(room)
    assert restored.num_updates == 3
    walk(stepped, named, range(3, 6))
    walk(restored, again, range(3, 6))
    assert [key for key in named if not torch.equal(named[key], again[key])] == []


def test_moments_of_eight_bits_take_a_quarter(tmp_path):
    named = parameters()
    stepped = stepper("adamw_8bit", named)
    walk(stepped, named, range(1))
    of = lambda parameter: {key: value for key, value in stepped.state().items() if key.endswith(f"/{parameter}")}
    large = of("model.embed_tokens.weight")
    assert {key.partition("/")[0]: (value.dtype, tuple(value.shape)) for key, value in large.items()} == {
        "step": (torch.float32, ()),
        "exp_avg.codes": (torch.uint8, (64, 256)),
        "exp_avg.scale": (torch.float32, (64, 1)),
        "exp_avg_sq.codes": (torch.uint8, (64, 256)),
        "exp_avg_sq.scale": (torch.float32, (64, 1)),
    }
    assert of("model.layers.0.mlp.down_proj.weight").keys() == {
        f"{key}/model.layers.0.mlp.down_proj.weight" for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert not has_blocks(torch.zeros(8, 256))
    assert not has_blocks(torch.zeros(()))


@pytest.mark.parametrize(("wrote", "reads"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_refused_in_one_line(wrote, reads):
    named = parameters()
    stepped = stepper(wrote, named)
    walk(stepped, named, range(1))
    other = stepper(reads, parameters())
    with pytest.raises(ValueError, match="written by another optimizer; set optimizer.name as it was") as refused:
        other.restore(stepped.state())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reads", ["adamw", "adamw_8bit"])
def test_moments_of_eight_bits_become_those_of_float32_and_back(reads):
    """As where ranks divide a weight so that rows have no whole blocks any more."""
    pytest.importorskip("torchao")
    wrote = "adamw_8bit" if reads == "adamw" else "adamw"
    named = parameters()
    stepped = stepper(wrote, named)
    walk(stepped, named, range(2))
    other = stepper(reads, parameters())
    other.restore(stepped.state())
    key = "exp_avg/model.embed_tokens.weight"
    if reads == "adamw":
        [quantized] = [each for each in stepped.optimizers if type(each).__name__ == "AdamW8bit"]
        moment = quantized.state[named["model.embed_tokens.weight"]]["exp_avg"]
        assert torch.equal(other.state()[key], moment.dequantize())
    else:
        again = stepper("adamw", parameters())
        again.restore(other.state())
        wanted = stepped.state()[key]
        assert 0 < (again.state()[key] - wanted).abs().max() <= 0.02 * wanted.abs().max()
