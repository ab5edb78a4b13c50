"""What an engine holds: a copy of the weights, and keys and values. From the config alone: engines are not ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from turnwise.preflight.card import MEMORY_SHARE, PRODUCT_SHARE, Card
from turnwise.preflight.formula import ModelSizes
from turnwise.recipe.schema import Recipe

ACTIVATIONS = 3e9
"""Bytes of a card that vLLM needs besides weights and keys: graphs and activations. An assumption."""
ENOUGH = 16
"""Texts at once for which a server is spread over more cards."""
DEFAULT_SHARE = 0.9
"""Share of a card that a vLLM server takes where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine on one card, or on as many as share a copy of the weights."""

    name: str
    cards: int
    """Cards that share a copy."""
    is_server: bool
    """Whether somebody else decides over how many cards it is spread."""
    weights: float
    """Bytes on each of them."""
    kv_token: float
    """Bytes of keys and values of one token, on each of them."""
    kv_heads: int
    """Beyond as many cards, keys and values are kept twice."""
    share: float
    """Of a card's memory that the engine may take."""
    num_parameters: int
    active: float
    """Parameters that one token is computed with."""

    @classmethod
    def of(cls, recipe: Recipe, config: Any, num_parameters: int) -> EngineMemory:
        text, sizes = config.get_text_config(), ModelSizes.of(config)
        in_vllm = recipe.engine.name == "vllm"
        apart = recipe.engine.name != "slots"
        width = 2 if recipe.model.dtype == "bfloat16" or apart else 4
        cards = recipe.engine.vllm.tensor_parallel_size if in_vllm else 1
        share = (
            recipe.engine.vllm.gpu_memory_utilization if in_vllm and not recipe.engine.vllm.servers else DEFAULT_SHARE
        )
        experts = getattr(text, "num_experts", 0) or 0
        active = float(num_parameters)
        if experts and sizes.experts_per_token:
            each = 3 * sizes.hidden * sizes.inner / sizes.experts_per_token * sizes.layers
            active -= each * (experts - sizes.experts_per_token)
        return cls(
            name=recipe.engine.name,
            cards=cards,
            is_server=bool(recipe.engine.servers),
            weights=width * num_parameters / cards if apart or recipe.max_lag else 0.0,
            kv_token=width * sizes.kv_elements / min(cards, sizes.kv_heads),
            kv_heads=sizes.kv_heads,
            share=share,
            num_parameters=num_parameters,
            active=active,
        )

    def on(self, card: Card, tokens: int) -> EngineMemory:
        """The engine over as many cards as the recipe says; a server over the fewest, up to eight, that have room for
        some texts of so many tokens."""
        spread = self
        while self.is_server and spread.cards < 8 and spread.attempts(card, tokens) < ENOUGH:
            parts = min(2 * spread.cards, self.kv_heads) / min(spread.cards, self.kv_heads)
            spread = replace(
                spread, cards=2 * spread.cards, weights=spread.weights / 2, kv_token=spread.kv_token / parts
            )
        return spread

    def room(self, card: Card) -> float:
        """Bytes of a card that are left for keys and values."""
        return self.share * card.memory - self.weights - ACTIVATIONS

    def attempts(self, card: Card, tokens: int) -> int:
        """How many texts of so many tokens have room at once; 0 where the weights do not fit."""
        return max(0, int(self.room(card) / (self.kv_token * tokens)))

    def rate(self, card: Card, together: int, tokens: int) -> float:
        """Tokens a second, where so many texts of so many tokens are continued together: each step reads the weights
        and all their keys and values, and multiplies."""
        if not together:
            return 0.0
        read = (self.weights + together * tokens * self.kv_token) / (MEMORY_SHARE * card.bandwidth)
        multiply = 2.0 * self.active * together / self.cards / (PRODUCT_SHARE * card.flops)
        return together / max(read, multiply)
