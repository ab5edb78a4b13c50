"""The policy: a transformers causal language model that computes plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.learn.attention import NAME, PackedAttention, register
from turnwise.learn.head import token_logprobs
from turnwise.plan.plan import Plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Policy:
    """A model with float32 master weights, its compute dtype and its temperature."""

    def __init__(self, model: Any, *, dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> None:
        check_model(model.config)
        register()
        model.set_attn_implementation(NAME)
        model.train()
        self.model = model
        self.dtype = dtype
        self.temperature = temperature
        self.device = next(model.parameters()).device.type

    def logprobs(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """(logprobs [K], entropies [K]) of the plan's action tokens, turn after turn."""
        nodes, inverse = plan.unique_nodes
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = self.model.base_model(
                input_ids=self.tensor(plan.tokens).long()[None],
                position_ids=self.tensor(plan.depth).long()[None],
                use_cache=False,
                attend=PackedAttention(plan),
            ).last_hidden_state[0]
        # A token is predicted by the hidden state of the token before it.
        chosen = hidden.index_select(0, self.tensor(plan.parent[nodes]).long()).to(self.dtype)
        head = self.model.get_output_embeddings().weight
        logprobs, entropies = token_logprobs(chosen, head, self.tensor(plan.tokens[nodes]).long(), self.temperature)
        place = self.tensor(inverse)
        return logprobs[place], entropies[place]

    def tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array).to(self.device)


def check_model(config: Any) -> None:
    """Refuse, with the reason, what cannot be computed exactly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"this model has {', '.join(sorted(kinds))} layers; only full attention is supported")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError("this model has attention_dropout > 0; set it to 0 in its config.json")
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", None), ("logits_scaling", 1.0)):
        if getattr(config, name, neutral) not in (neutral, 1.0, None):
            raise ValueError(f"this model scales its logits ({name}), which is not supported yet")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over a run's own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def load_model(path: str | Path) -> Any:
    """A causal language model from a folder, in float32."""
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def load_tokenizer(path: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def pick_device(name: str) -> str:
    """The device a recipe asks for; auto takes cuda, then mps, then cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in available.items() if there)
    if not available[name]:
        raise ValueError(f'model.device = "{name}" is not available here; set model.device = "auto"')
    return name
