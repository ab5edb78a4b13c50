"""Small builders for tests of adapters: attempts by a script, and what they show."""

from __future__ import annotations

import asyncio
import inspect
from itertools import islice
from random import Random

from turnwise.assemble.environments import environment_class
from turnwise.envs.isolation.json_wire import packed_reply
from turnwise.messages import Message


def tasks_for(name, split="train", count=1, seed=0, **arguments):
    """Tasks of an environment whose library is imported by then, however long that takes."""
    kind = environment_class(name)
    if hasattr(kind, "check_settings"):
        kind.check_settings()
    return list(islice(kind.tasks(split, seed, **arguments), count))


async def answer(value):
    return await value if inspect.isawaitable(value) else value


def message(said):
    return said if isinstance(said, Message) else Message("assistant", said)


async def begun(name, task, **settings):
    """An environment that is open, and its first reply."""
    environment = environment_class(name)(**settings)
    return environment, await answer(environment.open(task))


async def played(name, task, script, **settings):
    """The replies of an attempt that says what a script does: texts in order, or "expert". Its last one is finished,
    or the script is over."""
    environment, reply = await begun(name, task, **settings)
    replies, random = [reply], Random(0)
    try:
        for turn in range(40):
            if script == "expert":
                said = environment.demonstrate(0.0, random)
            elif turn == len(script):
                break
            else:
                said = script[turn]
            replies.append(await answer(environment.step(message(said))))
            if replies[-1].finished:
                break
    finally:
        await answer(environment.close())
    return replies


def total(replies):
    return sum(reply.reward + reply.outcome for reply in replies)


def texts(replies):
    return ["\n".join(message.content for message in reply.messages) for reply in replies]


async def interleaved(name, task, scripts, **settings):
    """The replies of attempts at one task that are open together and take turns."""
    pairs = await asyncio.gather(*(begun(name, task, **settings) for _ in scripts))
    replies = [[reply] for _, reply in pairs]
    try:
        for turn in range(max(map(len, scripts))):
            for (environment, _), script, heard in zip(pairs, scripts, replies, strict=True):
                if turn < len(script) and not heard[-1].finished:
                    heard.append(await answer(environment.step(message(script[turn]))))
    finally:
        for environment, _ in pairs:
            await answer(environment.close())
    return replies


async def check_independence(name, task, scripts, **settings):
    """Attempts at one task that take turns hear what each hears alone, and so do attempts after them."""
    alone = [await played(name, task, script, **settings) for script in scripts]
    assert shown(alone[0]) != shown(alone[1]), "the scripts make no difference, so nothing is shown"
    together = await interleaved(name, task, scripts, **settings)
    assert [shown(replies) for replies in together] == [shown(replies) for replies in alone]
    assert shown(await played(name, task, scripts[0], **settings)) == shown(alone[0])


def shown(replies):
    return [packed_reply(reply) for reply in replies]
