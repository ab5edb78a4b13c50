"""Plays environments of verifiers: a program for the Python that has the library. It does not import turnwise.

It is started by its path with a socket. It loads one environment and plays any number of episodes at the same time.
Each order to play an episode has the address of the endpoint and a key. Orders and answers are lines of JSON.

    {"id": 0, "do": "load", "name": "addition", "options": {}}     -> {"id": 0, "answer": {...}}
    {"id": 1, "do": "rows", "start": 0, "count": 64}                -> {"id": 1, "answer": [{...}, ...]}
    {"id": 2, "do": "play", "row": {...}, "base_url": ..., "api_key": ..., "model": ...}
                                                                    -> {"id": 2, "answer": {"reward": 1.0, "marks": {}}}
    {"id": 2, "do": "cancel"}                                       -> the answer to the order of this id

Every order except a cancel gets one answer: an answer, a mistake of the user, or a failure.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # Python puts a program's folder first in sys.path, and this folder has another `verifiers`
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
"""The name of this file's harness in the library."""
NO_VARIABLE = "TURNWISE_HAS_NO_KEY_HERE"
"""No variable of this name exists. Keys are not in variables, where programs of other attempts could read them."""
KEY: ContextVar[str] = ContextVar("KEY")
"""The key of the attempt that the current task plays."""
GRACE = 5.0
"""Seconds that episodes have to release their resources when the process ends."""
LONGEST_ERROR = 1000
"""How many characters of an error are sent."""


# ---------------------------------------------------------------- the model's side of an episode


class Chat(Harness[HarnessConfig]):
    """A chat loop with the taskset's tools, in this process. The library's chat loop starts a program for every user
    message, which takes longer than a turn of a small model."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def http(self) -> httpx.AsyncClient:
        """The client of all episodes. It has no time limit: the run has a deadline for each attempt."""
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
        """Call the model until it makes no more tool calls or reaches a limit."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, tool_names, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"authorization": f"Bearer {secret}"}
                response = await self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code != 200:
                    # A limit of the attempt ends the conversation; the messages so far are scored.
                    is_limit = response.status_code == 410 or "context_length_exceeded" in response.text
                    return ProgramResult(0 if is_limit else 1, "", response.text[:LONGEST_ERROR])
                message = response.json()["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(0, "", "")
                for call in calls:
                    content = await result_of(call["function"], tool_names, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def result_of(function: dict[str, Any], tool_names: dict[str, Any], connections: dict[str, Any]) -> Any:
    """The result of a tool call, or an error message for the model."""
    name = function["name"]
    if name not in tool_names:
        return f"error: there is no tool {name!r}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return "error: the arguments are not JSON"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(connections, tool_names, name, arguments)


def give_keys() -> None:
    """Make every model call use the key of its attempt. One client configuration per attempt would also work, but the
    library's server would keep all these clients and their connections until it ends."""
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
    """The configuration of an environment: the user's options override those of the library and the taskset. An agent
    without a harness gets `Chat`; an agent without a runtime runs on this machine."""
    data = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    brings_harness = default_harness_id(name) != "bash"
    for role, field in env_config_type(name, data.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig):
            fields_set = {*field.default.model_fields_set, *data.get(role, {})}
            defaults = {} if "runtime" in fields_set else {"runtime": {"type": "subprocess"}}
            defaults |= {} if "harness" in fields_set or brings_harness else {"harness": {"id": CHAT}}
            data[role] = {**defaults, **data.get(role, {})}
    return resolve_env_config(data)


def learner_of(config: Any) -> str:
    """The role that learns: the only one without a client. ValueError if the configuration cannot be trained."""
    roles: dict[str, AgentConfig] = agent_config_fields(config)
    free = [role for role, agent in roles.items() if agent.client is None]
    if len(free) != 1:
        raise ValueError(
            f"exactly one agent must learn, but {len(free)} of {', '.join(roles)} have no client; give each of the "
            "others options.ROLE.client and options.ROLE.model"
        )
    for where, retries in [("", config.retries), *((f"{role}.", agent.retries) for role, agent in roles.items())]:
        if retries.max_retries or retries.rules:
            raise ValueError(f"options.{where}retries puts two tries into one attempt; use rollout.failures.retries")
    for role, agent in roles.items():
        harness = config.agent_harnesses()[role].id
        if isinstance(agent.runtime, SubprocessConfig) and harness_class(harness).EXECUTES_CODE:
            raise ValueError(
                f"the harness {harness} runs code of the model on this machine; set "
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
        for field, info in self.data_type.model_fields.items():
            if info.exclude:
                raise ValueError(f"rows of {name} cannot be sent: {field} is excluded from serialisation")
        self.rows_read: list[dict[str, Any]] = []
        self.unread: Iterator[Any] | None = None
        self.reading = asyncio.Lock()

    async def rows(self, start: int, count: int) -> list[dict[str, Any]]:
        """`count` rows of the taskset from `start`; fewer at its end."""

        def read() -> None:
            if self.unread is None:
                self.unread = iter(self.env.taskset)
            missing = max(0, start + count - len(self.rows_read))
            self.rows_read += [row_of(task.data) for task in islice(self.unread, missing)]

        async with self.reading:
            await asyncio.to_thread(read)
        return self.rows_read[start : start + count]

    async def play(self, row: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Play one episode; return its reward and the library's metrics."""
        KEY.set(api_key)
        timeout = ClientTimeoutConfig(connect=None)
        client = EvalClientConfig(base_url=base_url, api_key_var=NO_VARIABLE, timeout=timeout)
        task = self.task_type(self.data_type.model_validate(row), self.config.taskset.task)
        episode = await self.env.run_episode(task, ModelContext(model=model, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        traces = [trace for trace in episode.traces if trace.agent.name == self.learner]
        if len(traces) != 1:
            raise RuntimeError(f"{self.learner} ran {len(traces)} times in one episode; it must run once")
        return result_of_trace(traces[0])


def row_of(data: Any) -> dict[str, Any]:
    row: dict[str, Any] = data.model_dump(mode="json", exclude_defaults=True)
    return row


def result_of_trace(trace: Trace) -> dict[str, Any]:
    """The reward, and by name its parts and the metrics."""
    parts = {name: reward.score if reward is not None else None for name, reward in trace.rewards.items()}
    if None in parts.values():
        raise RuntimeError(f"the reward has no value for {', '.join(name for name in parts if parts[name] is None)}")
    marks = {**parts, **trace.metrics}
    finite = {name: value for name, value in marks.items() if value is not None and math.isfinite(value)}
    return {"reward": trace.reward, "marks": finite}


# ---------------------------------------------------------------- orders


class OrderHandler:
    """Reads orders from the socket and writes their answers."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.loop = asyncio.get_running_loop()
        self.orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.under_way: dict[int, asyncio.Task[Any]] = {}

    def read(self) -> None:
        """Read orders in a thread, so that the end of the socket is noticed even if an environment blocks the loop."""
        with contextlib.suppress(OSError, ValueError), self.line.makefile("rb") as lines:
            for line in lines:
                self.loop.call_soon_threadsafe(self.orders.put_nowait, json.loads(line))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.orders.put_nowait, None)
        threading.Event().wait(GRACE)
        for pid in descendants(os.getpid()):  # they are in other process sessions
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def write(self, number: int, **answer: Any) -> None:
        with contextlib.suppress(OSError):  # the reader has gone
            self.line.sendall(json.dumps({"id": number, **answer}).encode() + b"\n")

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
            work.add_done_callback(partial(self.finish, number))  # also runs if it is cancelled before it began

    def finish(self, number: int, work: asyncio.Task[Any]) -> None:
        del self.under_way[number]
        try:
            self.write(number, answer=work.result())
        except asyncio.CancelledError:
            self.write(number, failure="it was cancelled")
        except Exception as error:
            self.write(number, failure=described(error))


def described(error: BaseException) -> str:
    """An error in one line. ValueError and RuntimeError are written without their kind."""
    text = str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
    return " ".join(text[:LONGEST_ERROR].split()).encode("utf-8", "replace").decode()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and their descendants, as far as /proc lists them."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(entry)}/stat") as file:
                parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
    pids = [pid]
    for parent_pid in pids:
        pids += [child for child, parent in parents.items() if parent == parent_pid]
    return pids[1:]


def main() -> None:
    """Answer orders until the socket is closed."""
    line = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(line.fileno(), False)
    sys.modules[CHAT] = sys.modules[__name__]
    give_keys()

    async def work() -> None:
        await OrderHandler(line).run()

    asyncio.run(work())


if __name__ == "__main__":
    main()
