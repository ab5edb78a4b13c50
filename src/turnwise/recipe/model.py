"""The policy and its adapters."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class ModelConfig(Section):
    """The policy. Open it when the model is a mixture of experts."""

    in_short_list = ("path", "hidden", "layers", "dtype", "device", "threads", "gradient_checkpointing")

    path: str = "tiny"
    """A folder that transformers can load, a name of the Hugging Face Hub, for instance "Qwen/Qwen3-0.6B" or
    "Qwen/Qwen3-0.6B@main", a model that `turnwise data` has fetched, for instance "smollm2-135m", or "tiny": a model
    and tokenizer built by code."""
    hidden: int = Field(128, ge=8)
    """Width of the tiny model."""
    layers: int = Field(4, ge=1)
    """Depth of the tiny model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of computations; master weights and optimizer state are float32 either way."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the model and the engine; auto takes cuda where there is a GPU, and cpu otherwise."""
    threads: int = Field(0, ge=0)
    """CPU threads per model; 0 takes all cores, half of them when generation and training overlap, and one for a tiny
    model, whose kernels end before a second thread has started."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Whether the backward pass computes each layer again instead of keeping its activations: less memory, more time,
    the same result. auto does so on GPUs, if the model can."""
    router_replay: bool = False
    """Whether the engine records which experts of a mixture each token took, and the learner takes the same. Rounding
    and newer weights then change how much an expert counts, and not which ones compute."""

    @model_validator(mode="after")
    def only_tiny_has_a_size(self) -> Self:
        if self.path != "tiny" and {"hidden", "layers"} & set(self.changed):
            raise ValueError(
                "hidden and layers size the tiny model only; remove them (on the command line: model.hidden= "
                'model.layers=) or set path = "tiny"'
            )
        return self


class LoraConfig(Section):
    """LoRA adapters, which train while the model's weights stay frozen. A warm start trains all weights before."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 for none."""
    alpha: float = Field(32.0, gt=0)
    """The output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, for instance q_proj; empty for all but the output layer."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.rank and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a rank")
        return self
