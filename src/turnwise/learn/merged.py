"""Merged weights: those of a plain model that computes what a model with adapters does.

What is added to a weight is computed by peft, which knows how each kind of layer holds its weight: as it is, turned
round, or all experts in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.learn.attention import NAME, attention_of, states_of
from turnwise.learn.model_checks import ROWS, short_turns
from turnwise.learn.row_states import row_states
from turnwise.plan.pack import pack
from turnwise.pretrained import CausalLM

TRIAL = 0.1
"""How large what adapters add is in the trial, relative to the weights it is added to."""
TOLERANCE = 1e-3
"""Of logprobs. Rounding in float32 stays well below, another sum well above."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A weight with an adapter.

    Example:
        Adapted("model.layers.0.mlp.experts.base_layer", layer, "model.layers.0.mlp.experts.base_layer.base_layer",
                "gate_up_proj")
    """

    path: str
    """Of the adapter's layer in the model."""
    layer: Any
    base: str
    """Of the layer that has the weight: adapters of two weights of one layer stand one around the other."""
    parameter: str

    @property
    def name(self) -> str:
        """Of the weight, in the model with adapters."""
        return f"{self.base}.{self.parameter}"

    @property
    def parameters(self) -> list[str]:
        """The names of the adapter's own weights, in the same order everywhere."""
        return sorted(f"{self.path}.{name}" for name, _ in self.layer.named_parameters() if name.startswith("lora_"))

    def added(self, weights: Mapping[str, Tensor]) -> Tensor:
        """What the adapter among these weights adds."""
        inside = len(self.path) + 1
        parameters = {f"layer.{name[inside:]}": weights[name] for name in self.parameters}
        with torch.no_grad():
            added: Tensor = torch.func.functional_call(Added(self.layer), parameters, ())
        return added


class Added(torch.nn.Module):
    """Calls peft's own function of a layer, whose weights may be others than the layer's: a rank has parts of them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        [name] = self.layer.active_adapters
        added: Tensor = self.layer.get_delta_weight(name)
        return added


class Merged(Mapping[str, Tensor]):
    """The weights of a plain model, each added up when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor], adapted: Mapping[str, Adapted]) -> None:
        """`adapted` by the name of the weight in the model with adapters."""
        self.weights = weights
        self.adapted = adapted
        self.names_with_adapters = {plain_name(name): name for name in weights if ".lora_" not in name}

    def __getitem__(self, name: str) -> Tensor:
        name_with_adapters = self.names_with_adapters[name]
        weight = self.weights[name_with_adapters]
        if name_with_adapters not in self.adapted:
            return weight
        return weight + self.adapted[name_with_adapters].added(self.weights).to(weight.device, weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names_with_adapters)

    def __len__(self) -> int:
        return len(self.names_with_adapters)


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


# ---------------------------------------------------------------- whether it is the same


def check_merged(model: CausalLM, adapted: Mapping[str, Adapted], plain: Mapping[str, torch.Size]) -> None:
    """Refuse adapters that cannot be merged, or do not train: they get values for the time of a trial, in which the
    model computes a few tokens with them and with the weights that would be published. `plain` has the shapes of all
    weights of the model without adapters."""
    merged = Merged(model.state_dict(), adapted)
    shapes = {name: merged[name].shape for name in merged}
    if shapes != plain:
        odd = sorted(name for name in shapes.keys() | plain.keys() if shapes.get(name) != plain.get(name))
        raise ValueError(f"lora.targets: an adapter cannot be added to the weights of {odd[0]}; leave it out")
    with trial_values(model, adapted):
        check_gradients(model, adapted)
        with torch.no_grad():
            wanted = logprobs_of(model)
            with merged_in_place(model, adapted):
                found = logprobs_of(model)
    off = float((found - wanted).abs().max())
    if not off <= TOLERANCE:
        raise ValueError(
            f"lora.targets: the model with adapters and the one with the same added to its weights differ by {off:.1e} "
            f"in logprobs, so that engines would sample from another model; choose other layers"
        )


def check_gradients(model: CausalLM, adapted: Mapping[str, Adapted]) -> None:
    """Refuse layers whose adapters have no part in what is trained. By kind: a layer of one expert among many may have
    no token."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(logprobs_of(model).sum(), list(parameters.values()), allow_unused=True)
    trained = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    kinds: dict[str, bool] = {}
    for weight in adapted.values():
        kind = plain_name(weight.name).removesuffix(".weight").rpartition(".")[2]
        kinds[kind] = kinds.get(kind, False) or any(name.startswith(f"{weight.path}.lora_") for name in trained)
    for kind, trains in kinds.items():
        if not trains:
            raise ValueError(f"lora.targets: an adapter of {kind} would never get a gradient; leave it out")


@contextmanager
def trial_values(model: CausalLM, adapted: Mapping[str, Adapted]) -> Iterator[None]:
    """Adapters that add something noticeable, until they are again what they were, bit for bit."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}
    parameters = dict(model.named_parameters())
    random = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name in kept:
                drawn = torch.randn(parameters[name].shape, generator=random)
                parameters[name].copy_(drawn)
            weights = model.state_dict()
            for weight in adapted.values():
                size = weight.added(weights).square().mean().sqrt()
                wanted = TRIAL * weights[weight.name].square().mean().sqrt() or TRIAL
                for name in kept:
                    if name.startswith(f"{weight.path}.lora_B."):
                        parameters[name].mul_(wanted / size)
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)


@contextmanager
def merged_in_place(model: CausalLM, adapted: Mapping[str, Adapted]) -> Iterator[None]:
    """The model with its adapters off and the weights that would be published instead: each layer has them while it
    computes, so that there is one such copy at a time."""
    merged = Merged(model.state_dict(), adapted)
    handles = []

    def put(adapted_weight: Adapted) -> Any:
        def before(layer: Any, _: Any) -> None:
            layer._disable_adapters = True
            parameter = getattr(layer.get_base_layer(), adapted_weight.parameter)
            parameter.data = merged[plain_name(adapted_weight.name)]

        return before

    def take(adapted_weight: Adapted) -> Any:
        def after(layer: Any, *_: Any) -> None:
            layer._disable_adapters = False
            parameter = getattr(layer.get_base_layer(), adapted_weight.parameter)
            parameter.data = merged.weights[adapted_weight.name]

        return after

    for adapted_weight in adapted.values():
        handles += [adapted_weight.layer.register_forward_pre_hook(put(adapted_weight))]
        handles += [adapted_weight.layer.register_forward_hook(take(adapted_weight), always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logprobs_of(model: CausalLM) -> Tensor:
    """Logprobs of all tokens after those of a few short turns, in the dtype of the weights."""
    turns = short_turns(model.config.get_text_config().vocab_size)
    [plan] = pack(turns, ROWS.size)
    [stretch] = plan.stretches
    if model.config._attn_implementation == NAME:
        states = states_of(model, plan, stretch, attention_of(plan, stretch, model.device.type))
    else:
        states = row_states(model, plan)
    logits: Tensor = states @ model.get_output_embeddings().weight.T
    return logits.log_softmax(-1)
