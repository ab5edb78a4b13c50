"""The deal: which plans each rank computes. Pure; the deal does not change the result, only how long the ranks take.

Ranks that share one model gather its weights in every pass, all at the same time. So all of them must make the same
number of passes in the same order. A rank with less work makes empty passes.
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
"""A layout with more plans per rank must reduce the cost of the busiest rank to this share: every additional round
gathers all weights again."""


def deal(plans: Sequence[Plan], ranks: int, cost: Cost) -> list[list[Plan]]:
    """The plans of every rank, round by round. All ranks get the same number of plans, and all plans of a round have
    the same number of stretches.

    A plan with fewer stretches than another of its round is cut into as many. If it has too few tokens for that, it
    waits for a later round.
    """
    full = [plan for plan in plans if plan.num_tokens]
    shares = balance([cost.of(plan) for plan in full], ranks)
    hands = [sorted((full[index] for index in share), key=lambda plan: -passes_of(plan)) for share in shares]
    dealt: list[list[Plan]] = [[] for _ in range(ranks)]
    while any(hands) or not dealt[0]:
        passes = max((passes_of(hand[0]) for hand in hands if hand), default=1)
        for hand, rank_plans in zip(hands, dealt, strict=True):
            fits = bool(hand) and hand[0].num_tokens >= passes
            rank_plans.append(replace(hand.pop(0), num_stretches=passes) if fits else idle_plan(passes))
    return dealt


def passes_of(plan: Plan) -> int:
    return min(plan.num_stretches, plan.num_tokens)


def idle_plan(passes: int = 1) -> Plan:
    """A plan without an action: one token per pass, and no token has a weight."""
    return replace(Plan.of_chains(np.zeros((1, passes), np.int32)), num_stretches=passes)


def split_for_ranks(layout: Layout, ranks: int, cost: Cost) -> Layout:
    """A layout that gives every rank work: if the budget gives too few plans, smaller budgets are tried that cut the
    turns into one or two plans per rank."""

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
    """The cost of the busiest rank."""
    costs = [cost.of(plan) for plan in plans]
    return max(sum(costs[index] for index in share) for share in balance(costs, ranks))


def cost_of(model: CausalLM) -> Cost:
    """The cost of a token and of a pair of tokens, in multiplications: good enough to compare plans."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair = 2.0 * config.num_hidden_layers * config.num_attention_heads * width
    return Cost(float(sum(parameter.numel() for parameter in model.parameters())), pair)
