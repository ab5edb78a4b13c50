"""A model as transformers computes it: padded rows, its own attention, whole logits. Plans are measured against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.learn.routers import ARGUMENT, Routers
from turnwise.learn.softmax import NEVER
from turnwise.plan.routes import settle_routes
from turnwise.plan.rows import Rows, length, pad
from turnwise.pretrained import CausalLM
from turnwise.types import Turn

LOGITS = 1 << 26
"""Elements of whole logits at a time."""


@contextmanager
def stock_attention(model: CausalLM) -> Iterator[None]:
    """The model with the attention that transformers ships; sinks have the slower one only."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def stock_passes(
    model: CausalLM, turns: Sequence[Turn], tokens_per_pass: int, temperature: float, routers: Routers | None = None
) -> Iterator[tuple[Rows, Tensor, Tensor, Tensor]]:
    """(which turns, logprobs and entropies of all their action tokens, turn after turn, the logprobs of all tokens in
    their places) of every padded batch.

    The model must have its own attention meanwhile, also while what is made of a pass is differentiated. With its
    routers given, they take the experts that the turns name.
    """
    routes = None if routers is None else settle_routes(turns)
    for rows in pad(turns, min(tokens_per_pass, LOGITS // model.config.get_text_config().vocab_size)):
        tokens, mask = (torch.from_numpy(array) for array in rows.fill_in(turns))
        more: dict[str, Any] = {}
        if routers is not None and routes is not None:
            of_rows = routes.of_tokens([(int(turn), 0, rows.width) for turn in rows.turns])
            more = {ARGUMENT: routers.replayed(of_rows, 0, rows.num_tokens, model.device.type)}
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **more).logits
        places = [
            (row, place)
            for row, turn in enumerate(rows.turns)
            for place in range(len(turns[turn].prompt), length(turns[turn]))
        ]
        row, place = torch.tensor(places).T
        # A token is predicted by the token before it.
        chosen_logits = logits[row, place - 1]
        scaled = chosen_logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        allowed = allowed_tokens([turns[turn] for turn in rows.turns], scaled.shape[1])
        chosen = scaled.masked_fill(~allowed, NEVER).log_softmax(-1)
        logprobs = chosen.gather(1, tokens[row, place][:, None])[:, 0]
        yield rows, logprobs, -(chosen.exp() * chosen).sum(-1), chosen


def allowed_tokens(turns: Sequence[Turn], vocabulary: int) -> Tensor:
    """[K, V] whether each token could be drawn at each action token of some turns, turn after turn."""
    parts = [
        np.ones((len(turn.action), vocabulary), bool) if turn.allowed is None else turn.allowed.dense(vocabulary)
        for turn in turns
    ]
    return torch.from_numpy(np.concatenate(parts))


def in_float64(model: CausalLM) -> bool:
    """Make a model ready to compute in float64; whether all of it will, or norms or routers go through float32."""
    experts = model._can_set_experts_implementation()
    if experts:
        model.set_experts_implementation("eager")  # the others have no kernels for it
    return exact_norms(model) and not experts


def exact_norms(model: CausalLM) -> bool:
    """Let a model's RMS norms compute in the dtype they are given, where transformers goes through float32.

    False where one has another formula than the usual: it is left as it is, and float64 is then no better inside it
    than float32.
    """
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    usual = [norm for norm in norms if is_usual(norm)]
    for norm in usual:
        norm.forward = MethodType(rms_norm, norm)
    return len(usual) == len(norms)


@torch.no_grad()
def is_usual(norm: Any) -> bool:
    """Whether a norm computes what `rms_norm` does, up to rounding."""
    if not hasattr(norm, "weight") or not hasattr(norm, "variance_epsilon"):
        return False
    given = torch.linspace(-1.0, 1.0, len(norm.weight), dtype=norm.weight.dtype)
    return torch.allclose(norm(given), rms_norm(norm, given), rtol=1e-4, atol=1e-6)


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    out: Tensor = norm.weight * scaled
    return out
