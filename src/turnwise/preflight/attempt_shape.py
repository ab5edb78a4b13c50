"""The shape of attempts that a recipe allows, and a plan of them that is as full as a pass may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from turnwise.messages import Message
from turnwise.plan.plan import Plan
from turnwise.recipe.schema import Recipe
from turnwise.types import StopReason, Turn

Layout = Callable[[Sequence[Turn], int], list[Plan]]


@dataclass(frozen=True, slots=True)
class AttemptShape:
    """An attempt as long as the recipe lets it be: a first prompt that its group shares, then actions and replies of
    equal length in turn.

    Example:
        AttemptShape(prompt=512, action=256, reply=256, turns=8, group=8)
    """

    prompt: int
    action: int
    reply: int
    turns: int
    group: int

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Half of what is left after the first prompt is actions, unless the recipe allows fewer."""
        rollout = recipe.rollout
        turns, longest = rollout.max_turns, rollout.max_trajectory_tokens
        if longest < 2 * turns:
            turns = max(1, longest // 2)
        action = max(1, min(rollout.max_action_tokens, longest // (2 * turns)))
        prompt = max(1, min(rollout.max_prompt_tokens, longest - turns * action) // (turns if turns > 1 else 1))
        reply = max(1, (longest - prompt - turns * action) // max(1, turns - 1)) if turns > 1 else 0
        while prompt + turns * action + (turns - 1) * reply > longest and reply > 1:
            reply -= 1
        return cls(prompt, action, reply, turns, rollout.group_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of an attempt, its first prompt included."""
        return self.prompt + self.turns * self.action + (self.turns - 1) * self.reply

    @property
    def num_group_tokens(self) -> int:
        """Tokens of a group whose attempts share their first prompt and nothing else."""
        return self.prompt + self.group * (self.num_tokens - self.prompt)

    @property
    def num_action_tokens(self) -> int:
        """Tokens of a group that are sampled."""
        return self.group * self.turns * self.action

    def turns_of(self, start: int, prompt: np.ndarray, longest: int, vocabulary: int) -> list[Turn]:
        """The turns of an attempt with at most `longest` tokens. Its tokens begin with its number, so that no two
        attempts share more than the prompt."""
        size = min(self.num_tokens, longest)
        rest = (np.arange(size - len(prompt), dtype=np.int64) * 7 + start) % vocabulary
        rest[:1] = start % vocabulary
        tokens = np.concatenate([prompt, rest.astype(np.int32)])
        turns, at = [], len(prompt)
        while at < size:
            end = min(at + self.action, size)
            blank = np.zeros(end - at, np.float32)
            versions, said = np.zeros(end - at, np.int32), Message("assistant", "")
            turns.append(Turn(tokens[:at], tokens[at:end], blank, versions, StopReason.length, 0.0, said))
            at = end + self.reply
        return turns


def full_plan(shape: AttemptShape, layout: Layout, budget: int, vocabulary: int) -> tuple[Plan, list[Turn]]:
    """(a plan of `budget` tokens, its turns), or of one attempt that is longer by itself."""
    turns: list[Turn] = []
    num_tokens = number = 0
    prompt = np.zeros(0, np.int32)
    while True:
        if number % shape.group == 0:
            prompt = ((np.arange(shape.prompt) * 3 + number) % vocabulary).astype(np.int32)
            num_tokens += len(prompt)
        room = budget - num_tokens
        longest = len(prompt) + (room if number else max(room, shape.num_tokens - len(prompt)))
        if longest <= len(prompt):
            break
        more = shape.turns_of(number + 1, prompt, longest, vocabulary)
        turns += more
        num_tokens += min(shape.num_tokens, longest) - len(prompt)
        number += 1
    plans = layout(turns, budget)
    return max(plans, key=lambda plan: plan.num_tokens), turns
