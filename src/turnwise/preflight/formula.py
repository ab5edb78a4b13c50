"""The formula: what a rank should need by arithmetic on the sizes of a model. It explains what was counted, and a
difference between the two is a sign that one of them is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.preflight.operation_counter import GATHER, GATHER_ROOT
from turnwise.preflight.rehearsal import GRADIENTS, MASTERS, MOMENTS, Rehearsal
from turnwise.recipe.schema import Recipe

ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a rank's memory."""

    name: str
    words: str
    """How it is computed, for people."""
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the formula takes from a config.

    Example: Qwen3-8B
        ModelSizes(hidden=4096, layers=36, heads=32, kv_heads=8, head=128, inner=12288, experts_per_token=0)
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    """Width of a token in the feed-forward part: of all experts that it goes to."""
    experts_per_token: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        text = config.get_text_config()
        heads = text.num_attention_heads
        chosen = getattr(text, "num_experts_per_tok", 0) or 0
        inner = getattr(text, "moe_intermediate_size", None) if chosen else None
        return cls(
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head=getattr(text, "head_dim", None) or text.hidden_size // heads,
            inner=(inner or getattr(text, "intermediate_size", 4 * text.hidden_size)) * max(1, chosen),
            experts_per_token=chosen,
        )

    @property
    def kv_elements(self) -> int:
        """Keys and values of a token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head

    @property
    def layer_elements(self) -> int:
        """What the backward pass of one layer has at once, a token: some ten states of the residual stream, queries and
        outputs of the attention, six of the feed-forward part, and what a mixture makes of a token for its experts."""
        copies = 6 * self.experts_per_token * self.hidden
        return 10 * self.hidden + 3 * self.heads * self.head + 6 * self.inner + copies


def terms_of(recipe: Recipe, config: Any, found: Rehearsal) -> Sequence[Term]:
    """The memory of a rank at its peak, part by part."""
    sizes, ranks = ModelSizes.of(config), found.ranks
    parts = ranks // recipe.cluster.replicate
    width = 2 if recipe.model.dtype == "bfloat16" else 4
    text = config.get_text_config()
    embeddings = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    layer = (found.num_parameters - embeddings) / max(1, found.layers)
    share = f"/ {parts} ranks" if parts > 1 else "on one rank"
    terms = [
        Term(
            MASTERS, f"4 bytes x {in_words(found.num_parameters)} parameters {share}", 4 * found.num_parameters / parts
        ),
        Term(MOMENTS, f"8 bytes x {in_words(found.num_trained)} trained {share}", 8 * found.num_trained / parts),
        Term(GRADIENTS, f"4 bytes x {in_words(found.num_trained)} trained {share}", 4 * found.num_trained / parts),
    ]
    if recipe.cluster.offload:
        terms = []
    if ranks > 1:
        terms += [
            Term(GATHER, f"{width} bytes x {in_words(layer)} of a layer", width * layer / recipe.cluster.tp),
            Term(GATHER_ROOT, f"{width} bytes x {in_words(embeddings)} of embeddings", float(width * embeddings)),
        ]
    kept, again = sizes.hidden, sizes.layer_elements
    if found.checkpoints:
        each = found.layers * kept + again
        words = f"{width} bytes x {found.num_tokens} tokens x ({found.layers} layers x {kept} + {again} of one layer)"
    else:
        each = found.layers * again
        words = f"{width} bytes x {found.num_tokens} tokens x {found.layers} layers x {again}"
    return [*terms, Term(ACTIVATIONS, words, float(width * found.num_tokens * each))]


def in_words(number: float) -> str:
    """A number of parameters, as people write it."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"
