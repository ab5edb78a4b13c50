"""The objective: a policy loss and the terms that are added to it, token by token under the same token weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from turnwise.learn.losses import LossFunction, log_ratio
from turnwise.learn.teacher import Direction, reverse

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(logprobs [K], reference [K]) -> a term [K] whose gradient pulls the policy to the reference."""


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log ratio. Its gradient is that of KL(policy || reference).

    D = (logprob - reference)^2 / 2. Schulman, "Approximating KL divergence" (2020). As an estimate of the divergence it
    is biased. Assumes that the policy sampled the tokens.
    """
    return 0.5 * log_ratio(logprobs, reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased estimate of KL(policy || reference) that is never negative. Its gradient is another divergence's.

    D = exp(d) - 1 - d, d = reference - logprob. Schulman, "Approximating KL divergence" (2020); GRPO's KL term, arXiv
    2402.03300. On tokens that the policy sampled its gradient is that of KL(reference || policy), the divergence the
    other way round.
    """
    difference = log_ratio(reference, logprobs)
    return difference.expm1() - difference


DIVERGENCES: dict[str, Divergence] = {"k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises: the sum of token weight times the terms of this.

    Example:
        Objective(ppo_clip, entropy=0.01)
    """

    policy: LossFunction
    """The policy loss with its settings filled in."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    kl: float = 0.0
    """Coefficient of the divergence from the reference."""
    divergence: Divergence = k3
    """How the divergence from the reference is estimated."""
    distill: float = 0.0
    """Coefficient of the divergence from the teacher."""
    direction: Direction = reverse
    """Which way round the divergence from the teacher is."""

    def __call__(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        old: Tensor,
        advantages: Tensor,
        reference: Tensor | None,
        teacher_divergence: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(terms [K], per-token measurements by name). All arguments are [K]; None leaves a term out.

        term = policy(logprob, old, A) - entropy H + kl D(logprob, reference) + distill T
        """
        terms, measured = self.policy(logprobs, old, advantages)
        measured = {"entropy": entropies.detach(), **measured}
        if self.entropy:
            terms = terms - self.entropy * entropies
        if reference is not None:
            measured["kl"] = k3(logprobs.detach(), reference)
            if self.kl:
                terms = terms + self.kl * self.divergence(logprobs, reference)
        if teacher_divergence is not None:
            measured["distill"] = teacher_divergence.detach()
            terms = terms + self.distill * teacher_divergence
        return terms, measured
