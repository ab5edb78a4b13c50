"""gymnasium: environments with discrete actions, described and played in words. MiniGrid shows a picture of its view.

Rewards are paid turn by turn; terminated and truncated both end the attempt, and a mark says which it was.
"""

from __future__ import annotations

import importlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from turnwise.envs.adapters.adapter import Adapter, unknown, user_message
from turnwise.envs.adapters.gymnasium_labels import PARTS, action_names, in_words, short_name
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task

GRIDS = ("MiniGrid-", "BabyAI-")
"""Prefixes of minigrid's names."""
OPEN_ROOMS = ("MiniGrid-Empty-", "MiniGrid-FourRooms-", "MiniGrid-SimpleCrossing", "MiniGrid-LavaCrossing")
"""Grids whose only task is to walk to the goal."""
LETTERS = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#", "goal": "G", "lava": "~", "agent": "^", "box": "X"}
LEGEND = {"^": "you, looking up", "#": "wall", ".": "free", "G": "goal", "~": "lava", "?": "unseen"}
LEGEND |= {"D": "door", "K": "key", "B": "ball", "X": "box"}
THINGS = ("door", "key", "ball", "box")
STATES = ("open", "closed", "locked")
HERE = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Right, down, left, up, as MiniGrid counts directions."""


class Gymnasium(Adapter):
    """An environment with discrete actions.

    Example:
        user: Mission: get to the green goal square...      assistant: forward
        user: ...                                           assistant: right      -> reward 0.95
    """

    library = "gymnasium"
    example = "gymnasium:MiniGrid-Empty-5x5-v0"

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        actions: tuple[str, ...] = (),
        observations: tuple[str, ...] = (),
    ) -> None:
        """options: arguments of `gymnasium.make`. actions: the names of the actions in order; without them, actions
        have the names that the environment or gymnasium's documentation has, or numbers. observations: the names of the
        parts of an observation in order, likewise. The number of an action is understood too."""
        self.options = dict(options or {})
        self.actions = tuple(actions)
        self.observations = tuple(observations)

    @classmethod
    def warm(cls) -> None:
        import gymnasium

        with suppress(ModuleNotFoundError):  # its import registers its environments
            importlib.import_module("minigrid")
        spec = gymnasium.registry.get(cls.name)
        if spec is not None and isinstance(spec.entry_point, str):
            importlib.import_module(spec.entry_point.partition(":")[0])

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name.startswith(OPEN_ROOMS)

    def check(self) -> None:
        import gymnasium

        try:
            gymnasium.spec(self.name)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            if self.name.startswith(GRIDS) and not any(name.startswith(GRIDS) for name in gymnasium.registry):
                raise ValueError(f"{self.name} needs minigrid: {self.install}") from None
            raise unknown(f"gymnasium ({type(error).__name__}) cannot make", self.name, gymnasium.registry) from None
        self.open(Task("check", self.name, {"seed": 0}))

    def open(self, task: Task) -> Reply:
        import gymnasium

        game = gymnasium.make(self.name, **self.options)
        if "ansi" in game.metadata.get("render_modes", ()) and "render_mode" not in self.options:
            game = gymnasium.make(self.name, render_mode="ansi", **self.options)
        if not isinstance(game.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self.name} takes {game.action_space}, which cannot be named; choose discrete actions")
        self.game, self.first = game, int(game.action_space.start)
        self.words = self.words_of(int(game.action_space.n))
        observation, _ = game.reset(seed=task.data["seed"])
        self.parts = self.parts_of(observation)
        view = self.view(observation)
        legend = f"\n{legend_of(view)}" if self.name.startswith(GRIDS) else ""
        return Reply(user_message(f"{view}{legend}\nSay one of: {', '.join(self.words)}."))

    def words_of(self, number: int) -> tuple[str, ...]:
        """The names of the actions."""
        if self.actions and len(self.actions) != number:
            raise ValueError(f"env.settings.actions names {len(self.actions)} actions, but {self.name} has {number}")
        if self.actions:
            return tuple(word.lower() for word in self.actions)
        names = action_names(self.name, self.game.unwrapped)[:number]  # some grids allow the first few only
        if len(set(names)) == number:
            return names
        return tuple(str(self.first + index) for index in range(number))

    def parts_of(self, observation: Any) -> tuple[str, ...]:
        """The names of the parts of an observation; empty if they have none."""
        parts = self.observations or PARTS.get(short_name(self.name), ())
        number = len(observation) if isinstance(observation, tuple) or getattr(observation, "ndim", 0) == 1 else 0
        if self.observations and len(parts) != number:
            raise ValueError(
                f"env.settings.observations names {len(parts)} parts, but observations of {self.name} have {number}"
            )
        return parts if len(parts) == number else ()

    def step(self, message: Message) -> Reply:
        numbers = [str(self.first + index) for index in range(len(self.words))]
        said = (*self.words, *numbers)
        chosen = last_word(message.content, said)
        if chosen is None:
            return Reply(user_message(f"Say one of: {', '.join(self.words)}."))
        action = self.first + said.index(chosen) % len(self.words)
        observation, reward, terminated, truncated, _ = self.game.step(action)
        messages = user_message(self.view(observation))
        if not terminated and not truncated:
            return Reply(messages, reward=float(reward))
        return Reply(messages, reward=float(reward), finished=True, marks={"truncated": float(truncated)})

    def close(self) -> None:
        if hasattr(self, "game"):
            self.game.close()

    def view(self, observation: Any) -> str:
        """An observation in words: MiniGrid's picture, the environment's text, or its numbers."""
        if isinstance(observation, Mapping) and {"image", "mission"} <= set(observation):
            return grid_view(self.game.unwrapped, observation)
        if isinstance(observation, str):
            return observation
        if self.game.render_mode == "ansi":
            return COLOUR.sub("", HERE.sub(r"[\1]", str(self.game.render())))
        return in_words(observation, self.parts)

    def demonstrate(self, noise: float, random: Random) -> str:
        """The next move on the shortest path to the goal; with probability `noise` a random move."""
        if random.random() < noise:
            return random.choice(("left", "right", "forward"))
        return first_move(self.game.unwrapped)


def last_word(text: str, words: Sequence[str]) -> str | None:
    """The action that a text names last."""
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    matches = re.findall(rf"(?<![\w-])(?:{pattern})(?!\w)", text.lower())
    return matches[-1] if matches else None


# ---------------------------------------------------------------- MiniGrid


def grid_view(grid_world: Any, observation: Mapping[str, Any]) -> str:
    """The mission, a picture of the visible cells with the agent looking up, and a list of the visible things."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    image = observation["image"]
    width, height = image.shape[:2]
    middle, bottom = width // 2, height - 1
    things = []
    rows = []
    for y in range(height):
        row = ""
        for x in range(width):
            kind, colour, state = (int(number) for number in image[x, y])
            thing = IDX_TO_OBJECT[kind]
            row += "^" if (x, y) == (middle, bottom) else LETTERS.get(thing, thing[0].upper())
            if thing in THINGS and (x, y) != (middle, bottom):
                detail = f"{STATES[state]} " if thing == "door" else ""
                things.append(f"{detail}{IDX_TO_COLOR[colour]} {thing} {relative_position(x - middle, bottom - y)}")
        rows.append(row)
    lines = [f"Mission: {observation['mission']}", *rows]
    if things:
        lines.append("In view: " + "; ".join(things))
    if grid_world.carrying is not None:
        lines.append(f"You carry: {grid_world.carrying.color} {grid_world.carrying.type}")
    return "\n".join(lines)


def legend_of(view: str) -> str:
    """What the characters of a picture mean: those that it has, and those that may come into view."""
    _, *picture = view.splitlines()
    rows = [line for line in picture if not line.startswith(("In view: ", "You carry: "))]
    shown = [f"{letter} {meaning}" for letter, meaning in LEGEND.items() if any(letter in row for row in rows)]
    return f"Legend: {', '.join(shown)}."


def relative_position(right: int, ahead: int) -> str:
    side = f"{abs(right)} {'right' if right > 0 else 'left'}" if right else ""
    return " and ".join(part for part in (f"{ahead} ahead" if ahead else "", side) if part) or "here"


def first_move(grid_world: Any) -> str:
    """The first move on the shortest path to the goal, by breadth-first search; `done` if there is no path."""
    begin = (int(grid_world.agent_pos[0]), int(grid_world.agent_pos[1]), int(grid_world.agent_dir))
    moves: dict[tuple[int, int, int], str] = {begin: ""}
    waiting = deque([begin])
    while waiting:
        x, y, direction = waiting.popleft()
        move_here = moves[x, y, direction]
        cell = grid_world.grid.get(x, y)
        if cell is not None and cell.type == "goal":
            return move_here or "done"
        dx, dy = STEPS[direction]
        ahead = grid_world.grid.get(x + dx, y + dy)
        free = ahead is None or (ahead.can_overlap() and ahead.type != "lava")
        reached = [("left", (x, y, (direction - 1) % 4)), ("right", (x, y, (direction + 1) % 4))]
        for move, state in [*([("forward", (x + dx, y + dy, direction))] if free else []), *reached]:
            if state not in moves:
                moves[state] = move_here or move
                waiting.append(state)
    return "done"
