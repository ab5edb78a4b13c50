"""LoRA: adapters beside the linear layers of a model, which train in place of its own weights.

A layer with an adapter computes W x + (alpha / rank) B A x. Engines that have weights of their own get the sum, and the
model that training started from is the same one with its adapters off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "policy"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name in a file that peft reads."""
WRAPPED, FIRST, SECOND = ".base_layer.weight", f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"


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

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapters:
    """The adapters of a model, put into it here; all its other weights are frozen. They begin as nothing."""

    def __init__(self, model: Any, settings: LoraSettings, *, base: str, seed: int) -> None:
        """`base` is where the folder of a checkpoint finds the model without adapters."""
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer, LoraModel

        self.settings = settings
        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets) or "all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                LoraModel(model, self.config, NAME)
            except ValueError as error:
                linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
                names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                raise ValueError(f"lora.targets: {error}; this model's linear layers are {names}") from None
        self.layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self.model = model

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
        return Merged(weights, self.settings.scale)

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write what peft reads: the adapters among these weights, and what they are."""
        from safetensors.torch import save_file

        found = {name: tensor for name, tensor in weights.items() if name.endswith((FIRST, SECOND))}
        named = {PREFIX + name.replace(f".{NAME}.", "."): tensor.contiguous() for name, tensor in found.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        self.config.save_pretrained(folder)


class Merged(Mapping[str, Tensor]):
    """The weights of a plain model, each added up when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor], scale: float) -> None:
        self.weights = weights
        self.scale = scale
        self.own = {plain_name(name): name for name in weights if ".lora_" not in name}

    def __getitem__(self, name: str) -> Tensor:
        own = self.own[name]
        weight = self.weights[own]
        if not own.endswith(WRAPPED):
            return weight
        first, second = (self.weights[own.removesuffix(WRAPPED) + end] for end in (FIRST, SECOND))
        return weight + self.scale * (second @ first)

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


def plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


class WithoutAdapters:
    """A policy that scores as it did before it had adapters."""

    def __init__(self, policy: Any, adapters: Adapters) -> None:
        self.policy = policy
        self.adapters = adapters

    def passes(self, plan: Any) -> Iterator[Any]:
        with self.adapters.off():
            yield from self.policy.passes(plan)


# ---------------------------------------------------------------- folders


def base_of(folder: Path) -> Path | None:
    """The folder of the model that the adapters in a folder are for; None where it holds no adapters."""
    if not (folder / CONFIG).is_file():
        return None
    base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
    return base if base.is_absolute() else folder / base


def add_adapters(model: Any, folder: Path) -> Any:
    """The model with the adapters of a folder added to its weights."""
    from safetensors.torch import load_file

    settings = json.loads((folder / CONFIG).read_text())
    # Copies: where a tensor lies in a file decides how its products are rounded, see `align`.
    found = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, second in found.items():
            if name.endswith(".lora_B.weight"):
                layer = name.removesuffix(".lora_B.weight")
                first = found[f"{layer}.lora_A.weight"]
                own[f"{layer}.weight"] += settings["lora_alpha"] / settings["r"] * (second @ first)
    return model
