"""Models whose weights have shapes and no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from turnwise.cluster.loading import Place
from turnwise.preflight.model_config import config_at
from turnwise.pretrained import import_models


class NoTokenizer:
    """In the place of a tokenizer, of which every other has the same vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return {}


NO_TOKENIZER: Any = NoTokenizer()


def blank(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a config on the meta device."""
    import_models()
    from transformers import AutoModelForCausalLM

    with unset_fake_temporarily(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def filled(model: Any) -> Any:
    """A model with memory for what it has on the meta device: of a model that is spread, this rank's share."""
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return model.to_empty(device="cpu")
    made: dict[int, Any] = {}
    for module in model.modules():
        for held, kind in ((module._parameters, torch.nn.Parameter), (module._buffers, torch.Tensor)):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    blank_one = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = (
                        torch.nn.Parameter(blank_one, tensor.requires_grad) if kind is torch.nn.Parameter else blank_one
                    )
                held[name] = None if tensor is None else made[id(tensor)]
    return model


class BlankLoading:
    """In the place of what reads weights from a folder. A path that is not the policy's has a config of its own."""

    def __init__(self, config: Any, policy: str) -> None:
        self.config = config
        self.policy = policy

    def model_on_meta(self, path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
        own = str(path) in (self.policy, str(Path(self.policy)))
        return blank(self.config if own else config_at(str(path)).config, dtype)

    def load_sharded(
        self,
        path: str | Path,
        place: Place,
        dtype: torch.dtype = torch.float32,
        renamed: Any = None,
        on_host: bool = False,
    ) -> Any:
        model = self.model_on_meta(path, dtype)
        place(model)
        return filled(model)
