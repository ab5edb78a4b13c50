"""Agents that a recipe names: a function or a command. Either gets an address and a task, and returns an answer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwise.envs.isolation.variables import passed_on
from turnwise.envs.raised import error_line
from turnwise.messages import Message
from turnwise.rollout.calls import in_thread
from turnwise.serve.agents.loop import agent_loop
from turnwise.serve.dialects.ask import Messages
from turnwise.serve.registry import Address
from turnwise.types import Task

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
GIVEN = ("task", "messages", "base_url", "api_key", "model", "act")
"""Parameters that an agent function may have."""
TAIL = 1 << 16
"""Bytes of a command's output that are kept."""
Act = Callable[[str], Awaitable[str]]


class AgentFailure(RuntimeError):
    """The agent raised, or its command exited with an error."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The arguments of an agent for one attempt: the task, the address of the model, and a function to act."""

    task: Task
    messages: Messages
    """The first messages of the environment; they contain the question."""
    address: Address
    act: Act
    """Steps the environment and returns its answer."""
    loop: asyncio.AbstractEventLoop
    """Where `act` runs."""


Agent = Callable[[AgentContext], Awaitable[str]]


def find_agent(name: str, variables: Sequence[str] = ()) -> Agent:
    """The agent that `env.agent` names; ValueError if there is none. A command also gets these variables."""
    return function_agent(name) if is_function(name) else command_agent(name, variables)


def is_function(name: str) -> bool:
    """Whether the name means a function, which runs in this process, and not a command."""
    return FUNCTION.fullmatch(name) is not None


def text_of(answer: Any) -> str:
    """The return value of an agent as text for the environment."""
    if answer is None or isinstance(answer, str):
        return answer or ""
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError):
        raise AgentFailure(f"an agent must return text or a JSON value, got {type(answer).__name__}") from None


def entries_of(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


# ---------------------------------------------------------------- functions


def function_agent(name: str) -> Agent:
    module, _, attribute = name.partition(":")
    try:
        function = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except ModuleNotFoundError as error:
        raise ValueError(f'env.agent = "{name}": {error}; is the module on PYTHONPATH?') from None
    except AttributeError:
        raise ValueError(f'env.agent = "{name}": module {module} has no {attribute}') from None
    if not callable(function):
        raise ValueError(f'env.agent = "{name}": {attribute} is not a function')
    return calling(function, name)


def calling(function: Callable[..., Any], name: str) -> Agent:
    """The agent that calls a function."""
    return partial(run_function, function, names_of(function, name))


def names_of(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """The parameters of a function; ValueError if an agent cannot have one of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return GIVEN
    for parameter in parameters:
        if parameter.name not in GIVEN and parameter.default is parameter.empty:
            raise ValueError(
                f'env.agent = "{name}" has a parameter {parameter.name}; an agent may have {", ".join(GIVEN)}'
            )
    return tuple(parameter.name for parameter in parameters if parameter.name in GIVEN)


async def run_function(function: Callable[..., Any], names: tuple[str, ...], context: AgentContext) -> str:
    """Call a coroutine function in the agents' event loop, a plain one in a thread."""
    is_async = inspect.iscoroutinefunction(function)
    available = {
        "task": context.task,
        "messages": entries_of(context.messages),
        "base_url": context.address.base_url,
        "api_key": context.address.key,
        "model": context.address.model,
        "act": partial(act_and_await if is_async else act_and_block, context),
    }
    arguments = {name: available[name] for name in names}
    if not is_async:
        return text_of(await in_thread(partial(function, **arguments)))
    work = asyncio.run_coroutine_threadsafe(function(**arguments), agent_loop())
    try:
        return text_of(await asyncio.wrap_future(work))
    except Exception as error:
        raise AgentFailure(f"the agent raised {error_line(error)}") from error


async def act_and_await(context: AgentContext, text: str) -> str:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(perform(context.act, text), context.loop))


def act_and_block(context: AgentContext, text: str) -> str:
    return asyncio.run_coroutine_threadsafe(perform(context.act, text), context.loop).result()


async def perform(act: Act, text: str) -> str:
    return await act(text)


# ---------------------------------------------------------------- commands


def command_agent(name: str, variables: Sequence[str] = ()) -> Agent:
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ValueError(f'env.agent = "{name}": {error}') from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f'env.agent = "{name}": no such command; write "module:function" or a command and its arguments'
        )
    return partial(run_command, words, variables)


def surroundings(address: Address, variables: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables of a command: a few of ours, and those that point clients to the endpoint."""
    return {
        **passed_on(variables),
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_KEY": address.key,
        "OPENAI_MODEL": address.model,
        "ANTHROPIC_BASE_URL": address.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": address.key,
        "ANTHROPIC_MODEL": address.model,
    }


async def run_command(words: list[str], variables: Sequence[str], context: AgentContext) -> str:
    """The last line that a command prints. The command reads its task as a line of JSON. It ends with the attempt, and
    so do the processes it started."""
    task = context.task
    request = {
        "id": task.id,
        "dataset": task.dataset,
        "data": dict(task.data),
        "messages": entries_of(context.messages),
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=surroundings(context.address, variables),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        reading = asyncio.gather(tail_of(process.stdout), tail_of(process.stderr))
        with contextlib.suppress(ConnectionError):  # a command may ignore its task
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        status = await process.wait()
        kill(process)  # processes that it left behind would keep its output open
        printed, complained = await reading
    finally:
        kill(process)
    if status:
        last = last_line(complained)
        raise AgentFailure(f"the agent's command exited with {status}{f': {last}' if last else ''}")
    return last_line(printed)


async def tail_of(stream: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream, however long it is."""
    tail = b""
    while part := await stream.read(TAIL):
        tail = (tail + part)[-TAIL:]
    return tail


def last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a command and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def spoken(answer: str) -> Message:
    return Message("assistant", answer)
