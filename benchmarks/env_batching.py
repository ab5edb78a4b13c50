"""Makespan and environment calls of an evaluation under four ways of calling environments, which are settings of the
same code: in lock-step, one call per attempt, and micro-batched, with calls held back or not.

    python benchmarks/env_batching.py [--seeds 0 1 2 3] [--repeats 3] [--regimes ABCDEFGHIJS] [--only virtual | wall]
                                      [--only-report] [--quick] [--data PATH] [--picture PATH] [--json PATH]

First the regimes A to J under a virtual clock: the agent loop, the micro-batcher and `evaluate` as they are, an engine
that takes lognormal seconds per action (at most so many actions at once), and environments whose calls of n attempts
take c0 + c1 * n seconds, K calls at once; in I the attempts of a call run side by side, and it takes c0 and as long as
the slowest. Nothing is known of c0 and c1 in advance. Then some of them on the wall clock, at a tenth of their time,
with a judge that is served over HTTP on this machine; and the environment search with its own retrieval server, whose
searches cost what they cost (batched_search.py). The policies of a seed run one after another. Attempts come to the
same results under every policy; that is checked. Every finished evaluation is a line of the data, and is not made
again.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from matrix import Cell, finished, interval, make
from paired import COLORS
from picture import Picture, title

from turnwise.engines.base import Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.envs.base import Reply
from turnwise.evaluation.result import Result, evaluate
from turnwise.learn.tiny import build_tokenizer
from turnwise.messages import Message
from turnwise.rollout.batching.batches import PATIENCE, Batches
from turnwise.rollout.batching.flush import Adaptive, Lockstep, Rule
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.group import AttemptMaker
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt
from turnwise.runs.curve import INK
from turnwise.seeds import seed_of
from turnwise.testing import clock
from turnwise.types import Task

DATA = Path(__file__).parent / "data" / "env-batching.jsonl"
SPLIT = "heldout/sampled"
LONGEST = 1 << 10
"""Tokens of an action, at most."""
SEARCH = "Search"
WALL = 10.0
"""By how much regimes are scaled down on the wall clock."""
PATIENT = 1e9


@dataclass(frozen=True)
class Service:
    """What an environment's calls cost."""

    per_call: float
    per_item: float
    slots: int
    sigma: float = 0.0
    """Above 0 the attempts of a call run side by side, each for lognormal seconds with per_item for a median."""
    late: bool = False
    """Whether it grades attempts when they close, and their steps cost nothing."""

    def alone(self, task: Task, turn: int) -> float:
        """Seconds that one attempt adds to a call."""
        if not self.sigma:
            return self.per_item
        return self.per_item * math.exp(self.sigma * Random(seed_of("service", task.id, turn)).gauss(0, 1))

    def seconds(self, asked: list[tuple[Task, int]]) -> float:
        return self.per_call + (max if self.sigma else sum)([self.alone(task, turn) for task, turn in asked])


@dataclass(frozen=True)
class Regime:
    """A kind of evaluation."""

    name: str
    attempts: int
    max_turns: int
    median: float
    """Seconds per action."""
    sigma: float
    generations: int
    """Actions sampled at once."""
    services: tuple[Service, ...]

    def scaled(self, factor: float, attempts: int) -> Regime:
        """The same in less time."""
        services = [
            replace(service, per_call=service.per_call / factor, per_item=service.per_item / factor)
            for service in self.services
        ]
        return replace(self, attempts=attempts, median=self.median / factor, services=tuple(services))


REGIMES = [
    Regime("A 1 turn, judge, c0=6, K=8", 256, 1, 8.0, 0.8, 256, (Service(6.0, 0.05, 8),)),
    Regime("B 1 turn, reward model, c0=0.5, K=1", 512, 1, 8.0, 0.8, 512, (Service(0.5, 0.01, 1),)),
    Regime("C 8 turns, cheap calls, heavy tail", 256, 8, 3.0, 1.0, 256, (Service(0.01, 0.002, 16),)),
    Regime("D 8 turns, c0=1, K=2", 256, 8, 3.0, 1.0, 256, (Service(1.0, 0.01, 2),)),
    Regime("E 8 turns, sandbox, c1=2, K=32", 256, 8, 3.0, 1.0, 256, (Service(0.05, 2.0, 32),)),
    Regime("F 8 turns, light tail, c0=4, K=1", 256, 8, 3.0, 0.2, 256, (Service(4.0, 0.002, 1),)),
    Regime("G cheap and a judge, mixed", 256, 6, 3.0, 1.0, 256, (Service(0.01, 0.002, 16), Service(3.0, 0.05, 4))),
    Regime("H as D, 64 actions at once", 256, 8, 3.0, 1.0, 64, (Service(1.0, 0.01, 2),)),
    Regime("I 4 turns, judge side by side, K=64", 256, 4, 3.0, 1.0, 256, (Service(0.2, 4.0, 64, 1.0),)),
    Regime("J 8 turns, graded at close, c0=6, K=4", 256, 8, 3.0, 1.0, 256, (Service(6.0, 0.05, 4, late=True),)),
]
POLICIES: dict[str, tuple[Rule, Lane]] = {
    "lock-step": (Lockstep(), Lane()),
    "per attempt": (Adaptive(max_batch=1), Lane()),
    "wait 0": (Adaptive(), Lane()),
    "wait c0/2": (Adaptive(), Lane(max_wait_prices=PATIENCE)),
    "wait c0": (Adaptive(), Lane(max_wait_prices=1.0)),
}
DEFAULTS = {"training": "wait 0", "validation": "wait c0/2"}
MUCH_BETTER = "DFG"
FEW_CALLS = "ABDF"


class Workload:
    """The attempts of a regime: how many turns each has, and how long each of its actions takes."""

    def __init__(self, regime: Regime, seed: int) -> None:
        random = Random(seed * 7919 + 13)
        self.tasks: list[Task] = []
        self.seconds: dict[str, list[float]] = {}
        for number in range(regime.attempts):
            fewest = max(1, regime.max_turns // 4)
            turns = random.randint(fewest, regime.max_turns) if regime.max_turns > 1 else 1
            dataset = number % len(regime.services)
            task = Task(f"{seed}-{number}", f"dataset {dataset}", {"turns": turns})
            self.tasks.append(task)
            session = Attempt(seed, SPLIT, task).session
            self.seconds[session] = [regime.median * math.exp(random.gauss(0, regime.sigma)) for _ in range(turns)]

    def bound(self, regime: Regime) -> float:
        """When the slowest attempt by itself, the engine, and the services by price per item are done at best."""
        alone, work = [], dict.fromkeys(range(len(regime.services)), 0.0)
        for number, (task, actions) in enumerate(zip(self.tasks, self.seconds.values(), strict=True)):
            service = regime.services[number % len(regime.services)]
            calls = [len(actions)] if service.late else range(len(actions))
            alone.append(sum(actions) + sum(service.seconds([(task, turn)]) for turn in calls))
            work[number % len(regime.services)] += 0.0 if service.sigma else service.per_item * len(calls)
        engine = sum(map(sum, self.seconds.values())) / regime.generations
        return max(*alone, engine, *(work[place] / service.slots for place, service in enumerate(regime.services)))


def environment(serve: Any, service: Service) -> Any:
    """A class of environments that last as many turns as their tasks say and ask `serve` to score what was said."""

    class Served:
        async def open(self, task: Task) -> Reply:
            self.task, self.said, self.turn = task, "", 0
            return Reply((Message("user", "go"),))

        async def step(self, message: Message) -> Reply:
            return self.answer(message, 0.0)

        async def close(self) -> None:
            return None

        def answer(self, message: Message, score: float) -> Reply:
            self.said, self.turn = message.content, self.turn + 1
            return Reply((Message("user", "on"),), reward=score, finished=self.turn == self.task.data["turns"])

    class Stepping(Served):
        step_many: Any = classmethod(serve.steps)

    class Grading(Served):
        close_many: Any = classmethod(serve.closes)

    return Grading if service.late else Stepping


def scores(texts: list[str]) -> list[float]:
    return [len(text) / 4 for text in texts]


class Asleep:
    """A service that takes its time on the loop's clock."""

    def __init__(self, service: Service) -> None:
        self.service = service

        async def steps(cls: Any, environments: list[Any], messages: list[Message]) -> list[Reply]:
            await asyncio.sleep(service.seconds([(one.task, one.turn) for one in environments]))
            paid = scores([message.content for message in messages])
            return [one.answer(*heard) for one, *heard in zip(environments, messages, paid, strict=True)]

        async def closes(cls: Any, environments: list[Any]) -> list[Reply]:
            await asyncio.sleep(service.seconds([(one.task, one.turn) for one in environments]))
            return [Reply(outcome=score) for score in scores([one.said for one in environments])]

        self.steps, self.closes = steps, closes


class OverHttp:
    """A service at an address, asked by plain functions that block."""

    def __init__(self, port: int) -> None:
        def ask(texts: list[str]) -> list[float]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            try:
                connection.request("POST", "/", json.dumps(texts), {"Content-Type": "application/json"})
                found: list[float] = json.loads(connection.getresponse().read())
                return found
            finally:
                connection.close()

        def steps(cls: Any, environments: list[Any], messages: list[Message]) -> list[Reply]:
            paid = ask([message.content for message in messages])
            return [one.answer(*heard) for one, *heard in zip(environments, messages, paid, strict=True)]

        def closes(cls: Any, environments: list[Any]) -> list[Reply]:
            return [Reply(outcome=score) for score in ask([one.said for one in environments])]

        self.steps, self.closes = steps, closes


@contextmanager
def judge(service: Service) -> Iterator[int]:
    """The port of a judge that takes per_call + per_item * n seconds for n texts, and `slots` requests at once."""
    slots = threading.Semaphore(service.slots)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with slots:
                time.sleep(service.per_call + service.per_item * len(texts))
            body = json.dumps(scores(texts)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Figures:
    """What one evaluation took."""

    makespan: float
    calls: int
    cpu: float
    """CPU seconds of the process, and of a retrieval server."""
    outcome: tuple[float, ...]
    """What the attempts were paid."""


async def measure(
    regime: Regime, workload: Workload, policy: str, seed: int, renderer: Renderer, serving: list[Any]
) -> Figures:
    """One evaluation by the loop's clock."""
    rule, lane = POLICIES[policy]
    sampling = asyncio.Semaphore(regime.generations)
    left = {session: iter(seconds) for session, seconds in workload.seconds.items()}

    async def say(prompt: Any, session: str, noise: int) -> str:
        async with sampling:
            await asyncio.sleep(next(left[session]))
        return "x" * (1 + noise % 4)

    batches, makers = [], {}
    for place, (service, serve) in enumerate(zip(regime.services, serving, strict=True)):
        kind = environment(serve, service)
        batches.append(Batches(kind, rule=rule, slots=service.slots, call_seconds=None))
        makers[f"dataset {place}"] = batches[-1].wrap(kind, lane)
    practice = practice_of(makers, say, regime.max_turns, seed, renderer)
    return await timed(practice, workload.tasks, batches)


def practice_of(makers: Any, say: Any, max_turns: int, seed: int, renderer: Renderer) -> AttemptMaker:
    """Attempts whose actions `say` decides."""
    return AttemptMaker(
        makers,
        ScriptedEngine(say, lambda text: renderer.encode(text).tolist(), end_token=renderer.end_token),
        renderer,
        Sampling(LONGEST),
        Limits(max_turns, 1 << 20, LONGEST, 1 << 20, PATIENT, PATIENT),
        seed,
        SPLIT,
        attempts=1,
    )


async def timed(practice: AttemptMaker, tasks: list[Task], batches: list[Batches]) -> Figures:
    began, computed = asyncio.get_running_loop().time(), time.process_time()
    result = await evaluate(practice, tasks, 1.0)
    makespan, cpu = asyncio.get_running_loop().time() - began, time.process_time() - computed
    figures = [own.report() for own in batches]
    calls = sum(int(own.get("step/calls", 0) + own.get("close/calls", 0)) for own in figures)
    return Figures(makespan, calls, cpu, paid(result))


def paid(result: Result) -> tuple[float, ...]:
    assert result.num_attempts == len(result.groups)
    assert not any(group.failed for group in result.groups)
    return tuple(group.trajectories[0].total for group in result.groups)


def agreed(found: dict[str, Figures]) -> dict[str, Figures]:
    """The figures, once every policy is known to have paid every attempt the same."""
    assert len({figures.outcome for figures in found.values()}) == 1, "results depend on the policy"
    return found


def by_policy(found: dict[str, Figures]) -> dict[str, Any]:
    """What is written of figures that agree."""
    return {name: {"makespan": one.makespan, "calls": one.calls, "cpu": one.cpu} for name, one in agreed(found).items()}


def virtual(regime: Regime, seed: int, renderer: Renderer) -> dict[str, Any]:
    """Makespans and calls under the virtual clock, and the lower bound."""
    serving = [Asleep(service) for service in regime.services]
    workload = Workload(regime, seed)
    work = {policy: measure(regime, workload, policy, seed, renderer, serving) for policy in POLICIES}
    found = {policy: clock.run(one) for policy, one in work.items()}
    return {**by_policy(found), "lower bound": workload.bound(regime)}


def on_the_wall(regime: Regime, seed: int, renderer: Renderer) -> dict[str, Any]:
    """The same by the wall clock with a judge over HTTP."""
    workload = Workload(regime, seed)
    found = {}
    with judge(regime.services[0]) as port:
        for policy in POLICIES:
            found[policy] = asyncio.run(measure(regime, workload, policy, seed, renderer, [OverHttp(port)]))
    return {**by_policy(found), "lower bound": workload.bound(regime)}


def searching(seed: int, attempts: int, renderer: Renderer) -> dict[str, Any]:
    """The same with the environment search and its retrieval server."""
    from batched_search import SLOTS, Searches

    searches = Searches(seed, attempts)

    async def searched(policy: str) -> Figures:
        rule, lane = POLICIES[policy]
        batches = Batches(searches.kind, rule=rule, slots=SLOTS, call_seconds=None)
        makers = {"search": batches.wrap(searches.make, lane)}
        practice = practice_of(makers, searches.sayer(), searches.max_turns, seed, renderer)
        computed = searches.server_seconds()
        found = await timed(practice, searches.tasks, [batches])
        return replace(found, cpu=found.cpu + searches.server_seconds() - computed)

    found = {policy: asyncio.run(searched(policy)) for policy in POLICIES}
    return {**by_policy(found), "lower bound": searches.bound()}


def run_cell(cell: Cell, renderer: Renderer, quick: bool = False) -> dict[str, Any]:
    began = time.process_time()
    letter, seed = cell["regime"], cell["seed"]
    if letter == SEARCH[0]:
        found = searching(seed, 8 if quick else 128, renderer)
    else:
        [regime] = [regime for regime in REGIMES if regime.name[0] == letter]
        if cell["clock"] == "virtual":
            found = virtual(regime.scaled(1.0, regime.attempts // 4) if quick else regime, seed, renderer)
        else:
            found = on_the_wall(regime.scaled(*((40.0, 32) if quick else (WALL, 256))), seed, renderer)
    return {"found": found, "cpu_seconds": time.process_time() - began}


# ---------------------------------------------------------------- what is printed

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""By regime, what was found with each seed."""


def rows_of(runs: Sequence[Mapping[str, Any]], kind: str) -> Rows:
    """Of the wall clock, medians over what was repeated with a seed."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for name in (*(regime.name for regime in REGIMES), SEARCH):
        for run in runs:
            if run["cell"]["clock"] == kind and run["cell"]["regime"] == name[0]:
                found.setdefault(name, {}).setdefault(run["cell"]["seed"], []).append(run["found"])
    return {name: [combined(statistics.median, same) for same in by_seed.values()] for name, by_seed in found.items()}


def combined(how: Callable[[list[float]], float], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **{
            policy: {name: how([one[policy][name] for one in found]) for name in found[0][policy]}
            for policy in POLICIES
        },
        "lower bound": how([one["lower bound"] for one in found]),
    }


def print_rows(rows: Rows, digits: int) -> None:
    print(f"| regime | {' | '.join(POLICIES)} | lower bound |")
    print("|---" * (len(POLICIES) + 2) + "|")
    for name, found in rows.items():
        row = combined(statistics.fmean, found)
        cells = [f"{row[policy]['makespan']:.{digits}f} / {row[policy]['calls']:.0f}" for policy in POLICIES]
        print(f"| {name} | {' | '.join(cells)} | {row['lower bound']:.{digits}f} |", flush=True)


def print_ratios(rows: Rows) -> None:
    """Makespans as multiples of validation's, seed by seed."""
    own = DEFAULTS["validation"]
    print(
        f"\ntimes as long as with {own}, seed by seed: mean +- half a 95 % interval (smallest to largest); CPU seconds"
    )
    for name, found in rows.items():
        for policy in ("lock-step", "per attempt"):
            times = [one[policy]["makespan"] / one[own]["makespan"] for one in found]
            cpu = [statistics.fmean(one[kind]["cpu"] for one in found) for kind in (policy, own)]
            print(f"  {name:38} {policy:12} {interval(times)} ({min(times):.2f} to {max(times):.2f})"
                  f"   {cpu[0]:.1f} against {cpu[1]:.1f}")  # fmt: skip


def checks(rows: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the micro-batcher is held to, and whether it is so, for the waits of training and of validation."""
    found = []
    for kind, policy in DEFAULTS.items():
        over = {name: row[policy]["makespan"] / min(peers(row)) - 1 for name, row in rows.items()}
        worst = max(over, key=lambda name: over[name])
        found.append(
            (f"{kind}: at most 3 % behind the better peer, worst {over[worst]:+.1%} in {worst[0]}", over[worst] <= 0.03)
        )
        better = {name[0]: max(peers(row)) / row[policy]["makespan"] for name, row in rows.items()}
        much = {name: better[name] for name in MUCH_BETTER if name in better}
        shown = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in much.items())
        found.append((f"{kind}: 3 times better than the worse peer: {shown}", min(much.values(), default=3.0) >= 3.0))
        fewer = {name[0]: row["per attempt"]["calls"] / row[policy]["calls"] for name, row in rows.items()}
        few = {name: fewer[name] for name in FEW_CALLS if name in fewer}
        shown = ", ".join(f"{name} 1/{ratio:.0f}" for name, ratio in few.items())
        found.append((f"{kind}: a quarter of the per-attempt calls: {shown}", min(few.values(), default=4.0) >= 4.0))
    return found


def peers(row: dict[str, Any]) -> list[float]:
    return [row[policy]["makespan"] for policy in ("lock-step", "per attempt")]


def report(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Print everything; False where the micro-batcher misses what it is held to."""
    held = []
    for kind, digits in (("virtual", 0), ("wall", 2)):
        rows = rows_of(runs, kind)
        if rows:
            print(f"\n{kind} clock, means over {min(map(len, rows.values()))} seeds: seconds / environment calls\n")
            print_rows(rows, digits)
            print_ratios(rows)
        if rows and kind == "virtual":
            held = checks({name: combined(statistics.fmean, found) for name, found in rows.items()})
            print("\n" + "\n".join(f"{'yes' if holds else 'NO '}  {text}" for text, holds in held))
    return all(holds for _, holds in held)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """How long each way takes, as a multiple of the lower bound: means over seeds, smallest and largest."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    clocks = [kind for kind in ("virtual", "wall") if rows_of(runs, kind)]
    picture = Picture(11, 3.9, columns=len(clocks), shared=False)
    for axes, kind in zip(picture.panels[0], clocks, strict=True):
        rows = rows_of(runs, kind)
        axes.set_yscale("log")
        axes.set_ylim(0.9, 120 if kind == "virtual" else 12)
        axes.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
        for number, (policy, color) in enumerate(zip(("lock-step", "per attempt", "wait c0/2"), COLORS, strict=False)):
            times = [[one[policy]["makespan"] / one["lower bound"] for one in found] for found in rows.values()]
            means = [statistics.fmean(values) for values in times]
            reach = [[mean - min(values) for mean, values in zip(means, times, strict=True)],
                     [max(values) - mean for mean, values in zip(means, times, strict=True)]]  # fmt: skip
            across = [place + 0.27 * (number - 1) for place in range(len(rows))]
            axes.bar(across, means, 0.25, yerr=reach, color=color, ecolor=INK, capsize=2, label=policy)
        axes.set_xticks(range(len(rows)), [name if name == SEARCH else name[0] for name in rows])
        title(axes, f"{kind} clock")
    picture.save(path, "regime", "times the lower bound", legend="upper left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="workloads; the first three on the wall clock"
    )
    parser.add_argument("--repeats", type=int, default=3, help="on the wall clock; medians are printed")
    parser.add_argument("--regimes", default="ABCDEFGHIJS", help="letters of those to run")
    parser.add_argument("--only", choices=["virtual", "wall"], help="run one of the two parts")
    parser.add_argument("--data", type=Path, default=DATA, help="finished evaluations, as JSON lines")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that it runs, no figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the makespans here, as SVG")
    chosen = parser.parse_args()
    seeds, on_wall = (chosen.seeds[:1], "D") if chosen.quick else (chosen.seeds, f"ADJ{SEARCH[0]}")
    virtual_ones = [
        {"clock": "virtual", "regime": regime.name[0], "seed": seed}
        for seed in seeds
        for regime in REGIMES
        if regime.name[0] in chosen.regimes and chosen.only != "wall"
    ]
    wall_ones = [
        {"clock": "wall", "regime": letter, "seed": seed, "repeat": repeat}
        for repeat in range(1 if chosen.quick else chosen.repeats)
        for seed in seeds[:3]
        for letter in on_wall
        if letter in chosen.regimes and chosen.only != "virtual"
    ]
    renderer = Renderer(build_tokenizer([]))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "quick.jsonl" if chosen.quick else chosen.data
        if not chosen.only_report:
            make([*virtual_ones, *wall_ones], data, partial(run_cell, renderer=renderer, quick=chosen.quick))
        runs = finished(data)
    holds = report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=2) + "\n")
    return 0 if holds or chosen.quick else 1


if __name__ == "__main__":
    sys.exit(main())
