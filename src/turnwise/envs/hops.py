"""hops: follow links through a hidden store, one lookup per turn, then answer with the last name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar, Literal

from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task

NAMES = (
    "amber birch cedar delta ember flint grove hazel ivory jade knoll larch maple north olive pearl "
    "quartz raven slate thorn umber vale willow yarrow zephyr aspen brook cliff dune elm fern gorse"
).split()

PLAIN_SYSTEM = "Follow the links. Say get NAME or answer NAME."
TOOL_SYSTEM = (
    "Follow the links. Call the tool get with a name to see where it leads, then the tool answer with the last name. "
    'Write a call as <tool_call>{"name": "get", "arguments": {"name": NAME}}</tool_call>.'
)


class Hops:
    """An attempt: a start, a number of links to follow, and a store only the environment knows.

    Example:
        user: start amber, links 2      assistant: get amber
        user: leads to cedar            assistant: get cedar
        user: leads to jade             assistant: answer jade      -> outcome 1
    """

    task_fields: ClassVar[dict[str, Any]] = {"store": int, "links": int}

    def __init__(
        self,
        commands: Literal["plain", "tool"] = "plain",
        link_reward: float = 0.0,
        window: bool = False,
        mistakes: Literal["whole", "half", "seen"] = "whole",
        lookups: int = 0,
        announce: bool = True,
    ) -> None:
        """commands: how actions are written. link_reward: paid for each link followed for the first time. window: show
        only the question and the last observation, so that prompts are not extensions of each other. mistakes: what a
        demonstrated mistake is, any verb with any name (whole), the other verb or any name (half), or the other verb or
        a name that was seen, at first any (seen). lookups: how many a demonstration makes before it answers with the
        name that it has come to, right or wrong; 0 for all links. announce: say the number of links in the question;
        without it, only a window says how many are left."""
        if not announce and not window:
            raise ValueError("announce = false needs window = true: nothing else would say when to answer")
        self.commands = commands
        self.link_reward = link_reward
        self.window = window
        self.mistakes = mistakes
        self.lookups = lookups
        self.announce = announce

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048, links: tuple[int, int] = (1, 4)) -> Iterator[Task]:
        """Different tasks with a number of links between the two bounds."""
        low, high = links
        if not 1 <= low <= high < len(NAMES):
            raise ValueError(f"links = {links}: write two bounds, 1 <= low <= high < {len(NAMES)}")

        def draw(random: Random) -> dict[str, Any]:
            return {"store": random.getrandbits(32), "links": random.randint(low, high)}

        return draw_tasks("hops", split, count, seed, draw)

    async def open(self, task: Task) -> Reply:
        ring = list(NAMES)
        Random(task.data["store"]).shuffle(ring)
        self.leads_to = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        self.path = ring[: task.data["links"] + 1]
        self.followed = 0
        self.heard = ""
        system = PLAIN_SYSTEM if self.commands == "plain" else TOOL_SYSTEM
        links = f", links {len(self.path) - 1}" if self.announce else ""
        question = f"start {self.path[0]}{links}"
        self.head = (Message("system", system), Message("user", question))
        return Reply(self.head)

    async def step(self, message: Message) -> Reply:
        verb, name = self.parse(message)
        if verb == "answer":
            right = name == self.path[-1]
            return Reply(finished=True, outcome=float(right), marks=self.marks)
        if verb != "get":
            return self.observe("say get NAME or answer NAME")
        if name not in self.leads_to:
            return self.observe("no such name")
        reward = 0.0
        if self.followed < len(self.path) - 1 and name == self.path[self.followed]:
            self.followed += 1
            reward = self.link_reward
        self.heard = self.leads_to[name]
        return self.observe(f"leads to {self.heard}", reward)

    async def close(self) -> None:
        return None

    def observe(self, text: str, reward: float = 0.0) -> Reply:
        if not self.window:
            return Reply((Message("user", text),), reward=reward, marks=self.marks)
        observation = Message("user", f"{text}, {len(self.path) - 1 - self.followed} to go")
        return Reply((observation,), reward=reward, marks=self.marks, history=(*self.head, observation))

    @property
    def marks(self) -> dict[str, float]:
        """The share of links followed so far, with every answer: an attempt that never ends has it too."""
        return {"links_followed": self.followed / (len(self.path) - 1)}

    def parse(self, message: Message) -> tuple[str, str]:
        """Verb and name of an action; empty strings where there are none."""
        if self.commands == "plain":
            verb, _, name = message.content.strip().partition(" ")
            return verb, name
        if message.calls:  # parsed already, by rollout.tools
            return message.calls[0].name, str(message.calls[0].arguments.get("name", ""))
        call, closed, _ = message.content.partition("<tool_call>")[2].partition("</tool_call>")
        try:
            tool = json.loads(call if closed else "")
            return str(tool["name"]), str(tool["arguments"]["name"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return "", ""

    def demonstrate(self, noise: float, random: Random) -> str:
        """What an expert says now; with probability `noise` a mistake."""
        links = len(self.path) - 1
        done = self.followed >= min(self.lookups or links, links)
        verb, name = ("answer" if done else "get"), self.path[self.followed]
        if random.random() < noise:
            if self.mistakes == "whole":
                verb, name = random.choice(("get", "answer")), random.choice(NAMES)
            elif random.random() < 0.5:
                verb = "answer" if verb == "get" else "get"
            else:
                name = self.wrong_name(name, random)
        if self.commands == "plain":
            return f"{verb} {name}"
        call = json.dumps({"name": verb, "arguments": {"name": name}})
        return f"<tool_call>{call}</tool_call>"

    def wrong_name(self, right: str, random: Random) -> str:
        """The name of a mistake: any, or the one of the start and the last observation that is not right."""
        seen = sorted({self.path[0], self.heard} - {right, ""})
        return random.choice(seen if self.mistakes == "seen" and seen else NAMES)
