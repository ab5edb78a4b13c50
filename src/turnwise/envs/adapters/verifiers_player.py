"""Plays environments of verifiers: a program for the Python that has the library, which needs nothing of turnwise.

It is started by its path with a socket, loads one environment, and plays as many episodes at once as it is asked to,
each against the address and with the key that it is given. What it hears and says are lines of JSON.

    {"id": 0, "do": "load", "name": "addition", "options": {}}     -> {"id": 0, "answer": {...}}
    {"id": 1, "do": "rows", "start": 0, "count": 64}                -> {"id": 1, "answer": [{...}, ...]}
    {"id": 2, "do": "play", "row": {...}, "base_url": ..., "api_key": ..., "model": ...}
                                                                    -> {"id": 2, "answer": {"reward": 1.0, "marks": {}}}
    {"id": 2, "do": "cancel"}                                       -> what the order of this id answers then

Every order but a cancel is answered once: with an answer, with a mistake of the user's, or with a failure.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # Python puts the folder of a program first, and in that of this one `verifiers` is another
    del sys.path[0]

import asyncio
import contextlib
import copy
import json
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import islice
from typing import Any

import httpx
from verifiers import __version__
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.client import ClientTimeoutConfig, EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    harness_class,
    load_environment,
    resolve_env_config,
)

__all__ = ["Chat"]

CHAT = "turnwise_chat"
"""What the library calls the harness of this file."""
NO_VARIABLE = "TURNWISE_HAS_NO_KEY_HERE"
"""A client's key is that of its attempt, and not in a variable that programs of other attempts could read."""
KEY: ContextVar[str] = ContextVar("KEY")
"""Of the attempt that a task plays."""
GRACE = 5.0
"""Seconds that episodes have to let go of what they hold when everything ends."""
LONGEST_ERROR = 1000
"""Characters of an error's text that are told."""


# ---------------------------------------------------------------- the model, as an environment meets it


class Chat(Harness[HarnessConfig]):
    """The library's tool-less chat loop, with the taskset's own tools, in this process. The library's starts a program
    for every message of a user's, which takes longer than the turn of a small model."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def http(self) -> httpx.AsyncClient:
        """Of all episodes. The attempt's deadline is the run's business."""
        return httpx.AsyncClient(timeout=None, trust_env=False)

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Talk until the model has no more to call, or may not go on."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, places, lines = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"authorization": f"Bearer {secret}"}
                response = await self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code != 200:
                    # A limit of the attempt ends the talk, and what was said so far is judged.
                    is_limit = response.status_code == 410 or "context_length_exceeded" in response.text
                    return ProgramResult(0 if is_limit else 1, "", response.text[:LONGEST_ERROR])
                message = response.json()["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(0, "", "")
                for call in calls:
                    content = await result_of(call["function"], places, lines)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def result_of(function: dict[str, Any], places: dict[str, Any], lines: dict[str, Any]) -> Any:
    """What a tool returns, or what is wrong with the call."""
    name = function["name"]
    if name not in places:
        return f"error: there is no tool {name!r}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return "error: the arguments are not JSON"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(lines, places, name, arguments)


def give_keys() -> None:
    """Have model calls made with the key of their own attempt. A client with another configuration for each would stay
    with the library's server until the end, and so would its connections."""
    register = InterceptionServer.register

    def keyed(server: InterceptionServer, session: RolloutSession) -> tuple[str, str]:
        secrets: tuple[str, str] = register(server, session)
        if session.ctx.client.api_key_var == NO_VARIABLE:
            session.client = copy.copy(session.client)
            session.client.api_key = KEY.get()
        return secrets

    InterceptionServer.register = keyed


# ---------------------------------------------------------------- environments


def config_of(name: str, options: dict[str, Any]) -> Any:
    """The configuration of an environment: the user's options over what the library and the taskset say. Whoever has no
    program is played by `Chat`, and whoever has no place is played on this machine."""
    data = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    brings_harness = default_harness_id(name) != "bash"
    for role, field in env_config_type(name, data.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig):
            said = {*field.default.model_fields_set, *data.get(role, {})}
            ours = {} if "runtime" in said else {"runtime": {"type": "subprocess"}}
            ours |= {} if "harness" in said or brings_harness else {"harness": {"id": CHAT}}
            data[role] = {**ours, **data.get(role, {})}
    return resolve_env_config(data)


def learner_of(config: Any) -> str:
    """The role that learns: the one that has no client of its own. ValueError where what is asked for cannot be."""
    roles: dict[str, AgentConfig] = agent_config_fields(config)
    free = [role for role, agent in roles.items() if agent.client is None]
    if len(free) != 1:
        raise ValueError(
            f"one agent learns, and {len(free)} of {', '.join(roles)} have no client; give every other one "
            "options.ROLE.client and options.ROLE.model"
        )
    for where, retries in [("", config.retries), *((f"{role}.", agent.retries) for role, agent in roles.items())]:
        if retries.max_retries or retries.rules:
            raise ValueError(f"options.{where}retries would mix two tries in one attempt; use rollout.failures.retries")
    for role, agent in roles.items():
        harness = config.agent_harnesses()[role].id
        if isinstance(agent.runtime, SubprocessConfig) and harness_class(harness).EXECUTES_CODE:
            raise ValueError(
                f"the harness {harness} runs what the model writes on this machine; set "
                f'options.{role}.runtime = {{ type = "docker" }}'
            )
    return free[0]


class Stage:
    """An environment and its rows."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.config = config_of(name, options)
        self.learner = learner_of(self.config)
        self.env: Env[Any] = load_environment(self.config)
        self.task_type = type(self.env.taskset).task_type()
        self.data_type = self.task_type.data_type()
        for field, said in self.data_type.model_fields.items():
            if said.exclude:
                raise ValueError(f"rows of {name} do not survive being sent: {field} is excluded")
        self.kept: list[dict[str, Any]] = []
        self.coming: Iterator[Any] | None = None
        self.reading = asyncio.Lock()

    async def rows(self, start: int, count: int) -> list[dict[str, Any]]:
        """Rows of the taskset from a place on; fewer where it ends."""

        def read() -> None:
            if self.coming is None:
                self.coming = iter(self.env.taskset)
            missing = max(0, start + count - len(self.kept))
            self.kept += [written(task.data) for task in islice(self.coming, missing)]

        async with self.reading:
            await asyncio.to_thread(read)
        return self.kept[start : start + count]

    async def play(self, row: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """One episode: what it is worth, and the library's measurements of it."""
        KEY.set(api_key)
        patient = ClientTimeoutConfig(connect=None)
        client = EvalClientConfig(base_url=base_url, api_key_var=NO_VARIABLE, timeout=patient)
        task = self.task_type(self.data_type.model_validate(row), self.config.taskset.task)
        episode = await self.env.run_episode(task, ModelContext(model=model, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it did not end well")
        mine = [trace for trace in episode.traces if trace.agent.name == self.learner]
        if len(mine) != 1:
            raise RuntimeError(f"{self.learner} ran {len(mine)} times in one episode; an attempt is one run")
        return worth(mine[0])


def written(data: Any) -> dict[str, Any]:
    row: dict[str, Any] = data.model_dump(mode="json", exclude_defaults=True)
    return row


def worth(trace: Trace) -> dict[str, Any]:
    """The reward, and its parts and the metrics by name."""
    parts = {name: reward.score if reward is not None else None for name, reward in trace.rewards.items()}
    if None in parts.values():
        raise RuntimeError(f"no reward was given for {', '.join(name for name in parts if parts[name] is None)}")
    marks = {**parts, **trace.metrics}
    known = {name: value for name, value in marks.items() if value is not None and math.isfinite(value)}
    return {"reward": trace.reward, "marks": known}


# ---------------------------------------------------------------- orders


class OrderHandler:
    """Takes orders from the line and writes what they come to."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.loop = asyncio.get_running_loop()
        self.orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.under_way: dict[int, asyncio.Task[Any]] = {}

    def read(self) -> None:
        """In a thread, so that the end of the line is seen whatever the environments do."""
        with contextlib.suppress(OSError, ValueError), self.line.makefile("rb") as lines:
            for line in lines:
                self.loop.call_soon_threadsafe(self.orders.put_nowait, json.loads(line))
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is everything
            self.loop.call_soon_threadsafe(self.orders.put_nowait, None)
        threading.Event().wait(GRACE)
        for pid in descendants(os.getpid()):  # they have sessions of their own
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def write(self, number: int, **said: Any) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more
            self.line.sendall(json.dumps({"id": number, **said}).encode() + b"\n")

    async def run(self) -> None:
        threading.Thread(target=self.read, daemon=True, name="orders").start()
        first = await self.orders.get()
        if first is None:
            return
        number = first["id"]
        try:
            stage = Stage(first["name"], first["options"])
            async with stage.env.serving():
                self.write(number, answer={"version": __version__})
                try:
                    await self.obey(stage)
                finally:
                    for work in self.under_way.values():
                        work.cancel()
                    await asyncio.gather(*self.under_way.values(), return_exceptions=True)
        except BaseException as error:
            self.write(number, mistake=described(error))
            raise

    async def obey(self, stage: Stage) -> None:
        methods: dict[str, Callable[..., Any]] = {"rows": stage.rows, "play": stage.play}
        while (order := await self.orders.get()) is not None:
            number, kind = order.pop("id"), order.pop("do")
            if kind == "cancel":
                if number in self.under_way:
                    self.under_way[number].cancel()
                continue
            self.under_way[number] = work = asyncio.create_task(methods[kind](**order))
            work.add_done_callback(partial(self.finish, number))  # also where it is cancelled before it began

    def finish(self, number: int, work: asyncio.Task[Any]) -> None:
        del self.under_way[number]
        try:
            self.write(number, answer=work.result())
        except asyncio.CancelledError:
            self.write(number, failure="it was cancelled")
        except Exception as error:
            self.write(number, failure=described(error))


def described(error: BaseException) -> str:
    """An error in one line; its kind only where it says more than that somebody made a mistake."""
    text = str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
    return " ".join(text[:LONGEST_ERROR].split()).encode("utf-8", "replace").decode()


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have, as far as the system tells."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(entry)}/stat") as file:
                parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def main() -> None:
    """Obey until the line ends."""
    line = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(line.fileno(), False)
    sys.modules[CHAT] = sys.modules[__name__]
    give_keys()

    async def work() -> None:
        await OrderHandler(line).run()

    asyncio.run(work())


if __name__ == "__main__":
    main()
