"""How long the event loop of a run stands still, with many long attempts, checkpoints, evaluations and an archive.

    python benchmarks/stalls.py [--attempts 512] [--turns 50] [--steps 4] [--json FILE]

The run is real but for its model: attempts, rendering, the stream, plans, credit, metrics, archive, checkpoints and
evaluations are those of any run at `max_lag = 1`. A played engine answers each call after one to three seconds with 80
words, and a played learner sleeps instead of computing, copies 256 MB of weights for each checkpoint, and writes them.

Prints the longest stall of each step, and what took longest in the loop. Exit code 1 where a stall reaches 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import numpy as np
from numpy.typing import NDArray

from turnwise.assemble.attempts import evaluation_attempts, training_attempts
from turnwise.assemble.environments import training_order
from turnwise.assemble.learner import layout_of
from turnwise.assemble.model import renderer_of
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import settings_of, stages_of, training
from turnwise.cli.terminal import PlainScreen
from turnwise.engines.base import Completion, Sampling
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.evaluation.evaluator import Evaluator
from turnwise.messages import Message
from turnwise.plan.plan import Plan
from turnwise.pretrained import ChatTokenizer
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs.tracker import read_metrics
from turnwise.schedule.run_loop import RunLoop
from turnwise.schedule.workers import Workers, in_own_thread
from turnwise.tokens import Tokens
from turnwise.training.loop import LoopParts
from turnwise.training.run import RunParts
from turnwise.types import StopReason, Task

LIMIT = 0.05
WORDS = Path(__file__).resolve().parent.parent.joinpath("docs", "reference", "recipes.md").read_text().split()
WEIGHTS = 256 << 20
"""Bytes of a checkpoint."""
GROUP = 8


class Talk:
    """An environment that answers with sixty words for as many turns as it is asked to."""

    def __init__(self, turns: int = 50) -> None:
        self.turns = turns

    @staticmethod
    def tasks(split: str, seed: int, count: int = 4096) -> Iterator[Task]:
        return iter(draw_tasks("talk", split, count, seed, lambda draw: {"number": draw.randrange(1 << 40)}))

    async def open(self, task: Task) -> Reply:
        self.random, self.left = random.Random(task.data["number"]), self.turns
        return Reply((Message("system", words(self.random, 200)), Message("user", words(self.random, 60))))

    async def step(self, message: Message) -> Reply:
        self.left -= 1
        heard = (Message("user", words(self.random, 60)),)
        return Reply(
            heard, finished=self.left == 0, outcome=float(self.random.random() < 0.5) if not self.left else 0.0
        )

    async def close(self) -> None:
        return None


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


class PlayedEngine:
    """Answers each call after a while, with one of many actions."""

    shares_weights = True
    context = 1 << 20

    def __init__(self, encode: Callable[[str], list[int]], end_token: int, seconds: float) -> None:
        draw = random.Random(0)
        texts = [words(draw, 80) for _ in range(500)]
        self.actions = [np.array([*encode(text), end_token], np.int32) for text in texts]
        self.answer_seconds = seconds
        self.version, self.seconds = 0, 0.0

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        await asyncio.sleep(self.answer_seconds * (0.5 + random.random()))
        action = self.actions[seed % len(self.actions)][: sampling.max_tokens]
        logprobs, versions = np.full(len(action), -0.5, np.float32), np.full(len(action), self.version, np.int32)
        return Completion(action, logprobs, versions, StopReason.end_token)

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    async def nothing(self, *_: Any) -> None:
        return None

    open = abort = forget = pause = resume = close = nothing


class PlayedLearner:
    """Sleeps where a learner computes."""

    num_skipped_in_a_row = 0

    def __init__(self, seconds: float) -> None:
        self.seconds: dict[str, float] = {}
        self.pause = seconds
        self.weights = np.zeros(WEIGHTS, np.uint8)

    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        raise NotImplementedError

    def update(self, plans: Sequence[Plan], credit: Any, token_weights: Any, scores: Any, objective: Any) -> Any:
        time.sleep(self.pause)
        return {"idle": 0.0, "skipped": 0.0}, [np.full(len(each), -0.5, np.float32) for each in credit]

    def publish(self) -> Mapping[str, Any]:
        return {"weights": self.weights.copy()}

    def stage(self, tokenizer: ChatTokenizer) -> PlayedStaged:
        return PlayedStaged(self.weights.copy())


class PlayedStaged:
    def __init__(self, weights: NDArray[np.uint8]) -> None:
        self.weights = weights

    def write(self, folder: Path) -> None:
        with open(folder / "weights", "wb") as file:
            file.write(self.weights)
            os.fsync(file.fileno())


@asynccontextmanager
async def played_parts(
    answer_seconds: float,
    recipe: Recipe,
    environments: Environments,
    source: ModelSource,
    evaluations: Path,
    workers: Workers = in_own_thread,
) -> AsyncIterator[RunParts]:
    """The parts of a run, with a played engine and a played learner."""
    renderer = renderer_of(recipe, source.model, source.tokenizer)
    engine: Any = PlayedEngine(source.tokenizer.encode, renderer.end_token, answer_seconds)
    learner: Any = PlayedLearner(seconds=2.0)
    record = workers("record")
    lay_out = layout_of(recipe, source.model)
    attempts = training_attempts(recipe, environments, engine, renderer)
    stages = stages_of(
        recipe,
        lambda draw: attempts.group(draw.task, draw.epoch),
        lambda turns: lay_out(turns, recipe.max_tokens_per_microbatch),
        workers("learner"),
    )
    evaluator = Evaluator(
        engine,
        partial(evaluation_attempts, recipe, environments, engine, renderer),
        evaluations,
        success_at=1.0,
        decode=renderer.decode,
        record=record,
    )
    loop = LoopParts(
        settings=replace(settings_of(recipe), max_logprob_gap=1e9),
        stages=stages,
        learner=learner,
        engine=engine,
        tasks=training_order(recipe, environments),
    )
    yield RunParts(
        loop=loop,
        evaluator=evaluator,
        environments=environments,
        tokenizer=source.tokenizer,
        save=workers("checkpoint"),
        record=record,
    )


def recipe_of(attempts: int, turns: int, steps: int, out: Path) -> Recipe:
    tree = {
        "out": str(out),
        "steps": steps,
        "max_lag": 1,
        "groups_per_step": attempts // GROUP // 2,
        "model": {"path": "tiny", "hidden": 32, "layers": 1},
        "env": [{"name": "stalls:Talk", "settings": {"turns": turns}}],
        "rollout": {
            "group_size": GROUP,
            "max_turns": turns + 1,
            "max_prompt_tokens": 1 << 18,
            "max_action_tokens": 512,
            "max_trajectory_tokens": 1 << 19,
        },
        "loss": {"name": "ppo_clip", "anchor": "engine"},
        "evaluation": {"every": 2, "tasks": attempts // 16, "final_tasks": attempts // 16},
        "checkpoints": {"every": 1},
        "sft": {"updates": 0},
    }
    return parse_recipe(tree, "stalls")


@contextmanager
def slowest_callbacks() -> Iterator[list[tuple[float, str]]]:
    """Seconds of CPU and name of each callback of the loop that takes a tenth of the limit or more."""
    slow: list[tuple[float, str]] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        name, began = repr(handle._callback), time.thread_time()  # type: ignore[attr-defined]
        run(handle)
        if (seconds := time.thread_time() - began) >= LIMIT / 10:
            slow.append((seconds, name))

    asyncio.Handle._run = timed  # type: ignore[assignment]
    try:
        yield slow
    finally:
        asyncio.Handle._run = run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=512, help="that run at the same time")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--answer-seconds", type=float, default=2.0, help="mean of the played engine")
    parser.add_argument("--names", action="store_true", help="name the slowest callbacks, by seconds of CPU")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(chosen.attempts, chosen.turns, chosen.steps, Path(folder) / "run")

        async def work() -> None:
            stop = asyncio.Event()
            async with training(
                recipe, PlainScreen(), stop, open_parts=partial(played_parts, chosen.answer_seconds)
            ) as run:
                await run.to_end(stop)

        with ExitStack() as stack:
            slow = stack.enter_context(slowest_callbacks()) if chosen.names else []
            stack.enter_context(asyncio.Runner(loop_factory=RunLoop)).run(work())
        lines = read_metrics(Path(recipe.out) / "metrics.jsonl")
    stalls = [line["seconds/longest_stall"] for line in lines if "seconds/longest_stall" in line]
    print(f"{chosen.attempts} attempts at a time, {chosen.turns} turns each, {chosen.steps} steps")
    for step, stall in enumerate(stalls, start=1):
        print(f"  step {step}: longest stall {1000 * stall:.0f} ms")
    for seconds, name in sorted(slow, reverse=True)[:20]:
        print(f"  {1000 * seconds:.0f} ms of CPU in {name}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"stalls": stalls}) + "\n")
    return int(max(stalls) >= LIMIT)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
