"""The deal: which plans each rank computes. Pure; what is dealt changes no result, only how long the ranks take.

Ranks that hold one model together gather its weights in every pass, all of them at the same time. So each must make the
same passes in the same order, and one that has less to do makes some that count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from turnwise.plan.balance import Cost, balance
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM
from turnwise.types import Turn

Layout = Callable[[Sequence[Turn], int], list[Plan]]
"""(turns, tokens per pass) -> plans."""

WORTH_A_ROUND = 0.95
"""A layout with more plans per rank has to bring the busiest rank's cost down to this share: every round gathers all
weights once more."""


def deal(plans: Sequence[Plan], ranks: int, cost: Cost) -> list[list[Plan]]:
    """The plans of every rank, round by round: as many on each, and in a round all with as many stretches.

    A plan with fewer stretches than another of its round is cut into as many; one with too few tokens for that waits
    for a later round.
    """
    full = [plan for plan in plans if plan.num_tokens]
    shares = balance([cost.of(plan) for plan in full], ranks)
    hands = [sorted((full[place] for place in share), key=lambda plan: -passes_of(plan)) for share in shares]
    dealt: list[list[Plan]] = [[] for _ in range(ranks)]
    while any(hands) or not dealt[0]:
        passes = max((passes_of(hand[0]) for hand in hands if hand), default=1)
        for hand, own in zip(hands, dealt, strict=True):
            fits = bool(hand) and hand[0].num_tokens >= passes
            own.append(replace(hand.pop(0), num_stretches=passes) if fits else idle_plan(passes))
    return dealt


def passes_of(plan: Plan) -> int:
    return min(plan.num_stretches, plan.num_tokens)


def idle_plan(passes: int = 1) -> Plan:
    """A plan without an action: a token per pass, none of which has a weight."""
    return replace(Plan.of_chains(np.zeros((1, passes), np.int32)), num_stretches=passes)


def spread(layout: Layout, ranks: int, cost: Cost) -> Layout:
    """A layout that leaves every rank something to do: where a budget would fill few passes, a smaller one is tried
    that cuts the turns into one or two plans for each."""

    def lay_out(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
        best = layout(turns, tokens_per_pass)
        tokens = sum(plan.num_tokens for plan in best)
        longest = max((len(turn.prompt) + len(turn.action) for turn in turns), default=0)
        for parts in (ranks, 2 * ranks):
            budget = max(-(-tokens // parts), longest)
            if 0 < budget < tokens_per_pass:
                other = layout(turns, budget)
                if busiest(other, ranks, cost) < WORTH_A_ROUND * busiest(best, ranks, cost):
                    best = other
        return best

    return lay_out if ranks > 1 else layout


def busiest(plans: Sequence[Plan], ranks: int, cost: Cost) -> float:
    """The cost of the rank with the most to do."""
    costs = [cost.of(plan) for plan in plans]
    return max(sum(costs[place] for place in share) for share in balance(costs, ranks))


def cost_of(model: CausalLM) -> Cost:
    """What a token and a pair of tokens cost in multiplications: enough to compare plans, of unknown unit."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair = 2.0 * config.num_hidden_layers * config.num_attention_heads * width
    return Cost(float(sum(parameter.numel() for parameter in model.parameters())), pair)
