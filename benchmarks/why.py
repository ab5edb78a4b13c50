"""Broken recipes and sound ones: does `turnwise why` name the cause, live and afterwards, and nothing on the sound?

    python benchmarks/why.py [--only NAME ...] [--quick] [--json PATH]

All runs train a tiny model on pairs of words, two turns a task. Most start from a model that was trained on
demonstrations first and solves somewhat less than half of the tasks.

Ten broken recipes: learning rate 1; temperature 0.01; an environment that pays 0; one that pays 1; a zero-variance
filter where the reward hardly depends on the actions; max_action_tokens 1; max_prompt_tokens 10; a template that shows
only the first message; a wrong end token; 3 tasks with fixed answers.

Five sound ones: the quick start's recipe; a run with a warm start of its own; a run of three steps; max_lag 2; an
environment that fails in 5 % of its attempts.

Ten more, chosen and written down before any of them was run. No threshold was loosened for them; after their first run
two checks became stricter, because simulated runs that vary only by chance got findings.
 1. the zero-variance filter with an environment that pays 0, where no group is ever kept and the run stops
 2. an environment that raises in 40 % of its attempts
 3. two datasets and the zero-variance filter, and one of them pays a constant
 4. learning rate 0.05, some fifty times too high
 5. an entropy bonus of 5
 6. max_prompt_tokens with room for the first prompt and not for the second
 7. sixteen epochs over each step's groups at learning rate 1e-2
 8. a reward that depends on the task and not on what the model says
 9. a model that writes tool calls which cannot be parsed
10. a reward that is a coin flip

Exit code 1 if one of the first ten is missed, live within 5 steps or afterwards, or one of the five gets a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.cli.commands import main as turnwise
from turnwise.cli.terminal import PlainScreen
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.inspect.why import diagnose
from turnwise.messages import Message
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import archived_steps, read_step, step_path
from turnwise.runs.describe import describe
from turnwise.runs.screen import table
from turnwise.runs.tracker import read_metrics
from turnwise.runs.why.table import CHECKS
from turnwise.runs.why.watcher import Watcher
from turnwise.schedule.stopping import RunStopped
from turnwise.types import Task

HERE = Path(__file__).parent
OPPOSITES = {"hot": "cold", "big": "small", "old": "new", "wet": "dry", "fast": "slow", "high": "low"}
ANSWERS = tuple(OPPOSITES.values())
WITHIN = 5
"""Steps after its appearing in which a cause must be named."""

RECIPE = """
steps = 8
groups_per_step = 8
max_tokens_per_microbatch = 8192
[model]
path = "{model}"
threads = 1
[[env]]
name = "why:Pairs"
tasks = {{ count = 400 }}
[rollout]
group_size = 8
max_turns = 3
max_prompt_tokens = 100
max_action_tokens = 6
max_trajectory_tokens = 110
[engine]
max_num_seqs = 64
[loss]
name = "ppo_clip"
anchor = "engine"
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 4
tasks = 32
final_tasks = 64
[checkpoints]
every = 100
"""
TINY = """[model]
path = "tiny"
hidden = 64
layers = 2
threads = 1
"""
WARM_START = """
[sft]
updates = {updates}
batch = 32
noise = 0.45
[sft.optimizer]
learning_rate = 5e-3
"""


class Pairs:
    """An attempt: two words in turn, each to be answered with its opposite.

    Example:
        user: 17 hot      assistant: cold
        user: big         assistant: small      -> outcome 1
    """

    def __init__(
        self,
        pays: Literal["right", "zero", "one", "task", "rarely", "coin"] = "right",
        failing: float = 0.0,
        fixed: bool = False,
        calls: bool = False,
    ) -> None:
        """pays: what for. failing: share of attempts that raise. fixed: each task has a first answer that only those
        who have seen it know. calls: experts write calls that no parser reads."""
        self.pays, self.failing, self.fixed, self.calls = pays, failing, fixed, calls

    @staticmethod
    def tasks(split: str, seed: int, count: int = 400) -> Iterator[Task]:
        def draw(random: random.Random) -> dict[str, Any]:
            return {"words": random.sample(sorted(OPPOSITES), 2), "number": random.randrange(1000)}

        return draw_tasks("pairs", split, count, seed, draw)

    async def open(self, task: Task) -> Reply:
        words, self.number = task.data["words"], task.data["number"]
        self.answers = [OPPOSITES[word] for word in words]
        if self.fixed:
            self.answers[0] = ANSWERS[self.number % len(ANSWERS)]
        self.second = words[1]
        self.said: list[str] = []
        return Reply((Message("user", f"{self.number} {words[0]}"),))

    async def step(self, message: Message) -> Reply:
        if random.random() < self.failing / 2:
            raise RuntimeError("the environment is out of order")
        self.said.append(message.content.strip())
        if len(self.said) < 2:
            return Reply((Message("user", self.second),))
        return Reply(finished=True, outcome=float(self.outcome(self.said == self.answers)))

    def outcome(self, right: bool) -> bool:
        by_task = self.number % 2 == 0
        rarely = right if self.number % 20 == 0 else by_task
        coin = random.random() < 0.5
        return {"right": right, "zero": False, "one": True, "task": by_task, "rarely": rarely, "coin": coin}[self.pays]

    async def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: random.Random) -> str:
        answer = random.choice(ANSWERS) if random.random() < noise else self.answers[len(self.said)]
        return f'<tool_call>{{"name": {answer}</tool_call>' if self.calls else answer


@dataclass(frozen=True)
class Case:
    """A recipe and what should be said of it."""

    name: str
    expected: tuple[str, ...]
    """Names of checks, one of which must fire; none for a sound recipe."""
    overrides: tuple[str, ...] = ()
    model: str = "model"
    """Which of the models it starts from; empty for a tiny one with a warm start of its own."""
    more: str = ""
    """Tables of the recipe beside those of all."""
    recipe: str = ""
    """A recipe of the repository instead."""


ENVIRONMENT = "env.0.settings"
BROKEN = (
    Case("learning rate 1", ("learning_rate",), ("optimizer.learning_rate=1",)),
    Case("temperature 0.01", ("low_temperature",), ("sampling.temperature=0.01",)),
    Case("pays 0", ("constant_reward",), (f"{ENVIRONMENT}.pays=zero",)),
    Case("pays 1", ("constant_reward",), (f"{ENVIRONMENT}.pays=one",)),
    Case(
        "zero-variance filter", ("filter",), ("filter.name=dynamic_sampling", f"{ENVIRONMENT}.pays=rarely", "steps=4")
    ),
    Case("max_action_tokens 1", ("token_limit",), ("rollout.max_action_tokens=1",)),
    Case(
        "max_prompt_tokens 10", ("prompt_too_long",), ("rollout.max_prompt_tokens=10", "guards.max_dropped_groups=64")
    ),
    Case("template of one message", ("not_shown",), model="first"),
    Case("wrong end token", ("no_end",), model="end"),
    Case("3 tasks", ("few_tasks",), (f"{ENVIRONMENT}.fixed=true", "env.0.tasks.count=3", "steps=16")),
)
SOUND = (
    Case("quick start", (), ("steps=10", "evaluation.tasks=32", "evaluation.final_tasks=32"), recipe="quickstart"),
    Case("warm start", (), model="", more=WARM_START.format(updates=120)),
    Case("three steps", (), ("steps=3",)),
    Case("max_lag 2", (), ("max_lag=2", "steps=12")),
    Case("5 % fail", (), (f"{ENVIRONMENT}.failing=0.05", "rollout.failures.retries=0", "steps=12")),
)
SECOND = """
[[env]]
name = "why:Pairs"
dataset = "constant"
settings = { pays = "zero" }
tasks = { count = 400 }
"""
MORE = (
    Case(
        "filter and pays 0",
        ("constant_reward", "filter"),
        ("filter.name=dynamic_sampling", f"{ENVIRONMENT}.pays=zero", "guards.max_dropped_groups=64"),
    ),
    Case("40 % fail", ("failures",), (f"{ENVIRONMENT}.failing=0.4", "rollout.failures.retries=0")),
    Case("one of two is constant", ("starved_dataset",), ("filter.name=dynamic_sampling",), more=SECOND),
    Case("learning rate 0.05", ("learning_rate",), ("optimizer.learning_rate=0.05",)),
    Case("entropy bonus 5", ("entropy_bonus",), ("entropy=5.0",)),
    Case("short conversations", ("conversation_too_long",), ("rollout.max_prompt_tokens=18",)),
    Case("16 epochs", ("clipping", "learning_rate"), ("epochs=16", "optimizer.learning_rate=1e-2")),
    Case("reward by task", ("equal_groups",), (f"{ENVIRONMENT}.pays=task",)),
    Case(
        "calls nobody reads",
        ("faults",),
        (f"{ENVIRONMENT}.calls=true", "rollout.tools=hermes", "rollout.max_action_tokens=24", "steps=6"),
        model="",
        more=WARM_START.format(updates=120),
    ),
    Case("coin flip", ("equal_groups", "constant_reward"), (f"{ENVIRONMENT}.pays=coin",)),
)


class Silence(PlainScreen):
    """Prints nothing, and notes the processor's time after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks: list[float] = []

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        self.ticks.append(time.process_time())


class Ear(logging.Handler):
    """Remembers what the watcher says, and when."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if (finding := getattr(record, "finding", None)) is not None:
            self.heard.setdefault(finding.name, finding.step)


@dataclass(frozen=True)
class Outcome:
    """What was said of a case."""

    case: Case
    live: Mapping[str, int]
    """Names of checks that fired while the run went on, by the step."""
    afterwards: tuple[str, ...]
    """Names of checks that `turnwise why` reports."""
    seconds: float
    """Of a processor, as others may use the machine too."""
    share: float
    """Part of a step that describing its groups and looking at its metrics takes."""
    ended: str

    @property
    def named_at(self) -> int | None:
        return min((step for name, step in self.live.items() if name in self.case.expected), default=None)

    @property
    def is_right(self) -> bool:
        """Whether the cause was named in time, live and afterwards; or nothing was, if nothing is wrong."""
        if not self.case.expected:
            return not self.live and not self.afterwards
        in_time = self.named_at is not None and self.named_at <= WITHIN
        return in_time and bool(set(self.afterwards) & set(self.case.expected))

    @property
    def others(self) -> list[str]:
        """What was said beside the cause."""
        return sorted({*self.live, *self.afterwards} - set(self.case.expected))


def make_models(folder: Path) -> None:
    """A model that solves some tasks; the same with a template of one message, and with another end token."""
    from turnwise.learn.policy import load_model, load_tokenizer

    recipe = folder / "base.toml"
    of_tiny = RECIPE.replace('[model]\npath = "{model}"\nthreads = 1\n', TINY)
    recipe.write_text(of_tiny.format() + WARM_START.format(updates=120))
    assert turnwise(["sft", str(recipe), f"out={folder / 'model'}"]) == 0
    for name, template, end in (
        (
            "first",
            "<|im_start|>{{ messages[0].role }}\n{{ messages[0].content }}<|im_end|>\n"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "<|im_end|>",
        ),
        (
            "end",
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|endoftext|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "<|endoftext|>",
        ),
    ):
        model: Any = load_model(folder / "model")
        tokenizer: Any = load_tokenizer(folder / "model")
        tokenizer.chat_template, tokenizer.eos_token = template, end
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def recipe_of(case: Case, folder: Path) -> Path:
    """The file of a case's recipe."""
    if case.recipe:
        return HERE.parent / "recipes" / f"{case.recipe}.toml"
    path = folder / f"{case.name.replace(' ', '-')}.toml"
    text = RECIPE
    if not case.model:
        text = text.replace('[model]\npath = "{model}"\nthreads = 1\n', TINY)
    path.write_text(text.format(model=folder / case.model) + case.more)
    return path


def run(case: Case, folder: Path) -> Outcome:
    """Train a case's recipe and note what is said of it."""
    from turnwise.assemble.run import start

    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    recipe = load_recipe(recipe_of(case, folder), [f"out={out}", *case.overrides])
    ear, began, ended = Ear(), time.process_time(), "finished"
    random.seed(0)
    screen = Silence()
    logger = logging.getLogger("turnwise")
    logger.addHandler(ear)
    logger.propagate = False
    try:
        asyncio.run(start(recipe, screen, asyncio.Event()))
    except RunStopped as error:
        ended = f"stopped: {error}"
    finally:
        logger.removeHandler(ear)
    afterwards = tuple(finding.name for finding in diagnose(out).findings)
    seconds = time.process_time() - began
    return Outcome(case, ear.heard, afterwards, seconds, cost_share(out, recipe, screen), ended)


def cost_share(out: Path, recipe: Recipe, screen: Silence) -> float:
    """Seconds that describing a step's groups and looking at its metrics take, over those of a step; of a processor."""
    lines = read_metrics(out / "metrics.jsonl")
    watcher = Watcher(recipe)
    watcher.said = {check.name for check in CHECKS}  # it looks and says nothing
    spent = []
    for line in lines:
        metrics = {name: value for name, value in line.items() if name != "step"}
        began = time.process_time()
        watcher.log(int(line["step"]), metrics)
        spent.append(time.process_time() - began)
    for step in archived_steps(out / "archive"):
        groups = [record.group for record in read_step(step_path(out / "archive", step))]
        began = time.process_time()
        describe(groups, (), version=step, success_at=1.0)
        spent.append(time.process_time() - began)
    steps = [after - before for before, after in pairwise(screen.ticks)]
    return sum(spent) / len(steps) / statistics.median(steps) if steps else float("nan")


def report(title: str, outcomes: Sequence[Outcome]) -> None:
    rows = [
        [
            outcome.case.name,
            " or ".join(outcome.case.expected) or "nothing",
            "-" if outcome.named_at is None else str(outcome.named_at),
            ", ".join(outcome.afterwards) or "nothing",
            ", ".join(outcome.others) or "-",
            f"{outcome.seconds:.0f} s",
            f"{outcome.share:.2%}",
            "yes" if outcome.is_right else "NO",
        ]
        for outcome in outcomes
    ]
    print(f"\n{title}")
    for line in table(["recipe", "cause", "at step", "why says", "others", "took", "cost", "right"], rows):
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these recipes")
    parser.add_argument("--quick", action="store_true", help="two broken recipes and a sound one")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    sys.path.insert(0, str(HERE))
    wanted: Callable[[Case], bool] = lambda case: chosen.only is None or case.name in chosen.only
    if chosen.quick:
        wanted = lambda case: case.name in ("pays 0", "max_action_tokens 1", "three steps")
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for title, cases in (("ten broken", BROKEN), ("five sound", SOUND), ("ten more", MORE)):
            outcomes[title] = []
            for case in filter(wanted, cases):
                outcome = run(case, Path(folder))
                outcomes[title].append(outcome)
                print(f"{case.name}: {dict(outcome.live)} {outcome.ended[:100]}", file=sys.stderr, flush=True)
    for title, found in outcomes.items():
        if found:
            report(title, found)
            print(f"{sum(outcome.is_right for outcome in found)} of {len(found)}")
    if chosen.json:
        figures = {
            title: [
                {"name": o.case.name, "live": dict(o.live), "why": o.afterwards, "right": o.is_right} for o in found
            ]
            for title, found in outcomes.items()
        }
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    wrong = [o for title in ("ten broken", "five sound") for o in outcomes[title] if not o.is_right]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
