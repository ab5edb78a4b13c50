"""skyrl-gym: the environments of SkyRL, on rows of a data set in SkyRL's form or in verl's (`env.data`).

SkyRL has the right answer in `reward_spec`, verl in `reward_model`, and environments of the library read one or the
other; each row gets both. `extra_info` and all other fields are passed on.
Rewards are paid turn by turn. If an environment rewrites an action (`postprocessed_action`), later prompts have the
rewritten action, and training uses the tokens that the model sampled. Some texts are made from sets, whose order
depends on Python's hash seed; every process here has the same hash seed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from numbers import Real
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

from turnwise.envs.adapters.adapter import Registered, unknown
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task


class SkyRLGym(Registered):
    """A row of the data set.

    Example:
        {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_spec": {"ground_truth": "5"}}
        user: 2 + 3?      assistant: #### 5      -> reward 1
    """

    library = "skyrl_gym"
    example = "skyrl_gym:gsm8k"
    task_fields: ClassVar[dict[str, Any]] = {"prompt": list[dict[str, str]], "reward_spec|reward_model": dict[str, Any]}

    def __init__(self, config: Mapping[str, Any] | None = None, max_turns: int = 0) -> None:
        """config: the settings of this environment under environment.skyrl_gym in SkyRL, for instance db_path of
        text2sql. max_turns: how many turns the environment allows; 0 takes the number in the row."""
        self.config = dict(config or {})
        self.max_turns = max_turns

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        from skyrl_gym.envs.registration import registry

        environments: Mapping[str, Any] = registry
        return environments

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name in ("gsm8k", "gsm8k_multi_turn")

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 0) -> Iterator[Task]:
        """The library has no tasks: they are rows of the user's file."""
        raise ValueError(
            f'skyrl_gym:{cls.name} comes without tasks; set env.data = "rows.jsonl", with prompt and reward_spec or '
            "reward_model"
        )

    def check(self) -> None:
        super().check()
        self.config_value()

    def open(self, task: Task) -> Reply:
        import skyrl_gym

        row = dict(task.data)
        prompt = row.pop("prompt")
        if self.max_turns:
            row["max_turns"] = self.max_turns
        row["extra_info"] = row.get("extra_info") or {}
        answer = answer_of(row)
        row |= {"reward_spec": answer, "reward_model": answer}
        self.game = skyrl_gym.make(self.name, env_config=self.config_value(), extras=row)
        messages, _ = self.game.init(prompt)
        self.conversation = list(messages_of(messages))
        return Reply(tuple(self.conversation))

    def config_value(self) -> Any:
        """The settings as the dataclass of the environment's module, if it has one."""
        module = importlib.import_module(self.registry()[self.name].entry_point.partition(":")[0])
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                names = [field.name for field in dataclasses.fields(value)]
                if unknown_names := [name for name in self.config if name not in names]:
                    raise unknown(f"env.settings.config: {self.name} has no setting", unknown_names[0], names)
                return value(**self.config)
        return SimpleNamespace(**self.config)

    def step(self, message: Message) -> Reply:
        result = self.game.step(message.content)
        observations = messages_of(result["observations"])
        rewritten = result.get("postprocessed_action")
        action = message if rewritten is None else Message("assistant", rewritten)
        self.conversation += [action, *observations]
        if result["done"]:
            return Reply(
                observations, reward=float(result["reward"]), finished=True, marks=numbers(self.game.get_metrics())
            )
        history = None if action.content == message.content else tuple(self.conversation)
        return Reply(observations, reward=float(result["reward"]), history=history)

    def close(self) -> None:
        if hasattr(self, "game"):
            self.game.close()

    def demonstrate(self, noise: float, random: Random) -> str:
        """The answer; with probability `noise` a random number."""
        return f"#### {random.randint(0, 99) if random.random() < noise else self.game.ground_truth}"


def answer_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The right answer, wherever the row has it; numbers as text, which is what environments compare."""
    answer = dict(row.get("reward_spec") or row.get("reward_model") or {})
    if "ground_truth" not in answer:
        raise ValueError("a row needs ground_truth in reward_spec or reward_model")
    truth = answer["ground_truth"]
    return answer | {"ground_truth": str(truth) if isinstance(truth, (int, float)) else truth}


def messages_of(messages: Any) -> tuple[Message, ...]:
    return tuple(Message(str(message["role"]), str(message["content"])) for message in messages)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, Real)}
