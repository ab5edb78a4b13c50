"""reasoning-gym: questions from generators. The model answers once, and the question's generator scores the answer.

Some generators give wrong answers a small score. An attempt succeeds if its score reaches rollout.success_threshold,
which is 1.0; the mark `correct` is 1 if the score is at least 1. An answer that cannot be read is a wrong answer: it is
paid 0, and the mark `stopped` is 1 if scoring it took too much time or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from turnwise.envs.adapters.adapter import Adapter, unknown
from turnwise.envs.adapters.reasoning_gym_scoring import read_as_data, score_apart
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task


class ReasoningGym(Adapter):
    """A question.

    Example:
        user: State the final answer to the following arithmetic problem: 4 + 3 =
        assistant: <answer>7</answer>      -> outcome 1
    """

    library = "reasoning_gym"
    example = "reasoning_gym:chain_sum"

    def __init__(self, options: Mapping[str, Any] | None = None, prompt: str = "default") -> None:
        """options: arguments of the generator. prompt: the name of a system prompt of the library, or empty."""
        self.options = dict(options or {})
        self.prompt = prompt

    @classmethod
    def warm(cls) -> None:
        super().warm()
        read_as_data()

    def check(self) -> None:
        """Score the generator's own answer too: a scorer that fails must not turn every answer into a wrong one."""
        from reasoning_gym.factory import DATASETS

        if self.name not in DATASETS:
            raise unknown("reasoning_gym has no generator", self.name, DATASETS)
        self.open(Task("check", self.name, {"seed": 0}))
        if self.entry["answer"] is not None:
            self.questions.score_answer(self.entry["answer"], self.entry)

    def open(self, task: Task) -> Reply:
        import reasoning_gym
        from reasoning_gym.utils import SYSTEM_PROMPTS

        if self.prompt and self.prompt not in SYSTEM_PROMPTS:
            raise unknown("env.settings.prompt: reasoning_gym has no prompt", self.prompt, SYSTEM_PROMPTS)
        self.questions = reasoning_gym.create_dataset(self.name, seed=task.data["seed"], size=1, **self.options)
        self.entry = self.questions[0]
        system = (Message("system", SYSTEM_PROMPTS[self.prompt].strip()),) if self.prompt else ()
        return Reply((*system, Message("user", self.entry["question"])))

    def step(self, message: Message) -> Reply:
        from reasoning_gym.utils import extract_answer

        tagged = extract_answer(message.content)
        answer = message.content.strip() if tagged is None else tagged
        score, stopped = score_apart(lambda: self.questions.score_answer(answer, self.entry))
        return Reply(finished=True, outcome=score, marks={"correct": float(score >= 1.0), "stopped": float(stopped)})

    def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> str:
        """The generator's answer; with probability `noise` the answer to another question."""
        if random.random() < noise:
            import reasoning_gym

            other_questions = reasoning_gym.create_dataset(
                self.name, seed=random.getrandbits(31), size=1, **self.options
            )
            return f"<answer>{other_questions[0]['answer']}</answer>"
        return f"<answer>{self.entry['answer']}</answer>"
