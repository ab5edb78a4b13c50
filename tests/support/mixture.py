"""Tiny mixtures of experts of the kinds that transformers has, and turns with routes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.making import VOCABULARY
from turnwise.learn.router_checks import known_routers, small_pass
from turnwise.learn.routers import RecordedRoutes
from turnwise.learn.tiny import build_tokenizer
from turnwise.plan.pack import pack
from turnwise.pretrained import import_models

NUM_EXPERTS = 8
GROUPED = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "minimax_m2": {},
    "glm4_moe": GROUPED,
    "dots1": GROUPED,
    "glm4_moe_lite": {**GROUPED, **LATENT},
    "ernie4_5_moe": {"moe_num_experts": NUM_EXPERTS, "moe_k": 2},
    "hunyuan_v1_moe": {"moe_topk": 2},
}
"""Architectures with what their configurations need beside the usual."""


def tiny_mixture(kind: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Any:
    """A random mixture whose experts are far apart, so that a wrong one shows."""
    import_models()
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(kind, **{**usual, **KINDS.get(kind, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.25)
    return model


def mixture_folder(folder: Path, seed: int = 0) -> Path:
    """A folder with a small mixture and a tokenizer, that a recipe can name."""
    tokenizer = build_tokenizer(["get amber", "go cedar", "answer birch", "amber: cedar\n"])
    model = tiny_mixture(seed=seed, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class OwnRoutes:
    """The routes that a model chooses for the tokens of a turn, in a pass of its own."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)
        self.routers = known_routers(self.model)

    @torch.no_grad()
    def of(self, turn: Any) -> Any:
        """[tokens, layers, k]"""
        [plan] = pack([replace(turn, routes=None)], len(turn.prompt) + len(turn.action))
        routes = RecordedRoutes()
        small_pass(self.model, plan, routes)
        return routes.array(self.routers.num_experts)


def with_own_routes(model: Any, turns: Any) -> list[Any]:
    """The turns with the routes of all their tokens but the last, as the model chooses them."""
    own = OwnRoutes(model)
    return [replace(turn, routes=own.of(turn)[:-1]) for turn in turns]


def with_random_routes(turns: Any, layers: int = 2, k: int = 2, seed: int = 0) -> list[Any]:
    """The turns with routes drawn by lot: of all tokens but the last, of some at the end, or of none."""
    random = np.random.default_rng(seed)
    found = []
    for place, turn in enumerate(turns):
        count = len(turn.prompt) + len(turn.action) - 1
        count = (count, random.integers(0, count + 1), -1)[place % 3]  # type: ignore[assignment]
        routes = random.random((max(count, 0), layers, NUM_EXPERTS)).argsort(-1)[..., :k].astype(np.uint8)
        found.append(turn if count < 0 else replace(turn, routes=routes))
    return found
