"""openenv: environments behind an OpenEnv server, one session per attempt, over its WebSocket.

The reward is part of the server's answer. The library is not imported: the adapter speaks the three messages of its
protocol, and the environment's code runs on the server. If all sessions of the server are taken, the adapter tries
again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from turnwise.envs.adapters.adapter import Adapter, unknown, user_message
from turnwise.envs.adapters.openenv_actions import ActionSchema, NoAction
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
LARGEST = 1 << 26
"""The largest accepted message, in bytes."""
WAIT = 0.2
"""Seconds between two attempts to get a free session."""
NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of an observation that are not for the model."""


class OpenEnv(Adapter):
    """A session of a server.

    Example:
        env.name = "openenv:http://127.0.0.1:8000"
        user: Echo environment ready!      assistant: hello      -> reward 0.5
    """

    library = "websockets"
    example = "openenv:http://127.0.0.1:8000"
    isolated = False

    def __init__(self, field: str = "", seeded: bool = True, calls: Literal["text", "tools"] = "text") -> None:
        """field: the field of an action that gets the model's text. If it is empty, the server's schema decides: its
        only required field, if that is a string. If there are other fields, the first message lists them, and the model
        may write the whole action as JSON. seeded: send the task's seed with a reset. calls: "tools" offers the action
        as a tool instead, which `rollout.tools` reads."""
        self.field = field
        self.seeded = seeded
        self.by_tool = calls == "tools"
        self.line: Any = None

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        cls.address()

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 1024) -> Iterator[Task]:
        """Different seeds; the server's environment may ignore them."""
        return draw_tasks("openenv", split, count, seed, lambda random: {"seed": random.getrandbits(31)})

    @classmethod
    def address(cls) -> str:
        """The address of the server's WebSocket."""
        parts = urlsplit(cls.name)
        if parts.scheme not in SCHEMES or not parts.netloc:
            raise ValueError(f'env.name = "openenv:{cls.name}" has no address; write for instance "{cls.example}"')
        return f"{SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"

    async def open(self, task: Task) -> Reply:
        data = {"seed": task.data["seed"]} if self.seeded and "seed" in task.data else {}
        while True:
            await self.connect()
            answer = await self.ask("reset", data)
            if answer["type"] != "error":
                break
            await self.leave()
            if answer["data"].get("code") != "CAPACITY_REACHED":
                raise RuntimeError(f"{self.name} refused to reset: {answer['data'].get('message')}")
            await asyncio.sleep(WAIT)
        self.schema = ActionSchema(await asyncio.to_thread(action_schema, self.address()), self.field)
        if self.field and self.field not in self.schema.fields:
            raise unknown("env.settings.field: actions have no field", self.field, self.schema.fields)
        reply = reply_of(answer["data"])
        texts = [*(message.content for message in reply.messages), "" if self.by_tool else self.schema.hint()]
        tools = (self.schema.tool,) if self.by_tool else None
        return Reply(user_message("\n\n".join(text for text in texts if text)), outcome=reply.reward, tools=tools)

    async def connect(self) -> None:
        from websockets.asyncio.client import connect

        self.line = await connect(f"{self.address()}/ws", max_size=LARGEST, proxy=None)

    async def step(self, message: Message) -> Reply:
        try:
            action = self.schema.action(message, self.by_tool)
        except NoAction as fault:
            return Reply(user_message(str(fault)))
        answer = await self.ask("step", action)
        if answer["type"] != "error":
            return reply_of(answer["data"])
        if answer["data"].get("code") == "VALIDATION_ERROR":
            return Reply(user_message(f"That is no action: {answer['data'].get('message')}"))
        raise RuntimeError(f"{self.name} failed: {answer['data'].get('message')}")

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # a full server sends an error and disconnects; the error can still be read
            await self.line.send(json.dumps({"type": kind, "data": data}))
        answer: dict[str, Any] = json.loads(await self.line.recv())
        return answer

    async def close(self) -> None:
        await self.leave()

    async def leave(self) -> None:
        """End the session. The server frees it when the connection ends, for whatever reason."""
        line, self.line = self.line, None
        if line is not None:
            with suppress(Exception):
                await line.send(json.dumps({"type": "close"}))
            await line.close()


def reply_of(data: Mapping[str, Any]) -> Reply:
    """The fields of an observation that the model may see, and its reward."""
    visible = {name: value for name, value in data["observation"].items() if name not in NOT_SHOWN}
    if len(visible) == 1:
        (value,) = visible.values()
        text = value if isinstance(value, str) else json.dumps(value)
    else:
        text = "\n".join(
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in visible.items()
        )
    return Reply(user_message(text), reward=float(data.get("reward") or 0.0), finished=bool(data.get("done")))


def action_schema(address: str) -> dict[str, Any]:
    """The JSON schema of the server's actions."""
    from urllib.request import ProxyHandler, build_opener

    direct = build_opener(ProxyHandler({}))
    with direct.open(f"{address.replace('ws', 'http', 1)}/schema", timeout=10) as response:
        schema: dict[str, Any] = json.load(response)["action"]
    return schema
