"""The layers of models built like Llama, computed with a third of the kernel calls that transformers makes.

At a few tokens per pass a small model spends most of its time on kernel calls. A `FusedLlama` reads the module's
parameters and keeps no copy. It is used for models whose every part it knows and whose hidden states it reproduces at
positions over the whole context, which is compared once, at the start. All other models compute by their own forward.

Letters: N tokens, W width, H heads, G key-value heads, d head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.engines.slots.attention import attend
from turnwise.pretrained import CausalLM

Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""
Attend = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]

TOLERANCE = 1e-5
"""Of hidden states, relative to the largest."""

FAMILIES = frozenset(
    f"transformers.models.{name}.modeling_{name}" for name in "llama mistral qwen2 qwen3 smollm3".split()
)
"""Modules with the classes of the models that this file was written after."""
PARTS = (torch.nn.Embedding, torch.nn.Linear, torch.nn.ModuleList, torch.nn.SiLU)
"""Other classes that they are made of."""
ATTRIBUTES = frozenset(
    "attention_dropout config head_dim is_causal layer_idx layer_type num_key_value_groups scaling sliding_window "
    "use_rope".split()
)
"""Attributes of their attention layers; sliding windows are refused where a turn could leave them."""
FIELDS = frozenset(
    "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range "
    "intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias no_rope_layer_interval "
    "no_rope_layers num_attention_heads num_hidden_layers num_key_value_heads pad_token_id pretraining_tp rms_norm_eps "
    "rope_parameters sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size".split()
)
"""Fields of their configs in addition to those of all configs."""
ROPE = frozenset(
    "attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor mscale mscale_all_dim "
    "original_max_position_embeddings rope_theta rope_type short_factor truncate".split()
)
"""Settings of rotary positions; the model's own module computes them."""


class FusedLayer:
    """The parameters of one layer; AttributeError where it lacks one of these, or has more."""

    def __init__(self, module: Any) -> None:
        parameters = dict(module.named_parameters())

        def linear(name: str) -> Linear:
            return parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None)

        try:
            self.q, self.k, self.v, self.o = (linear(f"self_attn.{name}_proj") for name in "qkvo")
            self.gate, self.up, self.down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
            self.before = parameters.pop("input_layernorm.weight")
            self.between = parameters.pop("post_attention_layernorm.weight")
        except KeyError as missing:
            raise AttributeError(str(missing)) from None
        self.q_norm: Tensor | None = parameters.pop("self_attn.q_norm.weight", None)
        self.k_norm: Tensor | None = parameters.pop("self_attn.k_norm.weight", None)
        if parameters:
            raise AttributeError(f"other parameters: {sorted(parameters)}")
        attention = module.self_attn
        self.index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.size: int = attention.head_dim
        self.epsilon = torch.tensor(module.input_layernorm.variance_epsilon, device=self.before.device)


class FusedLlama:
    """Hidden states of a model built like Llama: norms before attention and gated layers, rotary positions."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.layers = [FusedLayer(layer) for layer in base.layers]
        self.epsilon = torch.tensor(base.norm.variance_epsilon, device=base.norm.weight.device)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[N, W] the last hidden states of tokens [N] at positions [N]."""
        hidden = self.base.embed_tokens(tokens)
        cos, sin = (x[0][:, None] for x in self.base.rotary_emb(hidden[None], positions[None]))
        # The second half of a head rotates the first half backwards.
        sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), -1)
        for layer in self.layers:
            hidden = self.attended(layer, hidden, cos, sin, attend)
            normed = norm(hidden, layer.between, layer.epsilon)
            gated = F.silu(F.linear(normed, *layer.gate), inplace=True).mul_(F.linear(normed, *layer.up))
            hidden = add_linear(hidden, gated, layer.down)
        return norm(hidden, self.base.norm.weight, self.epsilon)

    def attended(self, layer: FusedLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = norm(hidden, layer.before, layer.epsilon)
        query, key, value = (
            F.linear(normed, *linear).unflatten(-1, (-1, layer.size)) for linear in (layer.q, layer.k, layer.v)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = norm(query, layer.q_norm, layer.epsilon), norm(key, layer.k_norm, layer.epsilon)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = attend(layer.index, query, key, value, layer.scaling)
        return add_linear(hidden, out[0].flatten(1), layer.o)


def norm(hidden: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """The root-mean-square norm, in five kernel calls; PyTorch's makes eight on a CPU."""
    length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = torch.addcmul(epsilon, length, length, value=1 / hidden.shape[-1]).rsqrt_()
    return (hidden * scale).mul_(weight)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [N, H, d] rotated by their positions."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def add_linear(hidden: Tensor, states: Tensor, linear: Linear) -> Tensor:
    weight, bias = linear
    out = torch.addmm(hidden, states, weight.t())
    return out if bias is None else out.add_(bias)


# ---------------------------------------------------------------- whether it is the same


def try_fuse(model: CausalLM, context: int) -> FusedLlama | None:
    """A `FusedLlama` of a model, if all of the model is known and the result agrees with it on some tokens, at
    positions up to the end of a context; None otherwise."""
    try:
        if not is_known(model.base_model):
            return None
        embeddings = model.get_input_embeddings().weight
        tokens = torch.arange(3, 24, device=embeddings.device) * 7919 % len(embeddings)
        positions = torch.linspace(0, context - 1, len(tokens), device=embeddings.device).long()
        fused = FusedLlama(model.base_model)
        hidden = fused(tokens, positions, attend_causally)
    except (AttributeError, TypeError, RuntimeError):
        return None
    states = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "attend": attend_causally}
    expected = model.base_model(**states).last_hidden_state[0]
    agrees = (hidden - expected).abs().max() <= TOLERANCE * expected.abs().max()
    return fused if agrees else None


def is_known(base: Any) -> bool:
    """Whether this file was written after every part and setting of a model. The model's code may read any setting, so
    that an unknown one is reason enough to use the model's own forward."""
    from transformers import PretrainedConfig
    from transformers.activations import SiLUActivation

    family = type(base).__module__
    config = base.config
    return (
        family in FAMILIES
        and all(type(part).__module__ == family or type(part) in (*PARTS, SiLUActivation) for part in base.modules())
        and all(settings_of(layer.self_attn) <= ATTRIBUTES for layer in base.layers)
        and fields_of(config) - fields_of(PretrainedConfig) <= FIELDS
        and rope_of(config) <= ROPE
    )


def settings_of(module: torch.nn.Module) -> set[str]:
    """The attributes of a module that are no parameters, buffers, submodules or hooks."""
    return {name for name in vars(module).keys() - vars(torch.nn.Module()).keys() if not name.startswith("_")}


def fields_of(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def rope_of(config: Any) -> set[str]:
    """The settings of rotary positions, also where they differ by the kind of a layer."""
    parameters = config.rope_parameters or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return {name for value in parameters.values() for name in value}
    return set(parameters)


def attend_causally(
    layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None = None
) -> Tensor:
    """Attention among the tokens of the pass alone, which are fewer than any window."""
    out, _ = attend(query, key, value, scaling, causal=True)
    return out.transpose(1, 2)
