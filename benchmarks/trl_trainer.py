"""TRL's GRPOTrainer on a CPU, as one of its users would set it up to play a multi-turn environment.

Its own loop over tools cannot play these environments: an action that is no tool call ends an attempt there, and a tool
cannot. So attempts are made by a `rollout_func`, which plays all attempts of a batch together, turn by turn, and hands
back one sequence per attempt with a mask of what was sampled. What samples a turn has variants:
    generate     trainer._generate_single_turn, as its own loop over tools does: model.generate, every prompt anew
    continuous   the same with use_transformers_continuous_batching
    cached       model.generate, going on from the keys and values of the turn before
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from turnwise.envs.base import Environment, Reply
from turnwise.messages import Message
from turnwise.rollout.limits import Limits
from turnwise.types import Task

CONTINUOUS = {"page_size": 32, "num_blocks": 8192, "max_batch_tokens": 2048, "use_cuda_graph": False}
QUESTION = {"role": "user", "content": "question"}


# ---------------------------------------------------------------- conversations


class Chat:
    """A tokenizer with its chat template, as far as a conversation that only grows needs it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        self.opening = lru_cache(maxsize=1024)(self.render)
        self.observed = lru_cache(maxsize=4096)(self.render_observed)

    def apply(self, messages: Sequence[Mapping[str, str]], *, prompting: bool) -> list[int]:
        how = {"tokenize": True, "return_dict": False, "add_generation_prompt": prompting}
        return list(self.tokenizer.apply_chat_template(list(messages), **how))

    def render(self, messages: tuple[Message, ...]) -> list[int]:
        return self.apply([{"role": m.role, "content": m.content} for m in messages], prompting=True)

    def render_observed(self, messages: tuple[Message, ...]) -> list[int]:
        """What follows the end token of an action: found as TRL does, with a short conversation in place of the real
        one, cut at its last end token."""
        short = [QUESTION, {"role": "assistant", "content": ""}]
        before = self.apply(short, prompting=False)
        known = len(before) - before[::-1].index(self.end)
        longer = [*short, *({"role": m.role, "content": m.content} for m in messages)]
        return self.apply(longer, prompting=True)[known:]

    def said(self, action: list[int]) -> Message:
        text = action[:-1] if action and action[-1] == self.end else action
        return Message("assistant", self.tokenizer.decode(text, skip_special_tokens=False))


@dataclass(slots=True)
class Attempt:
    """An attempt so far: its prompt, and all tokens after that with a mask of those that were sampled."""

    environment: Environment
    prompt: list[int] = field(default_factory=list)
    completion: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    """Tokens between the last action and the next."""
    reward: float = 0.0
    ended: bool = False

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.completion]

    def listen(self) -> None:
        """Take what was heard into the conversation."""
        self.completion += self.heard
        self.sampled += [0] * len(self.heard)

    def act(self, action: list[int]) -> None:
        self.completion += action
        self.sampled += [1] * len(action)

    def take(self, reply: Reply, chat: Chat, closed: bool) -> None:
        """An answer of the environment; an action that was cut short is closed first."""
        self.reward += reply.reward + reply.outcome
        self.ended = reply.finished
        self.heard = ([] if closed else [chat.end]) + chat.observed(reply.messages)


# ---------------------------------------------------------------- sampling a turn


@dataclass(slots=True)
class Tally:
    """What a step has computed so far."""

    prefilled: int = 0
    """Prompt tokens, padding included."""
    sampled: int = 0
    trained: int = 0
    """Tokens of the batch that is trained on, padding included."""
    rewards: float = 0.0
    seconds: float = 0.0
    """CPU seconds of making attempts, where they are measured."""


class Begun(Protocol):
    """An attempt of which a sampler needs to know the tokens before its next action."""

    known: list[int]


class Whole:
    """Samples with TRL's own means, which compute every prompt from its beginning."""

    def __init__(self, trainer: Any, tally: Tally) -> None:
        self.trainer = trainer
        self.tally = tally

    def __call__(self, live: Sequence[Begun]) -> list[list[int]]:
        prompts = [attempt.known for attempt in live]
        self.tally.prefilled += len(live) * max(map(len, prompts))
        actions, _ = self.trainer._generate_single_turn(prompts, None, {}, self.trainer.num_generations)
        return [list(action) for action in actions]


class Cached:
    """Samples with model.generate and its cache of the turns before. Rows stay as they are, with what was heard
    appended to the right of gaps that the attention mask leaves out; those of attempts that ended are dropped."""

    def __init__(self, trainer: Any, tally: Tally) -> None:
        self.trainer = trainer
        self.tally = tally
        self.rows: list[Attempt] = []
        self.ids: Any
        self.mask: Any
        self.cache: Any

    @torch.no_grad()
    def __call__(self, live: Sequence[Attempt]) -> list[list[int]]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if self.rows:
            stay = torch.tensor([place for place, row in enumerate(self.rows) if any(row is one for one in live)])
            self.ids, self.mask = self.ids[stay], self.mask[stay]
            self.cache.batch_select_indices(stay)
            self.append([attempt.heard for attempt in live])
        else:
            from transformers import DynamicCache

            self.cache = DynamicCache(config=model.config)
            self.ids = self.mask = torch.zeros(len(live), 0, dtype=torch.long)
            self.append([attempt.prompt for attempt in live])
        self.rows = list(live)
        self.tally.prefilled += len(live) * (self.ids.shape[1] - self.cache.get_seq_length())
        whole = model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            generation_config=self.trainer.generation_config,
        )
        new = whole[:, self.ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(self.trainer.eos_token_ids))
        own = (ended.cumsum(1) - ended.long()) == 0
        self.ids, self.mask = whole, torch.cat([self.mask, own.long()], 1)
        return [row[mask].tolist() for row, mask in zip(new, own, strict=True)]

    def append(self, tokens: Sequence[list[int]]) -> None:
        """Tokens at the right end of every row, as wide as the most of them."""
        width = max(map(len, tokens))
        gap = self.trainer._tokenizer.pad_token_id
        ids = [[gap] * (width - len(row)) + row for row in tokens]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in tokens]
        self.ids = torch.cat([self.ids, torch.tensor(ids)], 1)
        self.mask = torch.cat([self.mask, torch.tensor(mask)], 1)


VARIANTS: dict[str, Callable[[Any, Tally], Whole | Cached]] = {
    "generate": Whole,
    "continuous": Whole,
    "cached": Cached,
}


# ---------------------------------------------------------------- rollouts


class Rollout:
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

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        sample = VARIANTS[self.variant](trainer, self.tally)
        attempts = asyncio.run(self.play([self.tasks[prompt] for prompt in prompts], sample))
        return self.counted(attempts)

    def counted(self, attempts: Sequence[Attempt]) -> dict[str, Any]:
        """What the trainer wants to know of attempts; the logprobs it computes itself."""
        width = max(len(a.prompt) for a in attempts) + max(len(a.completion) for a in attempts)
        self.tally.trained += len(attempts) * width
        self.tally.sampled += sum(sum(attempt.sampled) for attempt in attempts)
        self.tally.rewards += sum(attempt.reward for attempt in attempts) / len(attempts)
        return {
            "prompt_ids": [attempt.prompt for attempt in attempts],
            "completion_ids": [attempt.completion for attempt in attempts],
            "env_mask": [attempt.sampled for attempt in attempts],
            "logprobs": None,
            "paid": [attempt.reward for attempt in attempts],
        }

    async def play(
        self, tasks: Sequence[Task], sample: Callable[[Sequence[Attempt]], list[list[int]]]
    ) -> list[Attempt]:
        """All attempts, a turn of each at a time."""
        attempts = [Attempt(self.make()) for _ in tasks]
        for attempt, task in zip(attempts, tasks, strict=True):
            attempt.prompt = self.chat.opening((await attempt.environment.open(task)).messages)
        live = attempts
        for _ in range(self.limits.max_turns):
            live = [attempt for attempt in live if not attempt.ended and self.room(attempt)]
            if not live:
                break
            for attempt in live:
                attempt.listen()
            for attempt, action in zip(live, sample(live), strict=True):
                attempt.act(action)
                reply = await attempt.environment.step(self.chat.said(action))
                attempt.take(reply, self.chat, closed=action[-1:] == [self.chat.end])
        for attempt in attempts:
            await attempt.environment.close()
        return attempts

    def room(self, attempt: Attempt) -> bool:
        """Whether there is room for another action. It may be cut short only by `max_action_tokens`: these workloads
        have limits in which a prompt that fits leaves room for a whole action."""
        prompt = len(attempt.prompt) + len(attempt.completion) + len(attempt.heard)
        return self.limits.room_for_action(prompt, self.limits.max_trajectory_tokens) > 0


class Replay(Rollout):
    """Gives attempts that were recorded before, in place of new ones."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self.tally = Tally()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if [row["task"] for row in self.rows] != prompts:
            raise ValueError("the recorded attempts are at other tasks, or at these in another order")
        return self.counted(
            [Attempt(None, r["prompt"], r["completion"], r["sampled"], [], r["reward"]) for r in self.rows]
        )


# ---------------------------------------------------------------- the trainer


def paid(paid: list[float], **others: Any) -> list[float]:
    """The reward function: what the environment paid."""
    return paid


def trainer_of(
    folder: str,
    tokenizer: Any,
    rollout: Any,
    order: Sequence[str],
    *,
    attempts: int,
    tasks_per_step: int,
    steps: int,
    learning_rate: float,
    clip: tuple[float, float],
    limits: Limits,
    micro_batch: int,
    attention: str,
    continuous: bool,
    callbacks: list[Any],
    out: str,
    seed: int,
    schedule: str = "constant",
    trainer: type[Any] | None = None,
) -> Any:
    """A GRPOTrainer whose every optimizer step is on new attempts at the next tasks in order; of another class where
    one is given."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    batch = attempts * tasks_per_step
    config = GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=attempts,
        max_completion_length=limits.max_trajectory_tokens,
        generation_kwargs={"max_new_tokens": limits.max_action_tokens},
        use_transformers_continuous_batching=continuous,
        # By itself it takes half of the machine's memory for its cache, and minutes to fill that with zeros.
        transformers_continuous_batching_config=CONTINUOUS if continuous else None,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=clip[0],
        epsilon_high=clip[1],
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type=schedule,
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return (trainer or GRPOTrainer)(
        model=model,
        reward_funcs=paid,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(order)}),
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=callbacks,
    )
