"""LoRA: adapters beside the linear layers of a model, which train in place of its own weights.

A layer with an adapter computes W x + (alpha / rank) B A x. Engines that have weights of their own get the sum, and the
model that training started from is the same one with its adapters off.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.data.hub import base_name
from turnwise.learn.export import Export, gathered, rank_and_size
from turnwise.learn.merged import Adapted, Merged, check_merged, plain_name
from turnwise.pretrained import CausalLM, ChatTokenizer

NAME = "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in a file that peft reads."""
ADAPTER = f".{NAME}."
"""In the name of every weight of an adapter."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What adapters there are.

    Example:
        LoraSettings(rank=8, alpha=16.0, targets=("q_proj", "v_proj"))
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """Names of linear layers; none for all but the output layer."""


class Adapters:
    """The adapters of a model, put into it here; all its other weights are frozen. They begin as nothing."""

    def __init__(self, model: CausalLM, settings: LoraSettings, *, base: str, seed: int) -> None:
        """`base` is where the folder of a checkpoint finds the model without adapters."""
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer, LoraModel

        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets) or "all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        self.plain = {name: tensor.shape for name, tensor in model.state_dict().items()}
        """The shapes of all weights of the model without adapters."""
        with torch.random.fork_rng(devices=[]), no_hints():
            torch.manual_seed(seed)
            try:
                LoraModel(model, self.config, NAME)
            except ValueError as error:
                names = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers(model)}))
                raise ValueError(f"lora.targets: {error}; this model's linear layers are {names}") from None
        self.seed = seed
        self.layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self.adapted = {weight.name: weight for weight in adapted_weights(model)}
        """By the name that the weight has beside its adapter."""
        self.model = model

        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Give the adapters the values they begin with, which add nothing: A of every layer is drawn as peft draws it,
        B is zero. A rank draws them all and keeps its part, so that all begin alike whatever the number of ranks."""
        random = torch.Generator().manual_seed(self.seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_B." in name and not parameter.is_meta:
                parameter.zero_()
            elif ".lora_A." in name and not parameter.is_meta:
                drawn = torch.rand(parameter.shape, generator=random).mul_(2).sub_(1).div_(parameter.shape[-1] ** 0.5)
                parameter.copy_(part_of(drawn.to(parameter.dtype), parameter))

    @property
    def new_names(self) -> dict[str, str]:
        """Of the weights beside adapters, by their names in the model without adapters."""
        names = (name for name in self.model.state_dict() if ".lora_" not in name)
        return {plain_name(name): name for name in names if plain_name(name) != name}

    def check(self) -> None:
        """Refuse adapters that would not train, or that engines could not have; the model computes a few tokens."""
        check_merged(self.model, self.adapted, self.plain)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was without adapters. peft's own switch also changes what is trained, and must be turned by
        those who compute nothing."""
        for layer in self.layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer._disable_adapters = False

    def merged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of the plain model that computes the same, given all of the model's own."""
        return Merged(weights, self.adapted)

    def plain_names(self, weights: Iterable[str]) -> dict[str, str]:
        """By the names of the model without adapters: those of its weights among the model's own."""
        return {plain_name(name): name for name in weights if ".lora_" not in name}

    def added(self, name: str, whole: Callable[[str], Tensor]) -> Tensor | None:
        """What the adapter of a weight adds to it, given what has the adapter's weights whole; None where it has none.
        Ranks call this together, and ask for adapters in the same order."""
        if (adapted := self.adapted.get(name)) is None:
            return None
        return adapted.added({parameter: whole(parameter) for parameter in adapted.parameters})

    def stage_export(self, tokenizer: ChatTokenizer) -> Export:
        """What peft reads: the adapters and what they are, from the first rank. All ranks call this together."""
        weights = gathered({name: p for name, p in self.parameters.items() if ".lora_" in name}, None)
        if rank_and_size()[0]:
            return Export({}, {}, ())
        named = {
            PREFIX + name.replace(ADAPTER, "."): tensor.to("cpu", copy=True).contiguous()
            for name, tensor in weights.items()
        }
        return Export({WEIGHTS: named}, {}, (self.config, tokenizer))


def part_of(whole: Tensor, like: Any) -> Tensor:
    """A tensor that all ranks have, divided among them as another is."""
    if not hasattr(like, "device_mesh"):
        return whole.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def adapted_weights(model: CausalLM) -> Iterator[Adapted]:
    """The weights that have adapters; a layer of a kind whose adapter is not a sum with a weight is refused."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Linear, ParamWrapper

    paths = {id(module): path for path, module in model.named_modules()}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = layer.get_base_layer()
        if not isinstance(layer, Linear | ParamWrapper):
            name = f"{path.rpartition('.')[2]} ({type(base).__name__})"
            raise ValueError(f"lora.targets: an adapter of {name} cannot be added to its weights; leave it out")
        parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        yield Adapted(path, layer, paths[id(base)], parameter)


@contextmanager
def no_hints() -> Iterator[None]:
    """Keep peft from saying that it has found out by itself how a layer holds its weight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to|.*_pattern keys did not match any targeted module")
        yield


def linear_layers(model: CausalLM) -> Iterator[str]:
    from transformers.pytorch_utils import Conv1D

    return (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D))


class WithoutAdapters:
    """A policy that scores as it did before it had adapters."""

    def __init__(self, policy: Any, adapters: Adapters) -> None:
        self.policy = policy
        self.adapters = adapters

    def passes(self, plan: Any) -> Iterator[Any]:
        own = plan if plan.routes is None else replace(plan, routes=None)  # the routes are those of the adapted model
        with self.adapters.off():
            yield from self.policy.passes(own)


# ---------------------------------------------------------------- folders


def base_of(folder: Path) -> Path | None:
    """The folder of the model that the adapters in a folder are for; None where it holds no adapters."""
    if not (folder / CONFIG).is_file():
        return None
    if (name := base_name(folder)) is not None:
        return name.located()
    base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
    return base if base.is_absolute() else folder / base


def add_adapters(model: CausalLM, folder: Path) -> CausalLM:
    """The model with the adapters of a folder added to its weights."""
    from peft import PeftModel

    if not (folder / WEIGHTS).is_file():  # or peft would look for a pickle, and elsewhere
        raise ValueError(f"{folder} has no {WEIGHTS}; restore it from a copy")
    with no_hints():
        merged: CausalLM = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return merged.requires_grad_(True)  # peft freezes what it is given
