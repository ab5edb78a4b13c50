"""Faults of an action: what the model hears of calls that are not made, beside the results of those that are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from turnwise.envs.base import Reply
from turnwise.messages import Message

OTHERS = "; the other calls were read"
Step = Callable[[Message], Awaitable[Reply]]


def is_heard(action: Message) -> bool:
    """Whether the environment hears of an action: not if all its calls have faults."""
    return not action.faults or any(not call.fault for call in action.calls)


async def reply_to(action: Message, before: Reply, step: Step) -> Reply:
    """The reply to an action. The environment hears its calls without faults; the model hears the faults."""
    if not is_heard(action):
        return fault_reply(action, before)
    if not action.faults:
        return await step(action)
    made = tuple(call for call in action.calls if not call.fault)
    reply = await step(replace(action, calls=made, fault=""))
    return reply if reply.finished else with_faults(action, reply, len(made))


def fault_reply(action: Message, before: Reply) -> Reply:
    """The reply to an action of which nothing can be done."""
    return with_faults(action, Reply(stop=before.stop), 0)


def with_faults(action: Message, reply: Reply, num_made: int) -> Reply:
    """A reply that also tells the model the faults of an action. A call that the template shows gets its fault in place
    of a result, if the reply has one result for each call that was made; every other fault is a line at the end."""
    results = 0
    while results < len(reply.messages) and reply.messages[results].role == "tool":
        results += 1
    lines = [f"{action.fault}{OTHERS if action.calls else ''}"] if action.fault else []
    faults = list(dict.fromkeys(call.fault for call in action.calls if call.fault))
    if reply.history is not None:
        return replace(reply, history=(*reply.history, *as_question([*faults, *lines])))
    if results != num_made:
        return replace(reply, messages=(*reply.messages, *as_question([*faults, *lines])))
    given = iter(reply.messages)
    answers = [Message("tool", f"error: {call.fault}") if call.fault else next(given) for call in action.calls]
    return replace(reply, messages=(*answers, *given, *as_question(lines)))


def as_question(lines: list[str]) -> tuple[Message, ...]:
    return (Message("user", "\n".join(lines)),) if lines else ()
