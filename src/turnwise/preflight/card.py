"""Cards: published figures of GPUs, and the shares of them that a prediction counts on."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. Rates are peaks of its data sheet, per second and without sparsity.

    Example:
        Card("H100 80 GB", memory=80e9, flops=989e12, bandwidth=3.35e12, link=450e9)
    """

    name: str
    memory: float
    """Bytes, as the name of the card says; the driver reports a little more or less."""
    flops: float
    """Floating-point operations in bfloat16, added up in float32."""
    bandwidth: float
    """Bytes from and to its own memory."""
    link: float
    """Bytes to the other cards of its node, in one direction."""


CARDS = (
    Card("H100 80 GB", 80 * GB, 989e12, 3.35e12, 450e9),
    Card("A100 80 GB", 80 * GB, 312e12, 2.04e12, 300e9),
    Card("A100 40 GB", 40 * GB, 312e12, 1.56e12, 300e9),
    Card("RTX 4090 24 GB", 24 * GB, 165e12, 1.01e12, 25e9),
    Card("B200 192 GB", 192 * GB, 2250e12, 8.0e12, 900e9),
)
CARDS_OF_NODE = 8
NETWORK = 400e9
"""Bytes per second that a ring over nodes carries: eight adapters of 400 Gbit/s in each node, all in use."""

RESERVED = 4 * GB
"""Bytes of a card that no tensor of ours can have: the driver's context, buffers of NCCL, workspaces of kernels, and
what the allocator loses between blocks. An assumption; no run has measured it."""
PRODUCT_SHARE, MEMORY_SHARE, LINK_SHARE = 0.6, 0.8, 0.7
"""Shares of the peaks that large matrix products, other kernels and collectives are taken to reach."""
LAUNCH = 8e-6
"""Seconds in which the host starts a kernel."""


def known_card(name: str, memory: int) -> Card | None:
    """The card that a driver calls so, with the memory that it reports; None for one that is not in the table."""
    words = name.upper().replace("-", " ").split()
    for card in CARDS:
        kind = next(word for word in card.name.split() if any(sign.isdigit() for sign in word))
        if any(kind in word for word in words) and abs(memory - card.memory) < 0.15 * card.memory:
            return Card(name, float(memory), card.flops, card.bandwidth, card.link)
    return None
