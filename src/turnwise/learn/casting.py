"""Casting: layers compute in another dtype than that of their weights, which stay as they are.

While it is on, each layer gets its inputs, and has its weights, in the compute dtype, for the time of its own forward
pass; so do the few modules outside of layers. This is what FSDP does for a model that is spread over ranks. Autocast is
not used: it casts what it knows, which the product of a mixture's experts is not, leaves what layers hand to each other
in float32, and keeps a copy of every layer's weights until the pass has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from turnwise.pretrained import CausalLM

Held = list[tuple[torch.nn.Module, str, torch.nn.Parameter]]
"""(module, name, parameter) of weights that others stand in for."""


class Casting:
    """Has a model compute in a dtype while it is on. Nothing of it stays with the model."""

    def __init__(self, model: CausalLM, dtype: torch.dtype) -> None:
        self.dtype = dtype
        layers = layers_of(model)
        inside = {id(module) for layer in layers for module in layer.modules()}
        head = model.get_output_embeddings()
        outside = [
            module
            for module in model.modules()
            if id(module) not in inside and module is not head and any(True for _ in module.parameters(recurse=False))
        ]
        self.tables = [module for module in outside if isinstance(module, torch.nn.Embedding)]
        """Of which few rows are used: these are cast, not the whole."""
        self.units = [*layers, *(module for module in outside if not isinstance(module, torch.nn.Embedding))]
        self.held: dict[int, Held] = {}
        """The weights of the units that compute now, by unit."""

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = [module.register_forward_hook(self.cast_output) for module in self.tables]
        for unit in self.units:
            handles.append(unit.register_forward_pre_hook(self.before, with_kwargs=True))
            handles.append(unit.register_forward_hook(self.after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """(of a pass, of a layer that is computed once more): for PyTorch's checkpointing."""
        return nullcontext(), self.on()

    def cast_output(self, module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.to(self.dtype)

    def before(self, unit: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        held: Held = []
        for module in unit.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    held.append((module, name, parameter))
        for module, name, parameter in held:
            module._parameters[name] = parameter.to(self.dtype)  # type: ignore[assignment]
        self.held[id(unit)] = held
        return self.cast(inputs), self.cast(named)

    def after(self, unit: torch.nn.Module, inputs: Any, output: Any) -> None:
        for module, name, parameter in self.held.pop(id(unit), ()):
            module._buffers.pop(name, None)  # where peft puts back what it took for a buffer
            module._parameters[name] = parameter

    def cast(self, value: Any) -> Any:
        """Floating-point tensors in the dtype, in tuples and dictionaries too."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if type(value) is tuple:
            return tuple(self.cast(each) for each in value)
        return {key: self.cast(each) for key, each in value.items()} if type(value) is dict else value


def layers_of(model: CausalLM) -> list[torch.nn.Module]:
    """The layers of a model: what transformers lists as not to be split. FSDP makes classes of their own of theirs."""
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in unsplit]
