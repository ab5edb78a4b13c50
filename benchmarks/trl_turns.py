"""TRL's GRPOTrainer where an environment rewrites history, so that an attempt is no single sequence.

TRL trains one sequence per attempt. A user whose prompts do not begin with the turn before can train on what the policy
has not seen, change the game, or replace one method of the trainer: `_generate_and_score_completions`, which makes a
batch. Here it makes a row of every turn, with the advantage of its attempt; loss, micro-batches, optimizer and schedule
stay TRL's. All attempts of a step are played together, turn by turn, and what samples a turn has variants:
    generate     trainer._generate_single_turn, which computes every prompt anew
    shared       model.generate, going on from keys and values of what a task's prompts have in common, computed once
    lean         shared, without the rows of groups whose attempts are all paid alike: they have no gradient
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl_trainer import Chat, Tally, Whole

from turnwise.envs.base import Environment
from turnwise.messages import Message
from turnwise.rollout.limits import Limits
from turnwise.types import Task

EPSILON = 1e-4
"""What TRL adds to the standard deviation of a group's rewards."""


@dataclass(slots=True)
class Played:
    """An attempt so far: its turns, and the prompt of the next."""

    environment: Environment
    known: list[int] = field(default_factory=list)
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt, action)"""
    reward: float = 0.0
    ended: bool = False
    messages: tuple[Message, ...] = ()


# ---------------------------------------------------------------- sampling a turn


class Shared:
    """Samples with model.generate, from a cache of every task's first prompt. Later prompts of a task begin like the
    first and part from it some tokens before its end; what is computed anew begins there."""

    def __init__(self, trainer: Any, tally: Tally) -> None:
        self.trainer = trainer
        self.tally = tally
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.gap: int = trainer._tokenizer.pad_token_id
        self.heads: dict[int, list[int]] = {}
        """First prompts, by attempt."""

    @torch.no_grad()
    def __call__(self, live: Sequence[Played]) -> list[list[int]]:
        if not self.heads:
            self.open(live)
        heads = [self.heads[id(attempt)] for attempt in live]
        pairs = list(zip(heads, (attempt.known for attempt in live), strict=True))
        anew = max(len(head) - min(common(head, prompt), len(prompt) - 1) for head, prompt in pairs)
        tails = [prompt[len(head) - anew :] for head, prompt in pairs]
        rows = torch.tensor([self.rows[tuple(head)] for head in heads])
        ids, mask = padded(tails, self.gap, left=True)
        ids = torch.cat([self.ids[rows, : self.width - anew], ids], 1)
        mask = torch.cat([self.mask[rows, : self.width - anew], mask], 1)
        self.tally.prefilled += len(live) * max(map(len, tails))
        whole = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache_of(rows, self.width - anew),
            generation_config=self.trainer.generation_config,
        )
        new = whole[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(self.trainer.eos_token_ids))
        own = (ended.cumsum(1) - ended.long()) == 0
        return [row[kept].tolist() for row, kept in zip(new, own, strict=True)]

    def open(self, attempts: Sequence[Played]) -> None:
        """Compute each of the attempts' prompts once."""
        self.heads = {id(attempt): attempt.known for attempt in attempts}
        different = list(dict.fromkeys(map(tuple, self.heads.values())))
        self.rows = {head: row for row, head in enumerate(different)}
        self.ids, self.mask = padded(different, self.gap, left=True)
        self.width = self.ids.shape[1]
        self.tally.prefilled += self.ids.numel()
        places = (self.mask.cumsum(1) - 1).clamp(min=0)
        found = self.model(input_ids=self.ids, attention_mask=self.mask, position_ids=places, use_cache=True)
        self.layers = [(layer.keys, layer.values) for layer in found.past_key_values.layers]

    def cache_of(self, rows: Tensor, width: int) -> Any:
        """A cache of its own with the beginnings of these rows."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self.layers):
            keys, values = (states[rows, :, :width] for states in layer)
            cache.update(keys, values, number)
        return cache


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many tokens both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def padded(rows: Sequence[Sequence[int]], gap: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """(tokens, mask) of rows as wide as the longest."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), gap)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, where] = torch.tensor(row)
        mask[place, where] = 1
    return ids, mask


SAMPLERS: dict[str, Callable[[Any, Tally], Whole | Shared]] = {"generate": Whole, "shared": Shared, "lean": Shared}


# ---------------------------------------------------------------- attempts


class TurnRollout:
    """The `rollout_func`: one attempt for every prompt of a batch, which is the id of a task."""

    def __init__(
        self, variant: str, make: Callable[[], Environment], tasks: Mapping[str, Task], tokenizer: Any, limits: Limits
    ) -> None:
        self.variant = variant
        self.make = make
        self.tasks = tasks
        self.chat = Chat(tokenizer)
        self.limits = limits
        self.tally = Tally()

    def __call__(self, prompts: list[str], trainer: Any) -> list[Played]:
        began = time.process_time()
        sample = SAMPLERS[self.variant](trainer, self.tally)
        attempts = asyncio.run(self.play([self.tasks[prompt] for prompt in prompts], sample))
        self.tally.seconds += time.process_time() - began
        self.tally.rewards += sum(attempt.reward for attempt in attempts) / len(attempts)
        return attempts

    async def play(self, tasks: Sequence[Task], sample: Callable[[Sequence[Played]], list[list[int]]]) -> list[Played]:
        """All attempts, a turn of each at a time."""
        attempts = [Played(self.make()) for _ in tasks]
        for attempt, task in zip(attempts, tasks, strict=True):
            reply = await attempt.environment.open(task)
            self.show(attempt, reply.history or reply.messages)
        for _ in range(self.limits.max_turns):
            live = [attempt for attempt in attempts if not attempt.ended and self.room(attempt)]
            if not live:
                break
            for attempt, action in zip(live, sample(live), strict=True):
                said = self.chat.said(action)
                reply = await attempt.environment.step(said)
                attempt.turns.append((attempt.known, action))
                attempt.reward += reply.reward + reply.outcome
                attempt.ended = reply.finished
                if not reply.finished:
                    grown = (*attempt.messages, said, *reply.messages)
                    self.show(attempt, grown if reply.history is None else reply.history)
        for attempt in attempts:
            await attempt.environment.close()
        return attempts

    def show(self, attempt: Played, messages: tuple[Message, ...]) -> None:
        attempt.messages = messages
        attempt.known = self.chat.opening(messages)

    def room(self, attempt: Played) -> bool:
        """Whether there is room for another action, which is then as much as the recipe's limits leave."""
        return self.limits.room_for_action(len(attempt.known), self.limits.max_trajectory_tokens) > 0


class Recorded(TurnRollout):
    """Gives attempts that were recorded before, in place of new ones."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.recorded = rows
        self.variant = "recorded"
        self.tally = Tally()

    def __call__(self, prompts: list[str], trainer: Any) -> list[Played]:
        if [row["task"] for row in self.recorded] != prompts:
            raise ValueError("the recorded attempts are at other tasks, or at these in another order")
        environment: Any = None
        return [Played(environment, turns=row["turns"], reward=row["reward"]) for row in self.recorded]


# ---------------------------------------------------------------- the batch


def advantages_of(rewards: Tensor, attempts: int) -> Tensor:
    """As TRL standardises rewards within groups."""
    groups = rewards.view(-1, attempts)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + EPSILON)).flatten()


def batch_of(played: Sequence[Played], attempts: int, parts: int, gap: int, *, lean: bool = False) -> dict[str, Tensor]:
    """A row for every turn, and rows without weight that fill the last of `parts` micro-batches. `lean` leaves turns
    without an advantage out, and still counts their tokens: the gradient is the same."""
    advantages = advantages_of(torch.tensor([attempt.reward for attempt in played]), attempts)
    everything = [(turn, place) for place, attempt in enumerate(played) for turn in attempt.turns]
    trained = [(turn, place) for turn, place in everything if not lean or advantages[place] != 0.0]
    turns = [turn for turn, _ in trained]
    owners = torch.tensor([place for _, place in trained], dtype=torch.long)
    spare = -len(turns) % parts if turns else parts
    rows = [*turns, *[everything[0][0]] * spare]
    prompts, prompt_mask = padded([prompt for prompt, _ in rows], gap, left=True)
    actions, action_mask = padded([action for _, action in rows], gap)
    weights = torch.ones_like(action_mask)
    weights[len(turns) :] = 0
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": actions,
        "completion_mask": action_mask,
        "tool_mask": weights,
        "advantages": torch.cat([advantages[owners], torch.zeros(spare)]),
        "num_items_in_batch": torch.tensor(sum(len(action) for (_, action), _ in everything)),
    }


def turn_trainer() -> type[Any]:
    """The trainer's class, which imports TRL."""
    from trl import GRPOTrainer

    class TurnTrainer(GRPOTrainer):
        """A GRPOTrainer that trains on turns."""

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
            played = self.rollout_func([row["prompt"] for row in inputs], self)
            parts, gap = self.args.steps_per_generation, self._tokenizer.pad_token_id
            batch = batch_of(played, self.num_generations, parts, gap, lean=self.rollout_func.variant == "lean")
            tally = self.rollout_func.tally
            tally.sampled += int(batch["num_items_in_batch"])
            tally.trained += batch["prompt_ids"].numel() + batch["completion_ids"].numel()
            return batch

    return TurnTrainer
