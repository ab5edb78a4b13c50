"""Demonstrations: attempts of an environment's expert through the agent loop, or transcripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from turnwise.engines.base import Sampling
from turnwise.engines.scripted import UNKNOWN, ScriptedEngine
from turnwise.envs.base import Environment
from turnwise.envs.capabilities import can_demonstrate
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message
from turnwise.rollout.agent import play
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.open_limit import with_open_limit
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.written import written_action
from turnwise.rollout.scene import Attempt, Play, Scene
from turnwise.runs.archive import read_step
from turnwise.tokens import Tokens
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Makes attempts in which the environment's `demonstrate(noise, random)` writes every action."""

    environments: Mapping[str, Callable[[], Environment]]
    renderer: Renderer
    limits: Limits
    seed: int
    noise: float
    plays: Mapping[str, Play] = field(default_factory=dict)
    """By dataset: what makes the turns, if that is not the agent loop."""

    def __post_init__(self) -> None:
        makers = {label: with_open_limit(make) for label, make in self.environments.items()}
        object.__setattr__(self, "environments", makers)

    async def group(self, task: Task, epoch: int) -> Group:
        """One demonstrated attempt. The expert makes its mistakes elsewhere in every epoch."""
        which = Attempt(self.seed, "demonstration", task, epoch)
        random = Random(which.noise(0))
        environment: Any = None
        maker = with_open_limit(self.environments[task.dataset])

        def make() -> Environment:
            nonlocal environment
            environment = maker()
            return environment  # type: ignore[no-any-return]

        engine = ScriptedEngine(
            lambda prompt, session, seed: self.say(environment, random),
            lambda text: self.renderer.encode(text).tolist(),
            end_token=self.renderer.end_token,
            logprob=UNKNOWN,
        )
        scene = Scene(engine, self.renderer, Sampling(max_tokens=self.limits.max_action_tokens), self.limits)
        make_turns = self.plays.get(task.dataset, play)
        trajectory = await run_attempt(which, replace(maker, make=make), scene, make_turns)
        if not trajectory.status.counts:
            return Group(task, (), (trajectory,))
        return Group(task, (trajectory,))

    def say(self, environment: Any, random: Random) -> str | Tokens:
        """What the expert says now. The chat template writes a Message, with its tool calls."""
        said = environment.demonstrate(self.noise, random) if can_demonstrate(environment) else ""
        return self.renderer.action(said) if isinstance(said, Message) else str(said)


class ArchivedDemonstrations:
    """Attempts of a file that the archive's `write_records` wrote, with the exact tokens that were sampled. Each
    attempt that counts is a demonstration.

    Example:
        archived = ArchivedDemonstrations(Path("models/best/attempts.parquet"))
        archived.group(archived.tasks[0])
    """

    def __init__(self, path: Path) -> None:
        attempts = [(record.group.task, one) for record in read_step(path) for one in record.group.trajectories]
        if not attempts:
            raise ValueError(f"{path} holds no attempt that counts")
        self.groups = {f"{path.name}:{number}": Group(task, (one,)) for number, (task, one) in enumerate(attempts)}
        self.tasks = [Task(name, path.stem) for name in self.groups]
        """One for each attempt."""

    def group(self, task: Task) -> Group:
        """The attempt that one of the tasks stands for."""
        return self.groups[task.id]


class RecordedDemonstrations:
    """Trajectories of transcripts: every message that is trained becomes a turn, with the tokens that the chat template
    writes for it.

    Example:
        recorded = RecordedDemonstrations(renderer, read_transcripts("talks.jsonl"), "talks")
        recorded.group(recorded.tasks[0])
    """

    def __init__(self, renderer: Renderer, transcripts: Iterable[Transcript], dataset: str) -> None:
        self.renderer = renderer
        self.transcripts = {f"{dataset}:{number}": one for number, one in enumerate(transcripts, 1)}
        self.tasks = [Task(name, dataset) for name in self.transcripts]
        """One for each transcript."""

    def group(self, task: Task) -> Group:
        """The transcript that a task stands for, as an attempt; a ValueError names the row and the message."""
        transcript = self.transcripts[task.id]
        turns: list[Turn] = []
        last = 0
        for index, trained in enumerate(transcript.trained):
            if trained:
                try:
                    turns.append(self.turn(transcript, index, last, turns[-1] if turns else None))
                except ValueError as error:
                    reason = str(error).splitlines()[0][:300]
                    raise ValueError(f"{transcript.place or task.id}: message {index + 1}: {reason}") from None
                last = index
        made = Trajectory(
            tuple(turns),
            Status.finished,
            transcript.reward or 0.0,
            transcript.marks,
            opening=transcript.messages[: transcript.first_trained],
            tools=transcript.tools,
        )
        return Group(task, (made,))

    def turn(self, transcript: Transcript, index: int, last: int, before: Turn | None) -> Turn:
        """The message at `index` as a turn, after the turn of the message at `last`."""
        messages, tools, renderer = transcript.messages, transcript.tools, self.renderer
        action = written_action(renderer, messages[: index + 1], tools)
        prompt = (
            renderer.first(messages[:index], tools)
            if before is None
            else renderer.next(before, messages[:last], messages[:index], tools, tools)
        )
        said = messages[index]
        if said.calls and renderer.said(prompt.tokens, action).calls != said.calls:
            raise ValueError("the chat template writes its calls so that rollout.tools does not read the same calls")
        size = len(action)
        ended = size > 0 and int(action[-1]) in renderer.end_tokens
        return Turn(
            prompt.tokens,
            action,
            np.full(size, UNKNOWN, np.float32),
            np.zeros(size, np.int32),
            StopReason.end_token if ended else StopReason.length,
            reward=0.0,
            said=said,
            heard=heard_after(messages, index),
            broke=prompt.broke,
        )


def heard_after(messages: Sequence[Message], index: int) -> tuple[Message, ...]:
    """What was said after a message until the assistant spoke again."""
    return tuple(takewhile(lambda message: message.role != "assistant", messages[index + 1 :]))
