"""A walk whose horizon and luck are settings, and a small policy for it, made for many short training runs.

An attempt passes `goal` signs. At a sign the policy says two words; the right two lead to the next sign, any others
leave it where it is. Which are right depends on the sign alone and is never told. The policy sees the sign and how many
are left. So its prompts are few, what it says is a table, and the attempts of a step are drawn from it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turnwise.messages import Message
from turnwise.types import Break, Group, Status, StopReason, Task, Trajectory, Turn

SIGNS, LONGEST, WORDS = 12, 16, 2
"""Different signs; signs of the longest way; words to choose from, twice at every sign."""
Array = NDArray[Any]
SAID = Message("assistant", "")


@dataclass(frozen=True, slots=True)
class World:
    """A kind of walk.

    Example:
        World(turns=8, goal=6, coin=1.0)     six signs in at most eight turns, and a coin that is tossed at the start
    """

    turns: int
    """What an attempt has: it ends at the goal or after so many."""
    goal: int
    """Signs on the way. An attempt is paid 1 / goal for each that it passes."""
    slip: float = 0.0
    """Chance that a right move leads nowhere."""
    slips: Literal["all", "early", "late"] = "all"
    """In which turns: all, or those of one half."""
    coin: float = 0.0
    """Paid beside, for nothing, with probability 1/2."""
    tossed: Literal["first", "last"] = "first"
    """With which turn of the attempt."""
    pay: Literal["turns", "end"] = "turns"
    """Whether all this is paid in its turn, or all of it with the last. The total of an attempt is the same."""

    def slips_in(self, turn: int) -> float:
        early = turn < self.turns / 2
        return self.slip if self.slips == "all" or (self.slips == "early") == early else 0.0


def prompt_of(sign: Array, left: Array, goal: int) -> Array:
    """The number of a prompt: a sign with so many signs left, this one included."""
    number: Array = sign * goal + left - 1
    return number


@cache
def messages(goal: int) -> list[Message]:
    """What a prompt says, by number."""
    return [Message("user", f"sign {sign}, {left} to go") for sign in range(SIGNS) for left in range(1, goal + 1)]


def right_words(sign: Array) -> tuple[Array, Array]:
    """Which of the first and of the second words are right at a sign."""
    return sign % 2, sign // 2 % 2


class Small(nn.Module):
    """A sign, what is left and the word before to logits of the next word, or to a value: one hidden layer of 64.

    Its last layer begins at 0: every word is as likely, every value is 0.
    """

    def __init__(self, outputs: int, goal: int, hidden: int = 64) -> None:
        super().__init__()
        self.signs = nn.Embedding(SIGNS, hidden)
        self.left = nn.Embedding(LONGEST, hidden)
        self.words = nn.Embedding(WORDS + 1, hidden)
        self.layer = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        numbers = torch.arange(SIGNS * goal)
        self.register_buffer("sign_of", (numbers // goal)[:, None])
        self.register_buffer("left_of", (numbers % goal)[:, None])

    def forward(self) -> Tensor:
        """[P, 1 + WORDS, outputs] before the first word, and after each of the first words."""
        seen = self.signs(self.sign_of) + self.left(self.left_of) + self.words.weight
        found: Tensor = self.head(torch.relu(self.layer(torch.tanh(seen))))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """What a version of the weights says."""

    version: int
    logprobs: Array
    """[P, 1 + WORDS, WORDS] of the first word, and of the second after each of the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Attempts, turn by turn. A attempts, T turns; what comes after the last turn of an attempt means nothing."""

    prompts: Array
    """[A, T]"""
    words: Array
    """[A, T, 2]"""
    logprobs: Array
    """[A, T, 2]"""
    is_right: Array
    """[A, T] whether the right words were said."""
    rewards: Array
    """[A, T]"""
    turns: Array
    """[A] how many."""
    passed: Array
    """[A] signs."""

    @property
    def lived(self) -> Array:
        """[A, T] whether the attempt had this turn."""
        had: Array = np.arange(self.prompts.shape[1]) < self.turns[:, None]
        return had

    def shares(self, world: World) -> dict[str, float]:
        """Attempts that came to the goal; the share of the way; the share of right moves."""
        return {
            "reached": float((self.passed == world.goal).mean()),
            "way": float(self.passed.mean() / world.goal),
            "right": float(self.is_right[self.lived].mean()),
        }


def ways_of(world: World, count: int, random: np.random.Generator) -> Array:
    """[count, goal] the signs of some tasks."""
    return random.integers(0, SIGNS, (count, world.goal))


def play(world: World, policy: Policy, ways: Array, random: np.random.Generator, greedy: bool = False) -> Played:
    """An attempt at each of the ways, [A, goal] signs."""
    size, turns = len(ways), world.turns
    chances, luck, coins = random.random((size, turns, 2)), random.random((size, turns)), random.random(size) < 0.5
    passed, lasted = np.zeros(size, int), np.zeros(size, int)
    prompts, words, logprobs = np.zeros((size, turns), int), np.zeros((size, turns, 2), int), np.zeros((size, turns, 2))
    is_right, rewards = np.zeros((size, turns), bool), np.zeros((size, turns))
    who = np.arange(size)
    for turn in range(turns):
        alive = passed < world.goal
        signs = ways[who, np.minimum(passed, world.goal - 1)]
        seen = prompt_of(signs, np.maximum(world.goal - passed, 1), world.goal)
        first = drawn(policy.logprobs[seen, 0], chances[:, turn, 0], greedy)
        second = drawn(policy.logprobs[seen, 1 + first], chances[:, turn, 1], greedy)
        good = right_words(signs)
        right = (first == good[0]) & (second == good[1])
        moves = alive & right & (luck[:, turn] >= world.slips_in(turn))
        passed, lasted = passed + moves, lasted + alive
        ends = alive & ((passed == world.goal) | (turn == turns - 1))
        tossed = ends if world.tossed == "last" else np.full(size, turn == 0)
        prompts[:, turn], words[:, turn], is_right[:, turn] = seen, np.stack([first, second], 1), right
        logprobs[:, turn, 0] = policy.logprobs[seen, 0, first]
        logprobs[:, turn, 1] = policy.logprobs[seen, 1 + first, second]
        rewards[:, turn] = moves / world.goal + world.coin * (tossed & coins)
    if world.pay == "end":
        totals, rewards = rewards.sum(1), np.zeros((size, turns))
        rewards[who, lasted - 1] = totals
    return Played(prompts, words, logprobs, is_right, rewards, lasted, passed)


def drawn(logprobs: Array, chances: Array, greedy: bool) -> Array:
    """A word for each row."""
    if greedy:
        best: Array = logprobs.argmax(-1)
        return best
    return np.minimum((np.exp(logprobs).cumsum(-1) < chances[:, None]).sum(-1), WORDS - 1)


def groups_of(world: World, played: Played, version: int, size: int) -> tuple[Group, ...]:
    """The attempts as values of turnwise, `size` after another in a group."""
    lived = played.lived
    seen, said = played.prompts[lived].astype(np.int32), messages(world.goal)
    turns = zip(
        list(seen[:, None]),
        list(played.words[lived].astype(np.int32)),
        list(played.logprobs[lived].astype(np.float32)),
        played.rewards[lived].tolist(),
        [(said[number],) for number in np.roll(seen, -1).tolist()],
        strict=True,
    )
    versions = np.full(2, version, np.int32)
    attempts = [attempt_of([next(turns) for _ in range(count)], versions) for count in played.turns.tolist()]
    starts = range(0, len(attempts), size)
    return tuple(Group(Task(f"walk-{start}", "walk"), tuple(attempts[start : start + size])) for start in starts)


def attempt_of(made: list[tuple[Array, Array, Array, float, tuple[Message, ...]]], versions: Array) -> Trajectory:
    """An attempt and its turns, made without the checks of their constructors, which would take most of a run."""
    turns = []
    for number, (prompt, action, logprobs, reward, heard) in enumerate(made):
        turns.append(
            unchecked(
                Turn,
                prompt=prompt,
                action=action,
                logprobs=logprobs,
                versions=versions,
                stop=StopReason.length,
                reward=reward,
                said=SAID,
                heard=heard if number + 1 < len(made) else (),
                broke=Break.history if number else Break.none,
            )
        )
    return unchecked(Trajectory, turns=tuple(turns), status=Status.finished, outcome=0.0, seat=0)


def unchecked(kind: Any, **fields: Any) -> Any:
    value = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value
