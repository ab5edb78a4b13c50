"""The viewer on a run of 100,000 attempts: how long a page, a filter, an attempt take, and what the server holds.

Makes a run folder of 391 steps with 256 attempts each, and one attempt of 64 turns and 32,000 tokens. Starts
`turnwise view` as a process, asks what the page asks, and reads the process's CPU seconds and memory from /proc. With
playwright and chromium it also measures in the browser, from the click to the rows that are drawn. The machine's load
is printed: times are those of the machine, CPU seconds those of the work. Ends with 1 where a limit is passed.

    python benchmarks/viewer.py [--quick] [--run FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from turnwise.messages import Message
from turnwise.runs.archive import Record, write_step
from turnwise.runs.folder import RunFolder
from turnwise.tokens import Tokens
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn, TurnTiming

GROUPS, ATTEMPTS, STEPS, QUICK_STEPS = 32, 8, 391, 40
POOL = 96
"""Groups that are made; every step has some of them, with tasks of its own."""
VOCABULARY = 4000
LIMIT_SECONDS, LIMIT_BYTES = 1.0, 500e6
AGAIN = 7
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figure:
    """One line of the result."""

    what: str
    first: float
    """Seconds of the first time."""
    median: float
    cpu: float
    """Median CPU seconds of the server; NaN where that was not read."""


# ---------------------------------------------------------------- the run


def make_run(path: Path, steps: int) -> None:
    random = np.random.default_rng(0)
    folder = RunFolder.create(path, {"steps": steps, "model": {"path": "made"}, "optimizer": {"learning_rate": 1e-5}})
    write_tokenizer(folder)
    pool = [make_group(random) for _ in range(POOL)]
    with folder.metrics.open("w") as file:
        for step in range(1, steps + 1):
            chosen = random.permutation(POOL)[:GROUPS]
            records = [
                record(f"task-{step:04d}-{place:02d}", pool[group], random) for place, group in enumerate(chosen)
            ]
            write_step(folder.archive, step, records)
            names = ("success", "reward/mean", "loss", "entropy", "gradient_norm", *(f"made/{n}" for n in range(100)))
            line = {"step": step, "seconds/step": 30.0} | dict(
                zip(names, random.random(len(names)).tolist(), strict=True)
            )
            file.write(json.dumps(line) + "\n")
    write_step(
        folder.archive,
        steps + 1,
        [record("the-long-one", [make_attempt(random, np.zeros(0, np.int32), 64, 380, 120)], random)],
    )


def write_tokenizer(folder: RunFolder) -> None:
    from tokenizers import Tokenizer, decoders, models

    words = {f" w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()
    place = folder.checkpoints / "step-000001"
    place.mkdir(parents=True)
    tokenizer.save(str(place / "tokenizer.json"))


def make_group(random: np.random.Generator) -> list[Trajectory]:
    """Attempts that share the first prompt."""
    first = random.integers(0, VOCABULARY, 200, np.int32)
    return [make_attempt(random, first) for _ in range(ATTEMPTS)]


def make_attempt(
    random: np.random.Generator, first: Tokens, turns: int = 0, given: int = 60, sampled: int = 30
) -> Trajectory:
    """An attempt whose history only grows."""
    made, history = [], first
    for _ in range(turns or int(random.integers(1, 9))):
        prompt = np.concatenate([history, random.integers(0, VOCABULARY, given, np.int32)])
        action = random.integers(0, VOCABULARY, sampled, np.int32)
        logprobs = -random.exponential(0.5, sampled).astype(np.float32)
        said, heard = Message("assistant", "I look it up. " * 8), (Message("tool", "What was found. " * 20),)
        timing = TurnTiming(*random.exponential(0.3, 4).tolist())
        versions = np.ones(sampled, np.int32)
        made.append(Turn(prompt, action, logprobs, versions, StopReason.end_token, 0.0, said, heard, timing))
        history = np.concatenate([prompt, action])
    status = random.choice([Status.finished] * 8 + [Status.too_many_turns, Status.too_long])
    return Trajectory(tuple(made), Status(str(status)), float(random.random() < 0.4), {"lookups": float(len(made))})


def record(task: str, attempts: list[Trajectory], random: np.random.Generator) -> Record:
    group = Group(Task(task, str(random.choice(["search", "sql", "math"])), {"question": "?" * 80}), tuple(attempts))
    turns = [turn for attempt in attempts for turn in attempt.turns]
    credit = tuple(random.normal(size=len(turn.action)).astype(np.float32) for turn in turns)
    return Record(group, True, credit, tuple(np.full(len(turn.action), 1e-4, np.float32) for turn in turns))


# ---------------------------------------------------------------- the server


class Process:
    """`turnwise view` as a process."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "turnwise.cli", "view", str(run), "--port", "0"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.start_seconds = time.perf_counter() - self.began
        self.name, _, self.url = line.strip().partition(": ")

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path.lstrip("/"), timeout=300) as answer:
            content: bytes = answer.read()
            return content

    @property
    def cpu(self) -> float:
        """Seconds that it has computed."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def most_bytes(self) -> int:
        """The largest resident memory so far."""
        [line] = [x for x in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def wait_for_index(self) -> float:
        """Seconds from the start until every file was read."""
        while json.loads(self.get("/api/runs"))["runs"][0]["waiting_files"]:
            time.sleep(0.2)
        return time.perf_counter() - self.began


@contextmanager
def served(run: Path) -> Iterator[Process]:
    process = Process(run)
    try:
        yield process
    finally:
        process.process.terminate()
        process.process.wait(timeout=60)


def measure(server: Process, what: str, *paths: str) -> Figure:
    """The time of requests, one after the other."""
    seconds, cpu = [], []
    for _ in range(AGAIN):
        began, before = time.perf_counter(), server.cpu
        for path in paths:
            server.get(path)
        seconds.append(time.perf_counter() - began)
        cpu.append(server.cpu - before)
    return Figure(what, seconds[0], statistics.median(seconds), statistics.median(cpu))


def over_http(server: Process, long_step: int) -> list[Figure]:
    name = server.name
    table = f"/api/{name}/attempts?offset=0&limit=50"
    first = measure(server, "first page, while the index is read", "/", "/main.js", "/api/runs", table)
    whole = server.wait_for_index()
    print(f"the server answers after {server.start_seconds:.2f} s and has read every file after {whole:.1f} s")
    long = f"train/{long_step}/0/0"
    return [
        first,
        measure(
            server, "curves", "/api/metrics", "/api/curves?names=success%0Aloss%0Aentropy%0Areward/mean%0Agradient_norm"
        ),
        measure(server, "page of attempts", table),
        measure(server, "filter", f"{table}&status=too_long&min_reward=1&dataset=sql&first_step=10"),
        measure(server, "filter by task", f"{table}&task=0-17"),
        measure(server, "sort", f"{table}&order=action_tokens&kind=train"),
        measure(server, "groups", f"/api/{name}/groups?order=reward&offset=0&limit=50"),
        measure(server, "attempt", f"/api/{name}/attempt/train/7/3/2"),
        measure(server, "attempt of 64 turns", f"/api/{name}/attempt/{long}"),
        measure(server, "its first 4,096 tokens", f"/api/{name}/tokens/{long}?turn=0&from=0"),
        measure(server, "tree of its group", f"/api/{name}/tree/train/{long_step}/0"),
    ]


def in_browser(server: Process, long_step: int) -> list[Figure]:
    """From the address to what is drawn; nothing where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        chromium = None
    if not chromium:
        print("no playwright or chromium: nothing is measured in a browser")
        return []
    name, long = server.name, f"train/{long_step}/0/0"
    start = f"#/attempts/{name}"
    views = {
        "attempts, from nothing": ("", start, "tbody tr"),
        "filter": (start, f"{start}?status=too_long", "tbody tr:not(:has(.status:not(.short)))"),
        "attempt of 64 turns": (start, f"#/attempt/{name}/{long}", "#turn-63"),
        "its tokens": (f"#/attempt/{name}/{long}", f"#/attempt/{name}/{long}?view=tokens", ".token"),
    }
    figures = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for what, (before, after, there) in views.items():
            seconds = []
            for _ in range(AGAIN):
                page = browser.new_page()
                page.goto(server.url + before if before else "about:blank")
                if before:
                    page.wait_for_selector("tbody tr, #turn-63")
                began = time.perf_counter()
                page.goto(server.url + after)
                page.wait_for_selector(there)
                seconds.append(time.perf_counter() - began)
                page.close()
            figures.append(Figure(f"browser: {what}", seconds[0], statistics.median(seconds), float("nan")))
        browser.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps instead of {STEPS}")
    parser.add_argument("--run", type=Path, help="keep the run here, or take it from here")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    steps = QUICK_STEPS if chosen.quick else STEPS
    with tempfile.TemporaryDirectory() as scratch:
        run = chosen.run or Path(scratch) / "large"
        if not (run / "config.json").is_file():
            began = time.perf_counter()
            make_run(run, steps)
            print(f"made {steps * GROUPS * ATTEMPTS:,} attempts in {time.perf_counter() - began:.0f} s")
        long_step = max(int(path.stem.partition("-")[2]) for path in (run / "archive").glob("step-*.parquet"))
        with served(run) as server:
            figures = over_http(server, long_step) + in_browser(server, long_step)
            memory = server.most_bytes
    return report(figures, memory, chosen.json)


def report(figures: list[Figure], memory: int, path: Path | None) -> int:
    """Print the table; 1 where a limit is passed."""
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"{'':38} {'first':>8} {'median':>8} {'server CPU':>11}")
    for one in figures:
        cpu = f" {one.cpu:9.3f} s" if one.cpu == one.cpu else ""
        print(f"{one.what:38} {one.first:6.3f} s {one.median:6.3f} s{cpu}")
    print(f"\nlargest memory of the server: {memory / 1e6:.0f} MB")
    if path:
        path.write_text(json.dumps({"figures": [asdict(one) for one in figures], "bytes": memory}, indent=1))
    slow = [one.what for one in figures if one.median > LIMIT_SECONDS]
    if figures[0].first > LIMIT_SECONDS:
        slow.append(f"{figures[0].what}, the first time")
    if slow or memory > LIMIT_BYTES:
        print(f"over the limits of {LIMIT_SECONDS:g} s and {LIMIT_BYTES / 1e6:.0f} MB: {', '.join(slow) or 'memory'}")
        return 1
    print(f"all within {LIMIT_SECONDS:g} s and {LIMIT_BYTES / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
