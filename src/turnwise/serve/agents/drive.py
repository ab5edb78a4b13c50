"""Attempts that an agent of the user drives through the endpoint, instead of the agent loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.base import Environment, Reply
from turnwise.rollout.agent import open_environment
from turnwise.rollout.attempt_log import AttemptLog
from turnwise.rollout.calls import EnvironmentFailure, call, checked
from turnwise.rollout.deadline import Deadline
from turnwise.rollout.limits import Limits
from turnwise.rollout.scene import RunningAttempt, Scene
from turnwise.serve.agents.agent import Agent, AgentContext, spoken
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.session import Session
from turnwise.types import Status

MODEL = "policy"
"""The name of the model."""
SILENT = "the agent made no model call; does it use the base_url, api_key and model that it is given?"


@dataclass(eq=False, slots=True)
class Driver:
    """A Play in which the environment gives the task and scores it, and the agent decides what to ask the model.

    An attempt is finished when the environment says so in reply to an `act`, or when the agent returns: its answer is
    then the last action. An agent that raises has failed, unless a limit of the attempt made it raise.
    """

    agent: Agent
    endpoint: Endpoint
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))
    """Limits how many agents run at once."""

    async def __call__(self, scene: Scene, running: RunningAttempt) -> Status:
        deadline = running.deadline
        deadline.pause()
        async with self.slots:
            deadline.start()
            reply = await open_environment(running)
            deadline.end_call()
            session = Session(running.attempt, scene, MODEL, self.endpoint.aliases)
            address = self.endpoint.open(session)
            acting = ActingAgent(running.environment, session, running.log, scene.limits)
            task, messages = running.attempt.task, reply.history or reply.messages
            context = AgentContext(task, messages, address, acting.act, session.loop)
            try:
                return await self.run_agent(context, acting, deadline)
            finally:
                self.endpoint.end(address.key)
                session.end()
                running.log.turns.extend(session.turns())
                running.log.opening, running.log.tools = session.first_shown()

    async def run_agent(self, context: AgentContext, acting: ActingAgent, deadline: Deadline) -> Status:
        """Run the agent until it returns, raises, or cannot go on."""
        session = acting.session
        work = asyncio.ensure_future(self.agent(context))
        try:
            both: set[asyncio.Future[Any]] = {work, session.broken}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                session.broken.result()
            answer = await work
        except Exception:
            if session.broken.done() or not (acting.finished or session.refused):
                raise
            return Status.finished if acting.finished else session.refused or Status.failed
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if not session.recorded and session.refused is None:
            raise EnvironmentFailure(SILENT)
        if acting.finished:
            return Status.finished
        deadline.start_call()
        await acting.step(answer)
        return session.refused or Status.finished


@dataclass(eq=False, slots=True)
class ActingAgent:
    """The agent's side of an attempt: its actions step the environment."""

    environment: Environment
    session: Session
    log: AttemptLog
    limits: Limits
    finished: bool = False
    taking_turns: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def act(self, text: str) -> str:
        """The environment's answer to an action. If the environment fails, the attempt fails, even if the agent catches
        the error."""
        if not isinstance(text, str):
            raise TypeError(f"act takes a text, got {type(text).__name__}")
        async with self.taking_turns:
            if self.session.over:  # an agent in a thread may outlive its attempt and the environment
                raise RuntimeError("the attempt is over")
            try:
                async with asyncio.timeout(self.limits.call_seconds):
                    reply = await self.step(text)
            except Exception as error:
                self.session.fail(error)
                raise
            return "\n".join(message.content for message in reply.messages)

    async def step(self, text: str) -> Reply:
        reply = checked(await call(self.environment.step, spoken(text)), self.environment.step)
        self.log.pay(reply)
        self.session.pay(reply.reward)
        if reply.finished:
            self.finished = True
            self.session.over = True
        return reply
