"""textworld: text adventures, generated from a seed, compiled once and stored in the cache.

The library's score only grows. The reward of a turn is the increase of the score divided by the maximum score, so the
rewards of a won game sum to 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from turnwise.data.cache import cache_folder, made_once
from turnwise.envs.adapters.adapter import Adapter, unknown, user_message
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

CUSTOM = {"nb_rooms": 2, "nb_objects": 4, "quest_length": 3}
CHALLENGES: dict[str, dict[str, Any]] = {
    "tw-coin_collector": {"level": 5},
    "tw-simple": {"rewards": "dense", "goal": "brief", "test": False},
    "tw-treasure_hunter": {"level": 5},
}
"""Default options of the challenges."""
OVER = re.compile(r"\n\s*\*\*\* The End \*\*\*.*", re.DOTALL)
"""The question of the interpreter after the end of the game."""
STATUS = re.compile(r"\n>\s+-= .*=-\s*\d+/\d+\s*$")
"""The interpreter's prompt and its status line."""
GAPS = re.compile(r"\n{3,}")


class TextWorld(Adapter):
    """A game.

    Example:
        user: Your objective: open the safe... -= Vault =- ...      assistant: open safe
        user: You open the safe, revealing a lightbulb.             assistant: take lightbulb from safe      -> reward 1
    """

    library = "textworld"
    install = "pip install textworld==1.7.0"
    example = "textworld:custom"

    def __init__(self, options: Mapping[str, Any] | None = None, show_commands: bool = False) -> None:
        """options: options of the generator: nb_rooms, nb_objects and quest_length for "custom", otherwise the settings
        of the library's challenge. show_commands: list the possible commands every turn."""
        self.options = dict(options or {})
        self.show_commands = show_commands

    def check(self) -> None:
        names = ("custom", *CHALLENGES)
        if self.name not in names:
            raise unknown("textworld has no game", self.name, names)
        import textworld

        custom = textworld.GameOptions()
        defaults = CUSTOM if self.name == "custom" else CHALLENGES[self.name]
        for key in self.options:
            if key not in defaults and not (self.name == "custom" and hasattr(custom, key)):
                raise unknown(f"env.settings.options: {self.name} has no option", key, defaults)

    def open(self, task: Task) -> Reply:
        import textworld

        file = game_file(self.name, self.options, task.data["seed"])
        wanted = textworld.EnvInfos(
            feedback=True,
            won=True,
            lost=True,
            score=True,
            max_score=True,
            objective=True,
            description=True,
            admissible_commands=True,
            policy_commands=True,
        )
        self.game = textworld.start(str(file), wanted)
        self.state = self.game.reset()
        self.score = 0
        return Reply(user_message(f"{self.state.objective}\n\n{plain(self.state.description)}{self.commands()}"))

    def step(self, message: Message) -> Reply:
        command = message.content.strip().partition("\n")[0]
        self.state, score, over = self.game.step(command)
        reward = (score - self.score) / max(1, self.state.max_score)
        self.score = score
        text = plain(self.state.feedback)
        if over:
            return Reply(user_message(text), reward=reward, finished=True, marks={"won": float(self.state.won)})
        return Reply(user_message(text + self.commands()), reward=reward)

    def close(self) -> None:
        if hasattr(self, "game"):
            self.game.close()

    def commands(self) -> str:
        """The list of possible commands; empty if it is not shown."""
        return f"\n\nYou can: {', '.join(self.state.admissible_commands)}" if self.show_commands else ""

    def demonstrate(self, noise: float, random: Random) -> str:
        """The next command of a winning policy; with probability `noise` any possible command."""
        possible = self.state.admissible_commands
        if random.random() < noise or not self.state.policy_commands:
            return str(random.choice(possible)) if possible else "look"
        return str(self.state.policy_commands[0])


def plain(text: str) -> str:
    """The text of a game without the interpreter's additions and repeated empty lines."""
    return GAPS.sub("\n\n", OVER.sub("", STATUS.sub("", text)).strip())


def game_file(name: str, options: Mapping[str, Any], seed: int) -> Path:
    """The compiled game; it is made if it is not in the cache."""
    import textworld

    settings = {**(CUSTOM if name == "custom" else CHALLENGES[name]), **options}
    recipe = json.dumps([textworld.__version__, name, settings, seed], sort_keys=True)
    digest = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        game_options = textworld.GameOptions()
        game_options.seeds = seed % (1 << 31)
        game_options.path = str(folder / "game.z8")
        if name == "custom":
            for key, value in settings.items():
                setattr(game_options, key, value)
            textworld.make(game_options)
        else:
            from textworld.challenges import CHALLENGES as makers

            game = makers[name][1](settings, game_options)
            textworld.generator.compile_game(game, game_options)

    return made_once(cache_folder() / "textworld" / digest, make) / "game.z8"
