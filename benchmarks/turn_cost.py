"""What a turn costs apart from the model's arithmetic, as conversations grow: in the slot engine and in the agent loop.

    python benchmarks/turn_cost.py [--quick] [--json PATH] [--repeats 5] [--only engine|loop] [--turns 2 64] [--profile]

Engine: a model of almost no arithmetic (one layer, width 32). Conversations of 2 to 64 turns, each turn with 16 new
tokens of prompt and 8 of action; as many conversations one after the other as make the same number of turns. Workloads:
    apart        8 conversations at a time, nothing to share
    groups       8 attempts at a time, whose first prompt is the same
Attention is what its kernels take, which read more in a longer conversation; the rest should not grow. Both are of the
same runs, and every repeat has all numbers of turns, so that other work on the machine meets all of them.
Agent loop: attempts of 50 turns on an engine that only plays back, with actions and observations of about 100 tokens
each, a tokenizer of 8,000 tokens and about 10,000 tokens at the end; and the same with the short turns of the
quickstart, whose environment shows a window. Rendering, limits, environment calls and records are the loop's; sampling
is not.
All times are CPU time, the median of the repeats; with the engine their range too.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import random
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

TURNS = (2, 4, 8, 16, 32, 64)
TOTAL_TURNS = 64
AT_ONCE = 8
NEW_PROMPT, NEW_ACTION = 16, 8
VOCABULARY = 512
DOCS = Path(__file__).parent.parent / "docs"


# ---------------------------------------------------------------- the engine


def small_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from turnwise.learn.attention import NAME, register

    register()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **shape, **ends)
    config._attn_implementation = NAME
    return LlamaForCausalLM(config).eval()


async def conversation(engine: Any, turns: int, first: np.ndarray, number: int) -> list[int]:
    """All tokens that were sampled."""
    from turnwise.engines.base import Sampling

    draw = np.random.default_rng(number)
    prompt, sampled = first, []
    for turn in range(turns):
        seed = 1000 * number + turn
        done = await engine.generate(prompt, Sampling(NEW_ACTION), session=str(number), seed=seed)
        sampled += done.tokens.tolist()
        heard = draw.integers(1, VOCABULARY, NEW_PROMPT, dtype=np.int32)
        prompt = np.concatenate([prompt, done.tokens, heard])
    return sampled


@dataclass
class Stopwatch:
    """CPU seconds inside a function."""

    seconds: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began

        return timed


@dataclass(frozen=True)
class Spent:
    """CPU microseconds per turn, and a checksum of all that was sampled."""

    total: float
    attention: float
    checksum: int

    @property
    def rest(self) -> float:
        return self.total - self.attention


async def conversations(model: Any, turns: int, shared: bool) -> Spent:
    """`TOTAL_TURNS` turns of each of `AT_ONCE` conversations."""
    import torch

    from turnwise.engines.slots import attention
    from turnwise.engines.slots.engine import SlotEngine
    from turnwise.engines.slots.model import SlotModel

    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    settings = {"slots": AT_ONCE, "context": 4096, "end_tokens": [], "decode": str, "dtype": torch.float32}
    engine = SlotEngine(SlotModel(model, **settings), run=inline, shares_weights=True)
    draw = np.random.default_rng(7)
    sampled: list[int] = []
    spent = 0.0
    kernels = Stopwatch()
    with patch.object(attention, "attend", kernels.around(attention.attend)):
        for repeat in range(TOTAL_TURNS // turns):
            firsts = draw.integers(1, VOCABULARY, (AT_ONCE, NEW_PROMPT), dtype=np.int32)
            began = time.thread_time()
            talks = [
                conversation(engine, turns, firsts[0 if shared else place], AT_ONCE * repeat + place)
                for place in range(AT_ONCE)
            ]
            sampled += [token for talk in await asyncio.gather(*talks) for token in talk]
            spent += time.thread_time() - began
            await engine.forget()
    await engine.close()
    scale = 1e6 / (TOTAL_TURNS * AT_ONCE)
    return Spent(spent * scale, kernels.seconds * scale, zlib.crc32(np.array(sampled, np.int32).tobytes()))


def measure_engine(repeats: int, turns: tuple[int, ...]) -> dict[str, Any]:
    """Microseconds per turn by workload and turns of a conversation."""
    import torch

    torch.set_num_threads(1)
    model = small_model()
    asyncio.run(conversations(model, 4, False))
    cases = [(workload, count) for workload in ("apart", "groups") for count in turns]
    runs: dict[tuple[str, int], list[Spent]] = {case: [] for case in cases}
    for _ in range(repeats):
        for workload, count in cases:
            runs[workload, count].append(asyncio.run(conversations(model, count, workload == "groups")))
    found: dict[str, Any] = {"apart": {}, "groups": {}}
    for (workload, count), made in runs.items():
        assert len({one.checksum for one in made}) == 1, "a run does not repeat"
        row = {name: statistics.median(getattr(one, name) for one in made) for name in ("total", "attention", "rest")}
        found[workload][str(count)] = row
        least, most = min(one.total for one in made), max(one.total for one in made)
        print(
            f"engine  {workload:8} {count:3} turns  {row['total']:6.0f} us per turn ({least:.0f}-{most:.0f}):", end=""
        )
        print(f" attention {row['attention']:4.0f}, the rest {row['rest']:5.0f}", end="")
        print(f" (checksum of all tokens {made[0].checksum:08x})", flush=True)
    for workload, rows in found.items():
        few, many = runs[workload, turns[0]], runs[workload, turns[-1]]
        ratios = sorted(more.total / less.total for less, more in zip(few, many, strict=True))
        grown = {name: rows[str(turns[-1])][name] - rows[str(turns[0])][name] for name in ("attention", "rest")}
        print(f"engine  {workload:8} {turns[-1]} turns / {turns[0]} turns: {statistics.median(ratios):.2f}", end="")
        print(f" ({ratios[0]:.2f}-{ratios[-1]:.2f}); us more: attention {grown['attention']:.0f}, ", end="")
        print(f"the rest {grown['rest']:.0f}", flush=True)
        rows["growth"] = statistics.median(ratios)
    return found


# ---------------------------------------------------------------- the agent loop


def tokenizer_of_docs() -> tuple[Any, list[str]]:
    from turnwise.learn.tiny import build_tokenizer

    text = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))
    words = [word for word in text.split() if not set(word) & set("<>")]  # of which control tokens are made
    return build_tokenizer([text], vocabulary=8000), words


class Playback:
    """An engine that samples nothing: it gives back one of some actions."""

    shares_weights = True
    context = 1 << 20

    def __init__(self, actions: list[np.ndarray]) -> None:
        from turnwise.engines.base import Completion
        from turnwise.types import StopReason

        self.completions = []
        for action in actions:
            arrays = action, np.full(len(action), -0.5, np.float32), np.zeros(len(action), np.int32)
            for array in arrays:
                array.flags.writeable = False
            self.completions.append(Completion(*arrays, StopReason.end_token))

    async def generate(self, prompt: Any, sampling: Any, *, session: str, seed: int) -> Any:
        await asyncio.sleep(0)
        return self.completions[seed % len(self.completions)]


def long_turns(turns: int) -> tuple[Any, Any, Playback]:
    """(environment, renderer, playback) of conversations that only grow."""
    from turnwise.envs.base import Reply
    from turnwise.messages import Message
    from turnwise.rollout.render.renderer import Renderer

    tokenizer, words = tokenizer_of_docs()
    draw = random.Random(0)
    heard = [" ".join(draw.choice(words) for _ in range(55)) for _ in range(3000)]
    said = [" ".join(draw.choice(words) for _ in range(66)) for _ in range(3000)]

    class Grows:
        async def open(self, task: Any) -> Any:
            self.turn, self.draw = 0, random.Random(task.id)
            return Reply((Message("system", heard[0] * 4), Message("user", self.draw.choice(heard))))

        async def step(self, message: Any) -> Any:
            self.turn += 1
            await asyncio.sleep(0)
            text = f"{self.draw.random()} {self.draw.choice(heard)}"
            return Reply((Message("user", text),), finished=self.turn >= turns)

        async def close(self) -> None:
            return None

    renderer = Renderer(tokenizer)
    end = np.int32(renderer.end_token)
    return Grows, renderer, Playback([np.append(renderer.encode(text), end) for text in said])


def short_turns(turns: int) -> tuple[Any, Any, Playback]:
    """The same with turns as short as those of the quickstart: a window of two messages, a few words each."""
    from turnwise.envs.base import Reply
    from turnwise.messages import Message
    from turnwise.rollout.render.renderer import Renderer

    tokenizer, words = tokenizer_of_docs()
    draw = random.Random(0)
    names = [" ".join(draw.choice(words) for _ in range(2)) for _ in range(500)]

    class Window:
        async def open(self, task: Any) -> Any:
            self.turn, self.draw = 0, random.Random(task.id)
            self.question = Message("user", f"start {self.draw.choice(names)}, links 3")
            return Reply((self.question,))

        async def step(self, message: Any) -> Any:
            self.turn += 1
            heard = Message("user", f"{self.draw.choice(names)}: {self.draw.choice(names)}")
            return Reply((heard,), finished=self.turn >= turns, history=(self.question, message, heard))

        async def close(self) -> None:
            return None

    renderer = Renderer(tokenizer, "managed")
    end = np.int32(renderer.end_token)
    return Window, renderer, Playback([np.append(renderer.encode(f"get {text}"), end) for text in names])


def measure_loop(name: str, make: Callable[[int], Any], attempts: int, turns: int, repeats: int, profile: bool) -> Any:
    """CPU microseconds of the agent loop per turn, and which modules they were spent in."""
    from turnwise.engines.base import Sampling
    from turnwise.rollout.concurrently import all_of
    from turnwise.rollout.group import AttemptMaker
    from turnwise.rollout.limits import Limits
    from turnwise.types import Task

    environment, renderer, engine = make(turns)
    limits = Limits(turns + 1, 1 << 19, 512, 1 << 20, 600.0, 36000.0)
    settings = {"limits": limits, "split": "train", "attempts": 8}
    spent, groups = [], []
    profiler = cProfile.Profile() if profile else None
    for repeat in range(repeats + bool(profile)):
        maker = AttemptMaker({"e": environment}, engine, renderer, Sampling(512), seed=repeat, **settings)
        tasks = [Task(f"{repeat}-{number}", "e") for number in range(attempts // 8)]

        async def make_all(maker: Any = maker, tasks: Any = tasks) -> Any:
            return await all_of(maker.group(task, 0) for task in tasks)

        gc.collect()
        if profiler and repeat == repeats:
            profiler.enable()
        began = time.process_time()
        groups = asyncio.run(make_all())
        if profiler and repeat == repeats:
            profiler.disable()
            break
        spent.append(time.process_time() - began)
    trajectories = [one for group in groups for one in group.trajectories]
    made = sum(len(one.turns) for one in trajectories)
    assert made == attempts * turns
    tokens = statistics.mean(len(one.buffer) for one in trajectories)
    per_turn = statistics.median(spent) / made * 1e6
    checksum = zlib.crc32(b"".join(one.buffer.tobytes() for one in trajectories))
    print(f"loop    {name:8} {turns} turns, {tokens:.0f} tokens at the end: {per_turn:.0f} us per turn", end="")
    print(f" (checksum of all tokens {checksum:08x})", flush=True)
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return {"turns": turns, "tokens": tokens, "microseconds": per_turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 and 16 turns, one repeat: half a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS, help="turns of the engine's conversations")
    parser.add_argument("--only", choices=["engine", "loop"], help="only this part")
    parser.add_argument("--profile", action="store_true", help="print where the agent loop spends its time")
    chosen = parser.parse_args()
    repeats, turns = (1, (2, 16)) if chosen.quick else (chosen.repeats, tuple(chosen.turns))
    found: dict[str, Any] = {}
    if chosen.only != "loop":
        found["engine"] = measure_engine(repeats, turns)
    if chosen.only != "engine":
        count = 10 if chosen.quick else 50
        found["loop"] = {
            "long": measure_loop("long", long_turns, 64, count, repeats, chosen.profile),
            "short": measure_loop("short", short_turns, 128, 8, repeats, chosen.profile),
        }
    if chosen.json:
        chosen.json.write_text(json.dumps({"repeats": repeats, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
