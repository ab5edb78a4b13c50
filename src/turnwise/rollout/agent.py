"""The agent loop: the turns of one attempt, for training, validation and demonstrations alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from turnwise.engines.base import Completion, Sampling
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.rollout.calls import EnvironmentFailure, ask
from turnwise.rollout.faults import is_heard, reply_to
from turnwise.rollout.limits import Limits, abridged, text_bytes
from turnwise.rollout.render.off_loop import next_off_loop, render_off_loop
from turnwise.rollout.render.renderer import Prompt
from turnwise.rollout.scene import RunningAttempt, Scene
from turnwise.routes import first_new
from turnwise.tokens import Tokens
from turnwise.types import Status, Turn

log = logging.getLogger(__name__)
TOO_LARGE = (
    "%s: an observation has more than %d bytes and is not shown; shorten it, or raise "
    "rollout.limits.max_observation_bytes"
)
NOT_MANAGED = (
    'the environment handed over no history, which rollout.history = "managed" asks of it every turn; return '
    'Reply(history=...), or set rollout.history = "extend"'
)


async def play(scene: Scene, running: RunningAttempt) -> Status:
    """Open the environment, then make turns until the environment finishes or a limit ends the attempt. Per turn:
    render the prompt, check the limits on that prompt, sample the action, step the environment, record the turn."""
    renderer, limits, environment = scene.renderer, scene.limits, running.environment
    attempt, deadline, turns = running.attempt, running.deadline, running.log.turns
    reply = await open_environment(running)
    messages, tools = reply.history or reply.messages, reply.tools or ()
    if text_bytes(messages, tools) > limits.observation_bytes:
        return Status.prompt_too_long
    running.log.opening, running.log.tools = messages, tools
    # 1. Render the prompt. Those after the first are rendered at the end of the loop, from the turn before.
    prompt = await render_off_loop(renderer.first, messages, tools)
    while True:
        # 2. Check the limits on the very prompt that is sent.
        room = limits.room_for_action(len(prompt.tokens), scene.engine.context)
        if room == 0:
            running.log.refuse(len(prompt.tokens))
            return Status.too_long if turns else Status.prompt_too_long

        # 3. Sample the action.
        sampling = sampling_within(scene.sampling, room, reply.stop, routes_from(scene.sampling, prompt.tokens, turns))
        seed = attempt.noise(len(turns))
        deadline.start_call()
        completion = await scene.engine.generate(prompt.tokens, sampling, session=attempt.session, seed=seed)
        action = renderer.said(prompt.tokens, completion.tokens, tools)

        # 4. Step the environment. It never hears a tool call that cannot be made: the model hears the fault.
        started = deadline.now()
        try:
            reply = await reply_to(action, reply, partial(ask, deadline, environment.step))
        except BaseException:  # a penalty for breaking the environment must reach the action that did
            turns.append(recorded(prompt, completion, action, Reply(), deadline.now() - started))
            raise

        # 5. Record the turn; then end the attempt, or go on with what the model sees next.
        running.log.pay(reply)
        turns.append(recorded(prompt, completion, action, shortened(reply, limits), deadline.now() - started))
        if reply.finished:
            return Status.finished
        if len(turns) == limits.max_turns:
            return Status.too_many_turns
        if text_bytes(reply.history or reply.messages, reply.tools or ()) > limits.observation_bytes:
            log.warning(TOO_LARGE, attempt.session, limits.observation_bytes)
            return Status.observation_too_large
        if reply.history is None and renderer.history == "managed" and is_heard(action):
            raise EnvironmentFailure(NOT_MANAGED)
        messages_before, tools_before = messages, tools
        messages = (*messages, action, *reply.messages) if reply.history is None else reply.history
        tools = tools if reply.tools is None else reply.tools
        prompt = await next_off_loop(renderer, turns[-1], messages_before, messages, tools, tools_before)


async def open_environment(running: RunningAttempt) -> Reply:
    """The environment's first reply. It may pay for the attempt already, but not for a turn."""
    reply = await ask(running.deadline, running.environment.open, running.attempt.task)
    if reply.finished or reply.reward:
        raise EnvironmentFailure("open has finished the attempt or paid for a turn, and there was no turn yet")
    running.log.pay(reply)
    return reply


def shortened(reply: Reply, limits: Limits) -> Reply:
    """The reply as it is recorded: only the beginning of an observation that is too large."""
    is_large = text_bytes(reply.messages) > limits.observation_bytes
    return replace(reply, messages=abridged(reply.messages)) if is_large else reply


@lru_cache(maxsize=4096)
def sampling_within(sampling: Sampling, room: int, stop: tuple[str, ...], routes: int | None) -> Sampling:
    """How one action is sampled. Most turns of a run have the same room and stop strings, which are checked once."""
    return replace(sampling, max_tokens=room, stop=(*sampling.stop, *stop), routes=routes)


def routes_from(sampling: Sampling, prompt: Tokens, turns: Sequence[Turn]) -> int | None:
    """The first token of a prompt whose route is not known yet; None where routes are not asked for."""
    return None if sampling.routes is None else first_new(prompt, turns[-1] if turns else None)


def recorded(prompt: Prompt, completion: Completion, action: Message, reply: Reply, seconds: float) -> Turn:
    """The turn that a model call and the environment's reply make."""
    return Turn(
        prompt=prompt.tokens,
        action=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        stop=completion.stop,
        reward=reply.reward,
        said=action,
        heard=reply.messages,
        timing=replace(completion.timing, environment=seconds),
        broke=prompt.broke,
        allowed=completion.allowed,
        routes=completion.routes,
    )
