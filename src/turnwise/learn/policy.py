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
        check_model(model)
        register()
        model.train()
        self.model = model
        self.dtype = dtype
        self.temperature = temperature
        self.device = next(model.parameters()).device.type
        check_packing(model)

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

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An array on the policy's device, converted before it goes there: not every device has every dtype."""
        return torch.as_tensor(array).to(dtype).to(self.device)


def check_model(model: Any) -> None:
    """Refuse, with the reason, what is known not to be computed exactly."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"this model has {', '.join(sorted(kinds))} layers; only full attention is supported")
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        raise ValueError("this model attends through a sliding window; set sliding_window to null in its config.json")
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ValueError(f"this model rescales its logits ({name}), which is not supported")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ValueError(
            f"this model's positions ({rope} rope) depend on the longest row, so packing would change them"
        )
    if getattr(config, "attention_dropout", 0.0) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
    ):
        raise ValueError("this model has dropout; set every dropout in its config.json to 0")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("this model's output layer has a bias, which is not supported")


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Refuse an architecture whose packed pass differs from its own: two short rows are computed both ways."""
    rows = torch.arange(12, device=next(model.parameters()).device).reshape(2, 6) % model.config.vocab_size
    model.set_attn_implementation("sdpa")
    apart = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    plan = Plan.of_chains(rows.cpu().numpy())
    model.set_attn_implementation(NAME)
    places = torch.arange(6, device=rows.device).repeat(2)[None]
    packed = model.base_model(
        input_ids=rows.reshape(1, -1), position_ids=places, use_cache=False, attend=PackedAttention(plan)
    ).last_hidden_state
    difference = float((apart.reshape(packed.shape) - packed).abs().max() / apart.abs().max())
    if not difference < 1e-3:
        raise ValueError(
            f"{type(model).__name__} computes something else when rows are packed (relative difference "
            f"{difference:.1e}), so it cannot be trained exactly"
        )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over a run's own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
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
