"""The objective: a policy loss with what is added to it, term by term under the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from turnwise.learn.losses import Loss, log_ratio
from turnwise.learn.teacher import Direction, reverse

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(logprobs [K], reference [K]) -> a term [K] whose gradient pulls the policy to the reference."""


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log ratio: its gradient, under the policy's own samples, is that of the KL divergence."""
    return 0.5 * log_ratio(logprobs, reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased, never negative estimate of the KL divergence. Its gradient is not that divergence's: it is the
    gradient of the divergence the other way round, from the reference to the policy."""
    against = log_ratio(reference, logprobs)
    return against.expm1() - against


DIVERGENCES: dict[str, Divergence] = {"k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises: weight times the terms of this.

    Example:
        Objective(ppo_clip, entropy=0.01)
    """

    policy: Loss
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    kl: float = 0.0
    """Coefficient of the divergence from the reference."""
    divergence: Divergence = k3
    distill: float = 0.0
    """Coefficient of the divergence from the teacher."""
    direction: Direction = reverse
    """Which way round it is."""

    def __call__(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        old: Tensor,
        advantages: Tensor,
        reference: Tensor | None,
        apart: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(terms [K], per-token measurements by name); `apart` is the divergence [K] from a teacher."""
        terms, measured = self.policy(logprobs, old, advantages)
        measured = {"entropy": entropies.detach(), **measured}
        if self.entropy:
            terms = terms - self.entropy * entropies
        if reference is not None:
            measured["kl"] = k3(logprobs.detach(), reference)
            if self.kl:
                terms = terms + self.kl * self.divergence(logprobs, reference)
        if apart is not None:
            measured["distill"] = apart.detach()
            terms = terms + self.distill * apart
        return terms, measured
