"""skyrl-gym: the environments of SkyRL, on rows of a data set in SkyRL's form (`env.data`).

Rewards are paid turn by turn. Where an environment rewrites an action (`postprocessed_action`), the model sees the
rewritten one from then on, and its own tokens are what is trained. Text that is made of sets depends on how Python
hashes, which is the same in every process here.
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
    task_fields: ClassVar[dict[str, Any]] = {"prompt": list[dict[str, str]], "reward_spec": dict[str, Any]}

    def __init__(self, config: Mapping[str, Any] | None = None, max_turns: int = 0) -> None:
        """config: what SkyRL has under environment.skyrl_gym for this environment, for instance db_path of text2sql.
        max_turns: how many the environment allows; 0 leaves it to the row."""
        self.config = dict(config or {})
        self.max_turns = max_turns

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        from skyrl_gym.envs.registration import registry

        found: Mapping[str, Any] = registry
        return found

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name in ("gsm8k", "gsm8k_multi_turn")

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 0) -> Iterator[Task]:
        """The library has none; they are rows that the user has."""
        raise ValueError(
            f'skyrl_gym:{cls.name} has no tasks of its own; set env.data = "rows.jsonl", with prompt and reward_spec'
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
        row.setdefault("extra_info", {})
        self.game = skyrl_gym.make(self.name, env_config=self.config_value(), extras=row)
        messages, _ = self.game.init(prompt)
        self.shown = list(messages_of(messages))
        return Reply(tuple(self.shown))

    def config_value(self) -> Any:
        """The environment's own dataclass for its settings, where its module has one."""
        module = importlib.import_module(self.registry()[self.name].entry_point.partition(":")[0])
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                known = [field.name for field in dataclasses.fields(value)]
                if wrong := [name for name in self.config if name not in known]:
                    raise unknown(f"env.settings.config: {self.name} has no setting", wrong[0], known)
                return value(**self.config)
        return SimpleNamespace(**self.config)

    def step(self, message: Message) -> Reply:
        made = self.game.step(message.content)
        heard = messages_of(made["observations"])
        rewritten = made.get("postprocessed_action")
        said = message if rewritten is None else Message("assistant", rewritten)
        self.shown += [said, *heard]
        if made["done"]:
            return Reply(heard, reward=float(made["reward"]), finished=True, marks=numbers(self.game.get_metrics()))
        history = None if said.content == message.content else tuple(self.shown)
        return Reply(heard, reward=float(made["reward"]), history=history)

    def close(self) -> None:
        if hasattr(self, "game"):
            self.game.close()

    def demonstrate(self, noise: float, random: Random) -> str:
        """The answer; with probability `noise` any number."""
        return f"#### {random.randint(0, 99) if random.random() < noise else self.game.ground_truth}"


def messages_of(given: Any) -> tuple[Message, ...]:
    return tuple(Message(str(one["role"]), str(one["content"])) for one in given)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, Real)}
