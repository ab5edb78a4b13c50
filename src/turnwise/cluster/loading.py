"""Loading: a rank makes a model on the meta device, shards it there, and reads from its folder the parts that are its
own. No rank ever has more than its share of the weights and one layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from turnwise.data.catalogue import model_folder
from turnwise.learn.contents import check_contents
from turnwise.learn.masters import read_masters
from turnwise.learn.policy import no_progress_bars
from turnwise.pretrained import CausalLM, import_models

Place = Callable[[CausalLM], None]
"""Shards a model that has no weights yet."""


def load_sharded(
    path: str | Path,
    place: Place,
    dtype: torch.dtype = torch.float32,
    renamed: Mapping[str, str] = MappingProxyType({}),
    on_host: bool = False,
) -> CausalLM:
    """The model of a folder, its weights in a dtype and sharded by `place`. `renamed` has the names of weights that
    `place` gives other ones. With `on_host` the weights are left in the memory of the host."""
    import_models()
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    folder = model_folder(path)
    check_contents(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    plain = model_class(config)
    with no_progress_bars():
        made: Any = sharded_class(plain, place).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            distributed_config=DistributedConfig(),
            key_mapping={f"^{re.escape(name)}$": new_name for name, new_name in renamed.items()} or None,
        )
    made.__class__ = plain
    model: CausalLM = made
    del model.config.distributed_config  # transformers would gather the weights by it, to save them
    own_memory(model, on_host)
    if dtype is torch.float32:
        read_masters(folder, model)
    return model


def model_class(config: Any) -> type:
    """The class of causal language models that a config is for."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.auto_factory import _get_model_class

    found: type = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    return found


def sharded_class(plain: Any, place: Place) -> Any:
    """A class of models that transformers loads as it loads any that is spread over ranks, but that `place` shards:
    transformers would take the model for the root of FSDP, and knows neither several copies nor experts that are spread
    wider than layers."""

    def prepare_distribute_model(cls: Any, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        # Without a map of devices transformers reserves no room for the whole model on one of them.
        return distributed_config, None, None

    def maybe_distribute_model(cls: Any, model: Any, distributed_config: Any, mesh_manager: None) -> Any:
        place(model)
        return model

    def _initialize_missing_keys(self: Any, is_quantized: bool) -> None:
        for name, parameter in self.named_parameters():
            if ".lora_" in name:
                parameter._is_hf_initialized = True  # by those who put adapters into the model
        plain._initialize_missing_keys(self, is_quantized)

    overridden = {
        "__module__": plain.__module__,
        "_keys_to_ignore_on_load_missing": [*(plain._keys_to_ignore_on_load_missing or ()), r"\.lora_"],
        "_initialize_missing_keys": _initialize_missing_keys,
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "maybe_distribute_model": classmethod(maybe_distribute_model),
    }
    return type(plain.__name__, (plain,), overridden)


@torch.no_grad()
def own_memory(model: CausalLM, on_host: bool = False) -> None:
    """Give a model memory of its own for its weights, one after the other, as `align` does, and not that of the file.
    Buffers go to where the weights are computed with."""
    device = next(model.parameters()).device
    for parameter in model.parameters():
        spread: Any = parameter
        part = spread._local_tensor
        spread._local_tensor = part.to("cpu", copy=True) if on_host else part.clone()  # as FSDP itself replaces it
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
