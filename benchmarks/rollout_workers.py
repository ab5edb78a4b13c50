"""What rollout workers are worth: turns per second, CPU per turn, and the tokens they sample.

    python benchmarks/rollout_workers.py [--quick] [--only speed|cost|tokens] [--json PATH]

speed   Attempts of 50 turns as in benchmarks/turn_cost.py (about 100 tokens an action and an observation, 10,000 at the
        end) by 1 and by 2 worker processes. The engine only plays back: in each worker, as a client that connects by
        itself, and in the run, over the workers' lines. CPU is that of the workers and of the run.
cost    CPU of one process per turn: the loop alone, with JSON to a played server as a client of vLLM has it, and with
        JSON of which only the new tokens are written. The server is another process. And what a finished group costs
        the worker that sends it, and the run that reads it. With --ways loop whole and PYTHONPATH the src of a version
        before there were workers, its cost.
tokens  The micro recipe at max_lag = 0, trained with 0, 1, 2 and 4 workers: a checksum of all tokens and logprobs that
        training and evaluations sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

ATTEMPTS = 8
"""Of a group."""
TICKS = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- speed


def worker_parts(turns: int, where: str, desk: Any) -> Any:
    """What a worker works with: its own playback, or the run's."""
    from turn_cost import long_turns

    from turnwise.cluster.rollout_worker import WorkerParts
    from turnwise.rollout.environments import Environments
    from turnwise.rollout.open_limit import EnvironmentMaker

    environment, renderer, playback = long_turns(turns)
    engine = playback if where == "workers" else desk.engine("training", 1 << 20)
    environments = {"e": EnvironmentMaker(environment, failures=desk.failures)}
    maker = maker_of(environments, engine, renderer, turns)
    return WorkerParts({"train": maker}, Environments({}, desk.failures), 600.0)


def maker_of(environments: Any, engine: Any, renderer: Any, turns: int) -> Any:
    from turnwise.engines.base import Sampling
    from turnwise.rollout.group import AttemptMaker
    from turnwise.rollout.limits import Limits

    limits = Limits(turns + 1, 1 << 19, 512, 1 << 20, 600.0, 36000.0)
    settings = {"limits": limits, "split": "train", "attempts": ATTEMPTS, "seed": 0}
    return AttemptMaker(environments, engine, renderer, Sampling(512), **settings)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def groups_by(workers: int, where: str, groups: int, turns: int, repeats: int) -> dict[str, float]:
    """Turns per second and CPU milliseconds per turn, the median of the repeats."""
    import rollout_workers as here
    from turn_cost import long_turns

    from turnwise.cluster.rollout_pool import RolloutPool
    from turnwise.cluster.worker_host import ProcessHost
    from turnwise.rollout.concurrently import all_of
    from turnwise.rollout.environments import Environments
    from turnwise.rollout.failures import Failures
    from turnwise.types import Task

    make = pickle.dumps(partial(here.worker_parts, turns, where))
    engines = {"training": long_turns(turns)[2]}
    rows = []
    async with RolloutPool(ProcessHost, workers, make, engines, Environments({}, Failures())) as pool:
        attempts = pool.attempts("train", ATTEMPTS)
        pids = [slot.link.host.child.pid for slot in pool.slots]
        for repeat in range(repeats + 1):
            tasks = [Task(f"{repeat}-{number}", "e") for number in range(groups)]
            gc.collect()
            own, others, began = time.process_time(), sum(map(cpu_of, pids)), time.perf_counter()
            made = await all_of(attempts.group(task, 0) for task in tasks)
            seconds = time.perf_counter() - began
            num_turns = sum(len(one.turns) for group in made for one in group.trajectories)
            assert num_turns == groups * ATTEMPTS * turns
            per_turn = 1000.0 / num_turns
            spent = time.process_time() - own, sum(map(cpu_of, pids)) - others
            rows.append((num_turns / seconds, spent[1] * per_turn, spent[0] * per_turn))
    figures = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    return dict(zip(("turns_per_second", "worker_ms", "run_ms"), figures, strict=True))


def measure_speed(groups: int, turns: int, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for where in ("workers", "run"):
        for workers in (1, 2):
            row = asyncio.run(groups_by(workers, where, groups, turns, repeats))
            found[f"{where}, {workers}"] = row
            cpu = f"CPU ms per turn: workers {row['worker_ms']:.3f}, run {row['run_ms']:.3f}"
            print(
                f"speed   engine in the {where:8} {workers} workers: {row['turns_per_second']:6.0f} turns/s; {cpu}",
                flush=True,
            )
        ratio = found[f"{where}, 2"]["turns_per_second"] / found[f"{where}, 1"]["turns_per_second"]
        print(f"speed   engine in the {where:8} 2 workers / 1 worker: {ratio:.2f}", flush=True)
        found[f"{where}, ratio"] = ratio
    return found


# ---------------------------------------------------------------- cost


def answer_of(action: Sequence[int]) -> bytes:
    """What vLLM answers for an action, as its token route does."""
    content = [{"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in action]
    choice = {
        "index": 0,
        "token_ids": list(action),
        "logprobs": {"content": content},
        "weight_versions": [{"version": "0", "start": 0, "end": len(action)}],
        "finish_reason": "stop",
        "stop_reason": action[-1],
    }
    return json.dumps({"request_id": "a", "choices": [choice]}).encode()


def serve(turns: int) -> None:
    """A played server: reads requests, and answers each with one of the playback's actions."""
    from turn_cost import long_turns

    answers = [answer_of(each.tokens.tolist()) for each in long_turns(turns)[2].completions]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(size)
                number = int(body.split(b'"seed": ')[1].split(b",")[0].split(b"}")[0])
                answer = answers[number % len(answers)]
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
                writer.write(head + answer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 24)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(listen())


class JsonEngine:
    """Calls a server as the client of vLLM does: the prompt as JSON, or only what is new of it."""

    shares_weights = False
    context = 1 << 20

    def __init__(self, port: int, kept: bool) -> None:
        import aiohttp

        self.url = f"http://127.0.0.1:{port}/inference/v1/generate"
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.texts = None
        if kept:
            from turnwise.engines.prompt_text import PromptTexts

            self.texts = PromptTexts()

    async def generate(self, prompt: Any, sampling: Any, *, session: str, seed: int) -> Any:
        import numpy as np

        from turnwise.engines.base import Completion
        from turnwise.types import StopReason

        params = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "seed": seed, "logprobs": 0, "stop": []}
        rest = {"request_id": session, "sampling_params": params, "cache_salt": "0.0"}
        if self.texts is None:
            asked: dict[str, Any] = {"json": {**rest, "token_ids": prompt.tolist()}}
        else:
            body = self.texts.body(session, rest, "token_ids", prompt)
            asked = {"data": body, "headers": {"Content-Type": "application/json"}}
        async with self.session.post(self.url, **asked) as response:
            [choice] = (await response.json())["choices"]
        logprobs = np.asarray([one["logprob"] for one in choice["logprobs"]["content"]], np.float32)
        action = np.asarray(choice["token_ids"], np.int32)
        versions = np.zeros(len(action), np.int32)
        for array in (action, logprobs, versions):
            array.flags.writeable = False
        return Completion(action, logprobs, versions, StopReason.end_token)


WAYS = {"loop": "the loop alone", "whole": "with JSON of whole prompts", "new": "with JSON of new tokens"}


def measure_cost(ways: Sequence[str], groups: int, turns: int, repeats: int) -> dict[str, float]:
    from turn_cost import long_turns

    from turnwise.rollout.concurrently import all_of
    from turnwise.types import Task

    environment, renderer, playback = long_turns(turns)
    command = [sys.executable, __file__, "--serve", str(turns)]
    found: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())

            async def made(how: str, repeat: int) -> float:
                engine: Any = playback if how == "loop" else JsonEngine(port, kept=how == "new")
                maker = maker_of({"e": environment}, engine, renderer, turns)
                tasks = [Task(f"{repeat}-{number}", "e") for number in range(groups)]
                gc.collect()
                began = time.process_time()
                result = await all_of(maker.group(task, 0) for task in tasks)
                spent = time.process_time() - began
                assert sum(len(one.turns) for group in result for one in group.trajectories) == groups * 8 * turns
                if how != "loop":
                    await engine.session.close()
                return spent / (groups * ATTEMPTS * turns) * 1000

            for how in ways:
                found[how] = statistics.median(asyncio.run(made(how, repeat)) for repeat in range(repeats))
                print(f"cost    {WAYS[how]:30} {found[how]:.3f} CPU ms per turn", flush=True)
        finally:
            server.terminate()
    if "new" not in ways:
        return found
    if "whole" in ways:
        print(f"cost    JSON of whole prompts / of new tokens: {found['whole'] / found['new']:.2f}")
    maker = maker_of({"e": environment}, playback, renderer, turns)
    group = asyncio.run(maker.group(Task("0", "e"), 0))
    found["sent"], data = spent_by(partial(pickle.dumps, group, pickle.HIGHEST_PROTOCOL), ATTEMPTS * turns)
    found["read"], _ = spent_by(partial(pickle.loads, data), ATTEMPTS * turns)
    print(f"cost    {'a group, sent':30} {found['sent']:.4f} CPU ms per turn")
    print(f"cost    {'a group, read by the run':30} {found['read']:.4f} CPU ms per turn", flush=True)
    return found


def spent_by(function: Callable[[], Any], turns: int, repeats: int = 15) -> tuple[float, Any]:
    """(CPU milliseconds per turn, the result): the median of some calls."""
    spent = []
    for _ in range(repeats):
        began = time.process_time()
        result = function()
        spent.append((time.process_time() - began) / turns * 1000)
    return statistics.median(spent), result


# ---------------------------------------------------------------- tokens


def checksum_of(run: Path) -> tuple[str, int]:
    """(checksum of all tokens and logprobs that a run sampled, how many turns these are)."""
    from turnwise.runs.archive import read_step

    digest, turns = hashlib.sha256(), 0
    for folder in ("archive", "evaluations"):
        for path in sorted((run / folder).glob("*.parquet")):
            for record in read_step(path):
                for made in (*record.group.trajectories, *record.group.failed):
                    for turn in made.turns:
                        digest.update(turn.prompt.tobytes() + turn.action.tobytes() + turn.logprobs.tobytes())
                        turns += 1
    return digest.hexdigest()[:16], turns


def measure_tokens(workers: Sequence[int]) -> dict[str, str]:
    from turnwise.assemble import run
    from turnwise.cli.terminal import PlainScreen
    from turnwise.recipe.parse import load_recipe
    from turnwise.schedule.run_loop import RunLoop
    from turnwise.testing.micro import MICRO

    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TURNWISE_CACHE"] = f"{folder}/cache"
        recipe = Path(folder) / "micro.toml"
        recipe.write_text(MICRO)
        for count in workers:
            out = Path(folder) / str(count)
            parsed = load_recipe(recipe, [f"out={out}", f"cluster.rollout_workers={count}", "max_lag=0"])
            with asyncio.Runner(loop_factory=RunLoop) as runner:
                runner.run(run.start(parsed, Quiet(PlainScreen()), asyncio.Event()))
            found[str(count)], turns = checksum_of(out)
            print(f"tokens  {count} workers: {turns} turns, checksum {found[str(count)]}", flush=True)
    print(f"tokens  the same with all: {'yes' if len(set(found.values())) == 1 else 'NO'}")
    return found


class Quiet:
    """A screen that shows nothing."""

    def __init__(self, screen: Any) -> None:
        self.screen = screen

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a third of the turns, one repeat, and no run with 4 workers"
    )
    parser.add_argument("--only", choices=["speed", "cost", "tokens"], help="only this part")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of cost")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve)
        return
    groups, turns, repeats = (4, 50, 1) if chosen.quick else (12, 50, 3)
    found: dict[str, Any] = {}
    if chosen.only in (None, "tokens"):
        found["tokens"] = measure_tokens((0, 1, 2) if chosen.quick else (0, 1, 2, 4))
    if chosen.only in (None, "cost"):
        found["cost"] = measure_cost(chosen.ways, groups, turns, repeats)
    if chosen.only in (None, "speed"):
        found["speed"] = measure_speed(groups, turns, repeats)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
