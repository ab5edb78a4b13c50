"""The teacher: a model's likeliest tokens at every action token, and how far the policy is from them.

A distribution is kept in buckets: each of the teacher's k likeliest tokens has one, and all other tokens share the
last. The divergence of two bucketed distributions is never negative, zero where they agree, at most that of the whole
distributions, and equal to it if every token has its own bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
"""The token number of the last bucket: all tokens that have no bucket themselves."""


class Teacher:
    """A frozen policy that scores its `top_k` likeliest tokens in place of the logprob of the sampled one.

    Its model may have more rows for tokens than the `vocabulary` of the policy it teaches, or fewer: such padding falls
    into the last bucket.
    """

    def __init__(self, policy: Policy, top_k: int, vocabulary: int) -> None:
        num_rows = policy.vocabulary
        self.vocabulary = min(num_rows, vocabulary)
        # Padding of one model only must have a bucket of the other to be compared with.
        most = self.vocabulary - (num_rows != vocabulary)
        if not 1 <= top_k <= most:
            raise ValueError(f"distill.top_k = {top_k} must be from 1 to {most}, the tokens that both models know")
        self.policy = policy
        self.top_k = top_k

    def passes(self, plan: Plan) -> Iterator[tuple[Index, NDArray[Any]]]:
        """(which of the plan's action tokens, their buckets), pass by pass."""
        return self.policy.walk(plan, partial(self.score_stretch, plan))

    def score_stretch(self, plan: Plan, stretch: Stretch, states: Tensor) -> tuple[Index, NDArray[Any]]:
        policy = self.policy
        counts = self.top_k, self.vocabulary
        mask = policy.mask_of(plan, stretch)
        best = likeliest(states.to(policy.dtype), policy.output, policy.temperature, *counts, mask, policy.shard)
        tokens, logprobs = (tensor.cpu().numpy() for tensor in best)
        return stretch.picked, make_buckets(tokens, logprobs)[stretch.inverse]


def make_buckets(tokens: NDArray[Any], logprobs: NDArray[Any]) -> NDArray[Any]:
    """[n, k + 1] pairs of token [n, k] and logprob [n, k + 1] in one array, so that both are always picked together."""
    buckets = np.empty(logprobs.shape, [("token", np.int32), ("logprob", logprobs.dtype)])
    buckets["token"][:, :-1], buckets["token"][:, -1] = tokens, OTHERS
    buckets["logprob"] = logprobs
    return buckets


def compare_with_teacher(
    policy: Policy, plan: Plan, buckets: NDArray[Any], direction: Direction
) -> Iterator[tuple[Index, Tensor, Tensor, Tensor]]:
    """What the policy's passes yield, and the divergence from a teacher's buckets, of which each action token has a
    row."""

    def compare(stretch: Stretch, states: Tensor) -> tuple[Index, Tensor, Tensor, Tensor]:
        if not len(stretch.picked):  # no action token, so there are no buckets to compare with
            picked, logprobs, entropies = policy.predict(plan, stretch, states)
            return picked, logprobs, entropies, torch.zeros_like(logprobs)
        some_action = np.empty(len(stretch.nodes), np.int64)
        some_action[stretch.inverse] = stretch.picked  # any action token of each node: their buckets are equal
        of_nodes, targets = buckets[some_action], policy.tensor(plan.tokens[stretch.nodes]).long()
        tokens = policy.tensor(np.ascontiguousarray(of_nodes["token"][:, :-1])).long()
        given = (targets, policy.temperature, tokens, policy.mask_of(plan, stretch), policy.shard)
        logprobs, entropies, of_policy = bucket_logprobs(states.to(policy.dtype), policy.output, *given)
        of_teacher = policy.tensor(np.ascontiguousarray(of_nodes["logprob"]), of_policy.dtype)
        divergence = direction(of_policy, of_teacher)
        inverse = policy.tensor(stretch.inverse)
        return stretch.picked, logprobs[inverse], entropies[inverse], divergence[inverse]

    return policy.walk(plan, compare)


# ---------------------------------------------------------------- directions


def reverse(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher): large where the policy does what the teacher would not.

    T = sum over buckets of p (log p - log q), p the policy's probabilities, q the teacher's. The reverse KL of GKD,
    arXiv 2306.13649, on tokens that the policy sampled. No gradient flows through the choice of those tokens.
    """
    policy, teacher = without_empty(policy, teacher)
    return (policy.exp() * (policy - teacher)).sum(-1)


def forward(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || policy): large where the policy does not do what the teacher would.

    T = sum over buckets of q (log q - log p). The forward KL of GKD, arXiv 2306.13649, on tokens that the policy
    sampled.
    """
    policy, teacher = without_empty(policy, teacher)
    return (teacher.exp() * (teacher - policy)).sum(-1)


DIRECTIONS: dict[str, Direction] = {"reverse": reverse, "forward": forward}


def without_empty(policy: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with equal and finite logprobs where no token is left for the last bucket: such a bucket adds nothing, and
    its gradient is zero."""
    empty = teacher.isneginf()
    return policy.masked_fill(empty, 0.0), teacher.masked_fill(empty, 0.0)
