"""The disturbance: a change of weights that can be seen in what a model says, and be taken back exactly.

There are two kinds. Flips turn the signs of some numbers of a tensor, and the model says something else; the more
numbers, the more so, and the more does the rounding of low precision show as well. A mirror turns all signs of tensors
whose signs cancel out, so that the model says the same as before, to the last bit: rounding shows no more than before,
while one tensor that is left behind is as wrong as can be. Mirrors are made for models built like Llama, and for
mixtures of experts that are; who uses one looks whether it is one for the model at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.learn.merged import plain_name
from turnwise.pretrained import CausalLM

STRIDE = 7
"""Every seventh number of a tensor changes: enough to be seen, and in another column of each row."""
OF_ZEROS = 0.1
"""What these become in a tensor that has nothing but zeros."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Layers whose signs cancel out, by the last parts of their names."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]

    def has(self, layer: str, kind: str) -> bool:
        return layer in (self.biases if kind == "bias" else self.weights)


MIRRORS = {
    # All hidden states are turned, and the output layer turns them back.
    "stream": Mirror(
        tuple(
            "embed_tokens lm_head input_layernorm post_attention_layernorm q_proj k_proj v_proj up_proj "
            "experts.down_proj".split()
        ),
        tuple("q_proj k_proj v_proj o_proj up_proj down_proj experts.down_proj".split()),
    ),
    # What a layer adds to them stays the same. In a mixture a router that is left behind takes the experts with the
    # lowest scores.
    "layers": Mirror(
        tuple(
            "v_proj o_proj post_attention_layernorm gate_proj down_proj q_norm k_norm "
            "gate router shared_expert_gate experts.gate_up_proj".split()
        ),
        ("v_proj", "up_proj"),
    ),
    "queries": Mirror(("q_proj", "k_proj"), ("q_proj", "k_proj")),
    "values": Mirror(("v_proj", "o_proj"), ("v_proj",)),
    "gated": Mirror(("up_proj", "down_proj"), ("up_proj",)),
}
LAST = re.compile(r"(\w+)\.(weight|bias|lora_A\.\w+\.weight|lora_B\.\w+\.weight)$")
OF_EXPERTS = re.compile(r"experts\.(gate_up_proj|down_proj)(_bias)?$")
"""All experts of a layer in one tensor, as transformers has them."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is changed.

    Example:
        Change("stream")                         all signs of the tensors of a mirror
        Change(spared=("stream",), stride=28)    every 28th sign of all tensors that the mirror has not
        Change(kind="model.layers.*.mlp.gate.weight")    every 7th sign of the tensors of a kind, in all layers
    """

    mirror: str = ""
    """Its name; empty for flips."""
    spared: tuple[str, ...] = ()
    """Mirrors that have been seen to work: flips leave their tensors, and a mirror that has no others is not used."""
    stride: int = STRIDE
    """Flips change every so many numbers."""
    kind: str = ""
    """Flips change only tensors of this kind; empty for all."""


class Disturbance:
    """A model whose weights have changed, from when this is made until it is undone. Signs flip, which loses no bit and
    needs no copy of the model.

    Example:
        disturbance = Disturbance(model, Change())
        ...
        disturbance.undo()
    """

    def __init__(self, model: CausalLM, change: Change) -> None:
        self.model = model
        self.change = change
        self.zeros: set[str] = set()
        """Names of the tensors that had nothing but zeros."""
        shown = {name for _, name, numbers in self.numbers() if is_in(change.spared, name, numbers)}
        self.names = {name for _, name, _ in self.numbers() if self.takes(name, name in shown)}
        """Of the tensors that change."""
        seen = {
            name for _, name, numbers in self.numbers() if not change.mirror or is_in([change.mirror], name, numbers)
        }
        self.num_new = len(self.names & seen - shown)
        with torch.no_grad():
            for place, name, numbers in self.numbers():
                if name not in self.names:
                    continue
                if change.mirror:
                    numbers.neg_()
                elif numbers.any():
                    self.some(place, numbers).neg_()
                else:
                    self.zeros.add(name)
                    some = self.some(place, numbers)
                    some.copy_(torch.full_like(some, OF_ZEROS).copysign_(some))

    def takes(self, name: str, shown: bool) -> bool:
        """Whether a tensor changes, of which a spared mirror has shown that it arrives, or has not."""
        if not self.change.mirror:
            return not shown and (not self.change.kind or kind_of(name) == self.change.kind)
        layer, kind = last_of(name)
        return kind != "lora_B" and MIRRORS[self.change.mirror].has(layer, kind)

    def undo(self) -> None:
        """Make all weights what they were, bit for bit."""
        with torch.no_grad():
            for place, name, numbers in self.numbers():
                if name not in self.names:
                    continue
                if self.change.mirror:
                    numbers.neg_()
                elif name in self.zeros:
                    self.some(place, numbers).mul_(0)  # which keeps the signs that zeros have too
                else:
                    self.some(place, numbers).neg_()

    def some(self, place: int, numbers: Tensor) -> Tensor:
        return numbers[place % min(self.change.stride, len(numbers)) :: self.change.stride]

    def numbers(self) -> Iterator[tuple[int, str, Tensor]]:
        """(place, name, numbers) of each tensor that is published, or of this rank's part of it; tied ones once."""
        model = self.model
        published = model.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in published)
        # Sorted: peft takes weights of experts out of a layer and puts them back at the end.
        for place, (name, tensor) in enumerate(sorted([*model.named_parameters(), *buffers], key=lambda pair: pair[0])):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.is_floating_point() and local.numel():
                yield place, name, local.detach().view(-1)


def kind_of(name: str) -> str:
    """The name of a tensor without the numbers of its layer and of its expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", plain_name(name))


def last_of(name: str) -> tuple[str, str]:
    """(layer, kind of its tensor): ("q_proj", "bias") of model.layers.0.self_attn.q_proj.bias. With an adapter, the
    signs of a weight are those of its own and of the adapter's first half."""
    if experts := OF_EXPERTS.search(plain_name(name)):
        return f"experts.{experts[1]}", "bias" if experts[2] else "weight"
    found = LAST.search(plain_name(name))
    return (found[1], found[2].partition(".")[0]) if found else (name, "")


def is_in(mirrors: Iterable[str], name: str, numbers: Tensor) -> bool:
    """Whether one of the mirrors has shown a tensor; zeros, which have no sign to be seen, are shown by none."""
    layer, kind = last_of(name)
    of_adapter = kind in ("lora_A", "lora_B")
    return any(MIRRORS[mirror].has(layer, kind) for mirror in mirrors) and (of_adapter or bool(numbers.any()))
