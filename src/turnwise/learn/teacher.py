"""The teacher: what a model finds likeliest at every action token, and how far the policy is from it.

A distribution is told in buckets: the teacher's k likeliest tokens have one each, and all others have the last. The
divergence of two distributions so told is never negative, zero where they agree, no more than that of the whole
distributions, and equal to it where every token has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.learn.head import bucket_logprobs, likeliest
from turnwise.learn.policy import Policy
from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan, Stretch

Direction = Callable[[Tensor, Tensor], Tensor]
"""(the policy's logprobs of buckets [n, k + 1], the teacher's) -> their divergence [n]."""
OTHERS = -1
"""In the place of a token: all that have no bucket of their own."""


class Teacher:
    """A policy that stays as it is, asked for its `top_k` likeliest tokens in place of the logprob of the sampled one.

    Its model may have more rows for tokens than the `vocabulary` of the policy it teaches, or fewer: such padding is
    among the others.
    """

    def __init__(self, policy: Policy, top_k: int, vocabulary: int) -> None:
        own = len(policy.output)
        self.vocabulary = min(own, vocabulary)
        # Padding of one model only must have a bucket of the other to be compared with.
        most = self.vocabulary - (own != vocabulary)
        if not 1 <= top_k <= most:
            raise ValueError(f"distill.top_k = {top_k} must be from 1 to {most}, the tokens that both models know")
        self.policy = policy
        self.top_k = top_k

    def passes(self, plan: Plan) -> Iterator[tuple[Index, NDArray[Any]]]:
        """(which of the plan's action tokens, their buckets), pass by pass."""
        return self.policy.walk(plan, self.ask)

    def ask(self, stretch: Stretch, states: Tensor) -> tuple[Index, NDArray[Any]]:
        policy = self.policy
        found = likeliest(states.to(policy.dtype), policy.output, policy.temperature, self.top_k, self.vocabulary)
        tokens, logprobs = (tensor.cpu().numpy() for tensor in found)
        return stretch.picked, buckets_of(tokens, logprobs)[stretch.inverse]


def buckets_of(tokens: NDArray[Any], logprobs: NDArray[Any]) -> NDArray[Any]:
    """[n, k + 1] pairs of token [n, k] and logprob [n, k + 1], as one array: what is picked of one is of the other."""
    found = np.empty(logprobs.shape, [("token", np.int32), ("logprob", logprobs.dtype)])
    found["token"][:, :-1], found["token"][:, -1] = tokens, OTHERS
    found["logprob"] = logprobs
    return found


def compared(
    policy: Policy, plan: Plan, buckets: NDArray[Any], direction: Direction
) -> Iterator[tuple[Index, Tensor, Tensor, Tensor]]:
    """What the policy's passes yield, and the divergence from a teacher's buckets, a row of them per action token."""

    def compare(stretch: Stretch, states: Tensor) -> tuple[Index, Tensor, Tensor, Tensor]:
        if not len(stretch.picked):  # nothing to compare, and no teacher was asked
            picked, logprobs, entropies = policy.predict(plan, stretch, states)
            return picked, logprobs, entropies, torch.zeros_like(logprobs)
        one = np.empty(len(stretch.nodes), np.int64)
        one[stretch.inverse] = stretch.picked  # any action token of each node: the teacher says the same of all
        told, targets = buckets[one], policy.tensor(plan.tokens[stretch.nodes]).long()
        tokens = policy.tensor(np.ascontiguousarray(told["token"][:, :-1])).long()
        found = bucket_logprobs(states.to(policy.dtype), policy.output, targets, policy.temperature, tokens)
        logprobs, entropies, own = found
        apart = direction(own, policy.tensor(np.ascontiguousarray(told["logprob"]), own.dtype))
        place = policy.tensor(stretch.inverse)
        return stretch.picked, logprobs[place], entropies[place], apart[place]

    return policy.walk(plan, compare)


# ---------------------------------------------------------------- directions


def reverse(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher): what the policy does and the teacher would not is dear."""
    policy, teacher = without_empty(policy, teacher)
    return (policy.exp() * (policy - teacher)).sum(-1)


def forward(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || policy): what the teacher would do and the policy does not is dear."""
    policy, teacher = without_empty(policy, teacher)
    return (teacher.exp() * (teacher - policy)).sum(-1)


DIRECTIONS: dict[str, Direction] = {"reverse": reverse, "forward": forward}


def without_empty(policy: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with equal and finite logprobs where no token is left for the others: such a bucket adds nothing, and its
    gradient is zero."""
    empty = teacher.isneginf()
    return policy.masked_fill(empty, 0.0), teacher.masked_fill(empty, 0.0)
