"""Agents trained through the endpoint as they are: one of a published framework (pydantic-ai), and OpenAI's SDK.

The agent looks at a lamp with a tool and then says its colour. With pydantic-ai the framework writes the prompts,
defines the tool, reads the calls and keeps the conversation; with the SDK alone (sdk, and stream, which reads answers
as they come) a loop of twenty lines does. A tiny model is warm-started on demonstrations of the same. Prints held-out
success before and after, what the endpoint recorded, and the largest gap of logprobs.

    python benchmarks/endpoint.py [--quick] [--agent framework|sdk|stream] [--out runs/endpoint] [key=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx2
import openai
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message, ToolCall
from turnwise.types import Task

SIDES = ("left", "right")
NOISE = 0.3
"""Chance of a mistake at each demonstrated turn."""
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
COLOURS = ("red", "green", "blue", "white", "amber", "violet", "pink", "grey")

RECIPE = """
steps = 30
groups_per_step = 8
max_tokens_per_microbatch = 8192

[model]
hidden = 128
layers = 2

[[env]]
name = "endpoint:Lamps"
dataset = "lamps"
agent = "endpoint:solve"
[env.tasks]
count = 4096

[rollout]
group_size = 8
tools = "hermes"
max_turns = 4
max_prompt_tokens = 440
max_action_tokens = 40
max_trajectory_tokens = 480

[engine]
max_num_seqs = 64

[loss]
name = "ppo_clip"
anchor = "engine"

[optimizer]
learning_rate = 7e-4
schedule = "linear"

[evaluation]
every = 10
tasks = 64
final_tasks = 128

[sft]
updates = 450
batch = 48

[sft.optimizer]
learning_rate = 3e-3
"""
QUICK = ["steps=2", "groups_per_step=2", "rollout.group_size=4", "evaluation.tasks=8", "evaluation.final_tasks=16"]
QUICK += [
    "sft.updates=4",
    "sft.batch=8",
    "model.hidden=32",
    "model.layers=1",
    "evaluation.every=0",
    "env.0.tasks.count=64",
]


class Lamps:
    """Two lamps of different colours, of which only one is asked for. One has to look before one can answer."""

    @staticmethod
    def tasks(split: str, seed: int, count: int = 1024) -> Iterator[Task]:
        def draw(random: Random) -> dict[str, Any]:
            left, right = random.sample(COLOURS, 2)
            return {"left": left, "right": right, "asked": random.choice(SIDES), "number": random.getrandbits(32)}

        # Held-out tasks have pairs of colours that training never shows.
        return draw_tasks("lamps", split, count, seed, draw, lambda data: sorted((data["left"], data["right"])))

    async def open(self, task: Task) -> Reply:
        self.lamps = {side: task.data[side] for side in SIDES}
        self.asked = task.data["asked"]
        self.seen = False
        return Reply((Message("user", f"which colour is the {self.asked} lamp?"),))

    async def step(self, message: Message) -> Reply:
        verb, _, what = message.content.partition(" ")
        if verb == "answer":
            return Reply(finished=True, outcome=float(what.strip() == self.lamps[self.asked]))
        self.seen |= what == self.asked
        return Reply((Message("user", self.lamps.get(what, "no such lamp")),))

    async def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> Message:
        """Look, then answer; a mistake looks elsewhere, or says any colour."""
        wrong = random.random() < noise
        if not self.seen and not (wrong and random.random() < 0.5):
            side = random.choice(SIDES) if wrong else self.asked
            return Message("assistant", "", calls=(ToolCall("look", {"lamp": side}),))
        return Message("assistant", random.choice(COLOURS) if wrong else self.lamps[self.asked])


agent = Agent(deps_type=Callable[[str], Awaitable[str]], instructions="Look before you answer.")
"""An agent as one writes it with pydantic-ai; it knows of nothing here."""


@agent.tool
async def look(context: RunContext[Callable[[str], Awaitable[str]]], lamp: Literal["left", "right"]) -> str:
    """The colour of a lamp."""
    return await context.deps(f"look {lamp}")


async def solve(
    messages: list[dict[str, str]],
    base_url: str,
    api_key: str,
    model: str,
    act: Callable[[str], Awaitable[str]],
) -> str:
    """Has the agent answer: where the model is and what its tool does are told from outside."""
    where = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=connections())
    try:
        made = await agent.run(messages[-1]["content"], model=OpenAIChatModel(model, provider=where), deps=act)
    except UnexpectedModelBehavior:  # the model's own doing, for which it is to be judged
        return "nothing"
    return f"answer {made.output}"


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "The colour of a lamp.",
        "parameters": {
            "type": "object",
            "properties": {"lamp": {"type": "string", "enum": list(SIDES)}},
            "required": ["lamp"],
        },
    },
}


async def solve_by_sdk(
    messages: list[dict[str, str]],
    base_url: str,
    api_key: str,
    model: str,
    act: Callable[[str], Awaitable[str]],
    *,
    stream: bool = False,
) -> str:
    """The same with nothing but OpenAI's SDK."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    said: list[Any] = [{"role": "system", "content": "Look before you answer."}, *messages]
    made: Any
    while True:
        try:
            if stream:
                async with client.chat.completions.stream(model=model, messages=said, tools=[LOOK]) as events:
                    async for _ in events:
                        pass
                    made = (await events.get_final_completion()).choices[0].message
            else:
                whole = await client.chat.completions.create(model=model, messages=said, tools=[LOOK])
                made = whole.choices[0].message
        except (openai.BadRequestError, openai.LengthFinishReasonError):
            return "nothing"
        if not made.tool_calls:
            return f"answer {made.content}"
        said.append(made.to_dict())
        for call in made.tool_calls:
            try:
                heard = await act(f"look {json.loads(call.function.arguments)['lamp']}")
            except (ValueError, LookupError, TypeError):
                heard = "say which lamp"
            said.append({"role": "tool", "tool_call_id": call.id, "content": heard})


async def solve_by_stream(
    messages: list[dict[str, str]], base_url: str, api_key: str, model: str, act: Callable[[str], Awaitable[str]]
) -> str:
    return await solve_by_sdk(messages, base_url, api_key, model, act, stream=True)


AGENTS = {"framework": "solve", "sdk": "solve_by_sdk", "stream": "solve_by_stream"}


@cache
def connections() -> Any:
    """One client for all attempts: each would load its own certificates."""
    return httpx2.AsyncClient(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that it runs, no figures")
    parser.add_argument("--agent", choices=AGENTS, default="framework")
    parser.add_argument("--out", help="keep the run here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.insert(0, str(Path(__file__).parent))

    with tempfile.TemporaryDirectory() as folder:
        found = trained(Path(chosen.out or folder) if chosen.out else Path(folder) / "run", chosen)
    for line in described(found):
        print(line)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


async def record(recipe: Any, path: Path, count: int) -> None:
    """Have an expert in the model's place through the agent, and write down the conversations."""
    from turnwise.assemble.attempts import limits
    from turnwise.assemble.run import open_environments
    from turnwise.learn.tiny import build_tokenizer
    from turnwise.rollout.concurrently import all_of
    from turnwise.rollout.demonstrate import Demonstrator
    from turnwise.rollout.render.renderer import Renderer

    spell = Renderer(build_tokenizer([]), tools=recipe.rollout.tools)
    room = replace(limits(recipe), max_prompt_tokens=1 << 20, max_action_tokens=1 << 10, max_trajectory_tokens=1 << 21)
    with open_environments(recipe) as environments:
        supplies, plays = environments.demonstrating(), environments.plays
        expert = Demonstrator(supplies, spell, room, recipe.seed, NOISE, plays)
        groups = await all_of(expert.group(task, 0) for task in environments.tasks("train", count)["lamps"])
    ends = [made.turns[-1] for group in groups for made in group.trajectories]
    texts = [spell.decode([*turn.prompt.tolist(), *turn.action.tolist()]) for turn in ends]
    rows = [[{"role": role, "content": content} for role, content in MESSAGE.findall(text)] for text in texts]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def trained(out: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    import tomllib

    from turnwise.assemble import run
    from turnwise.cli.terminal import open_screen
    from turnwise.recipe.parse import apply_override, parse_recipe
    from turnwise.runs import archive
    from turnwise.runs.folder import RunFolder
    from turnwise.runs.tracker import read_metrics

    tree = tomllib.loads(RECIPE)
    agent = f'env.0.agent="endpoint:{AGENTS[chosen.agent]}"'
    for override in [f'out="{out}"', agent, *(QUICK if chosen.quick else []), *chosen.overrides]:
        apply_override(tree, override)
    recipe = parse_recipe(tree, "benchmarks/endpoint.py")
    began = time.perf_counter()
    demonstrations = out.parent / f"{out.name}-demonstrations.jsonl"
    asyncio.run(record(recipe, demonstrations, 16 if chosen.quick else 1024))
    warm = recipe.sft.model_copy(update={"data": str(demonstrations)})
    recipe = recipe.model_copy(update={"sft": warm})
    summary = asyncio.run(run.start(recipe, open_screen(), asyncio.Event()))
    assert summary is not None
    folder = RunFolder.open(recipe.out)
    lines = read_metrics(folder.metrics)
    files = [folder.archive / f"step-{step:06d}.parquet" for step in archive.archived_steps(folder.archive)]
    groups = [record.group for path in files for record in archive.read_step(path)]
    attempts = [attempt for group in groups for attempt in (*group.trajectories, *group.failed)]
    turns = [turn for attempt in attempts for turn in attempt.turns]
    return {
        "before": summary["before"],
        "after": summary["after"],
        "steps": recipe.steps,
        "minutes": (time.perf_counter() - began) / 60,
        "seconds": summary["seconds"],
        "attempts": len(attempts),
        "failed": sum(len(group.failed) for group in groups),
        "turns": len(turns),
        "breaks": sum(turn.broke != "none" for turn in turns),
        "gap": {kind: max(line[f"gap/{kind}"] for line in lines if f"gap/{kind}" in line) for kind in ("mean", "max")},
    }


def described(found: dict[str, Any]) -> list[str]:
    before, after = found["before"], found["after"]
    return [
        f"held-out success, sampled: {before['sampled']:.3f} -> {after['sampled']:.3f}; "
        f"greedy: {before['greedy']:.3f} -> {after['greedy']:.3f}; {found['steps']} steps",
        f"{found['attempts']} attempts of the agent recorded, {found['failed']} of them failed; "
        f"{found['turns']} turns, {found['breaks']} prompts that do not begin with the turn before",
        f"largest gap of a step between the endpoint's logprobs and the learner's: mean {found['gap']['mean']:.1e}, "
        f"max {found['gap']['max']:.1e}",
        f"{found['minutes']:.1f} minutes in all",
    ]


if __name__ == "__main__":
    main()
