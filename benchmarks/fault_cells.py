"""The cells of benchmarks/faults.py: what is broken, when, and what has to come of it.

A cell breaks something and returns what was seen: how it was noticed, and how the run ended or went on. It raises
where what has to happen did not. The run is finished afterwards, and then audited, by benchmarks/faults.py.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trial import Trial, children, command_of, cut_short, ended, flip_bit, kill, wait_for


@dataclass(frozen=True)
class Seen:
    """What came of a fault."""

    noticed: str
    outcome: str


@dataclass(frozen=True)
class Cell:
    """A fault at a moment.

    Example:
        Cell("kill -9", "a step", partial(killed, after=lines(3)))
    """

    what: str
    when: str
    play: Callable[[Trial], Seen]
    settings: tuple[str, ...] = ()
    same: bool = True
    """Whether the metrics have to be those of a run that nothing happened to, bit for bit."""
    theirs: bool = False
    """Whether a traceback of the environment's own code belongs on the screen."""
    steps: int = 6


class Unavailable(Exception):
    """This machine cannot do what a cell needs."""


# ---------------------------------------------------------------- moments


def begun(trial: Trial) -> bool:
    return (trial.out / "config.json").exists()


def warmed(trial: Trial) -> bool:
    return any(trial.cache.glob("warm-*/config.json"))


def lines(count: int) -> Callable[[Trial], bool]:
    return lambda trial: len(trial.metrics) >= count


def checkpointing(trial: Trial) -> bool:
    return len(trial.metrics) >= 3 and any((trial.out / "checkpoints").glob(".*.partial"))


def ranks_starting(process: subprocess.Popen[bytes]) -> bool:
    return any(command_of(child).startswith("rank") for child in children(process.pid))


# ---------------------------------------------------------------- processes that end


def killed(trial: Trial, after: Callable[[Trial], bool], times: int = 1) -> Seen:
    for place in range(times):
        process = trial.go_on() if begun(trial) else trial.start()
        moment = lines(3 + place) if place else after
        wait_for(partial(moment, trial), process)
        kill(process.pid)
        process.wait()
    return Seen("at the next start", "resumed")


def signalled(trial: Trial, after: Callable[[Trial], bool], number: int, times: int = 1) -> Seen:
    process = trial.start()
    wait_for(lambda: after(trial), process)
    for _ in range(times):
        process.send_signal(number)
    seconds, code = ended(process)
    assert code == 130, f"exit code {code}"
    return Seen(f"{seconds:.1f} s", "exit 130, resumed")


def interrupted_while_ranks_start(trial: Trial) -> Seen:
    process = trial.start()
    wait_for(lambda: ranks_starting(process), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    seconds, code = ended(process)
    assert code == 130, f"exit code {code}"
    return Seen(f"{seconds:.1f} s", "exit 130, resumed")


def child_killed(trial: Trial, name: str, goes_on: bool) -> Seen:
    process = trial.start()
    wait_for(partial(lines(3), trial), process)
    found = [child for child in children(process.pid) if re.search(name, command_of(child))]
    assert found, f"no process {name}"
    kill(found[-1])
    seconds, code = ended(process)
    if goes_on:
        assert code == 0, f"exit code {code}"
        return Seen("within the step", "went on, exit 0")
    assert code not in (0, -9), f"exit code {code}"
    return Seen(f"{seconds:.1f} s", f"exit {code}, resumed")


def retrieval_killed(trial: Trial) -> Seen:
    code, said = trial.call("data", "factbook")
    if code:
        raise Unavailable(said.strip().splitlines()[-1])
    process = trial.start()
    wait_for(partial(lines(3), trial), process)
    servers = [child for child in children(process.pid) if "retrieval.server" in command_of(child)]
    assert servers, "no retrieval server"
    kill(servers[-1])
    code = process.wait(600)
    assert code == 0, f"exit code {code}"
    return Seen("at the next search", "started again; went on, exit 0")


# ---------------------------------------------------------------- disks and files


@contextmanager
def small_disk(folder: Path, size: str = "16m") -> Iterator[Path]:
    """A file system of its own, which is full soon."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True).returncode:
        raise Unavailable("needs the right to mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def disk_full(trial: Trial, after: Callable[[Trial], bool], how: str = "full") -> Seen:
    with small_disk(trial.folder) as disk:
        trial.out = disk / "run"
        if how == "full at the start":
            fill(disk / "ballast")
            process = trial.start()
        else:
            process = trial.start()
            wait_for(lambda: after(trial), process)
            fill(disk / "ballast")
        seconds, code = ended(process)
        assert code not in (0, 130), f"exit code {code}"
        (disk / "ballast").unlink(missing_ok=True)
        again = trial.finish() if begun(trial) else trial.start().wait(600)
        assert again == 0, f"after that exit code {again}"
        shutil.copytree(trial.out, trial.folder / "run")
        trial.out = trial.folder / "run"
    return Seen(f"{seconds:.1f} s", f"exit {code}, resumed")


def files_limited(trial: Trial) -> Seen:
    """No file may grow over a few bytes any more, as under a quota."""
    process = trial.start()
    wait_for(partial(lines(3), trial), process)
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, limits[1]))
    seconds, code = ended(process)
    assert code == 3, f"exit code {code}"
    return Seen(f"{seconds:.1f} s", f"exit {code}, resumed")


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            return


def stopped_after(trial: Trial, count: int = 4) -> None:
    """A run that was killed after some steps."""
    process = trial.start()
    wait_for(lambda: len(trial.metrics) >= count, process)
    kill(process.pid)
    process.wait()


def newest(trial: Trial) -> Path:
    return sorted((trial.out / "checkpoints").glob("step-*"))[-1]


def spoilt(trial: Trial, pattern: str, spoil: Callable[[Path], None], says: str = "damaged") -> Seen:
    """A file of the newest checkpoint, or of the run, is spoilt; a resume says so and uses what is whole."""
    stopped_after(trial)
    places = [*newest(trial).glob(pattern), *trial.out.glob(pattern)]
    assert places, pattern
    spoil(places[0])
    before = len(trial.said)
    code = trial.finish()
    said = trial.said[before:]
    assert says in said, said[-500:]
    assert code == 0, f"exit code {code}"
    return Seen("at the next start", "named; from the checkpoint before")


def refused(trial: Trial, pattern: str, spoil: Callable[[Path], None]) -> Seen:
    """A file that nothing can replace: one line, nothing changed; it goes on once the file is back."""
    stopped_after(trial)
    [path] = trial.out.glob(pattern)
    whole = path.read_bytes()
    spoil(path)
    before = len(trial.said)
    code = trial.finish()
    said = trial.said[before:].strip().splitlines()
    assert code == 2, f"exit code {code}"
    assert len(said) == 1, said
    path.write_bytes(whole)
    return Seen("at the next start", "exit 2 in one line; put back, resumed")


def torn(trial: Trial) -> Seen:
    stopped_after(trial)
    with open(trial.out / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 9, "reward/me')
    return Seen("at the next start", "torn line cut away, resumed")


def pointer(trial: Trial, text: str | None) -> Seen:
    stopped_after(trial)
    path = trial.out / "checkpoints" / "latest"
    path.unlink()
    if text is not None:
        path.write_text(text)
    before = len(trial.said)
    assert trial.finish() == 0
    assert "latest" in trial.said[before:]
    return Seen("at the next start", "named; newest whole checkpoint")


def cache_spoilt(trial: Trial) -> Seen:
    stopped_after(trial)
    [weights] = trial.cache.glob("warm-*/model.safetensors")
    flip_bit(weights)
    shutil.rmtree(trial.out)
    before = len(trial.said)
    assert trial.start().wait(600) == 0
    assert "damaged" in trial.said[before:]
    return Seen("at the next start", "made again")


def archive_changed(trial: Trial) -> Seen:
    assert trial.start().wait(600) == 0
    path = trial.out / "archive" / "step-000003.parquet"
    whole = path.read_bytes()
    flip_bit(path)
    code, said = trial.call("verify", str(trial.out), "--step", "3")
    path.write_bytes(whole)
    assert code == 1, f"exit code {code}: {said[-300:]}"
    assert "step-000003" in said
    return Seen("by verify", "exit 1, named")


# ---------------------------------------------------------------- two processes


def two_owners(trial: Trial, second: str) -> Seen:
    process = trial.start()
    wait_for(lambda: len(trial.metrics) >= 3, process)
    how = {"resume": ("--resume", str(trial.out)), "start": (str(trial.folder / "recipe.toml"), f"out={trial.out}")}
    code, said = trial.call("train", *how[second])
    assert code == 2, f"exit code {code}"
    if second == "resume":
        assert str(process.pid) in said, said
    assert process.wait(600) == 0
    return Seen("at once", "second refused in one line, first went on")


# ---------------------------------------------------------------- environments and requests


def plays_on(trial: Trial, noticed: str, counted: str) -> Seen:
    """The run goes on; what happened is in the metrics."""
    code = trial.start().wait(600)
    assert code == 0, f"exit code {code}"
    count = sum(line.get(counted, 0.0) for line in trial.metrics)
    assert count > 0, counted
    return Seen(noticed, f"went on; {count:.0f} attempts {counted.partition('/')[2]}")


def interrupted_while_blocked(trial: Trial) -> Seen:
    """Two Ctrl-C end a run whose event loop an environment holds up."""
    process = trial.start("rollout.limits.blocked_seconds=600")
    wait_for(partial(begun, trial), process)
    time.sleep(20.0)  # by now a step has blocked, in the warm start or after it
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    seconds, code = ended(process)
    assert code not in (0, -9), f"exit code {code}"
    shutil.rmtree(trial.out)
    trial.settings = ()
    return Seen(f"{seconds:.1f} s", f"exit {code}; begun anew without the fault")


def forged(trial: Trial) -> Seen:
    """Control tokens in an observation: prompts have as many as the template put there."""
    assert trial.start().wait(600) == 0
    from transformers import AutoTokenizer

    from turnwise.runs.archive import read_step

    tokenizer = AutoTokenizer.from_pretrained(newest(trial))
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    attempts = [
        trajectory.turns
        for path in sorted((trial.out / "archive").glob("step-*.parquet"))
        for record in read_step(path)
        for trajectory in record.group.trajectories
    ]
    heard = [message.content for turns in attempts for turn in turns for message in turn.heard]
    assert any("<|im_start|>assistant" in content for content in heard)
    for turns in attempts:
        sampled = 0  # an untrained policy says such tokens itself
        for place, turn in enumerate(turns):
            assert (turn.prompt == start).sum() - sampled == 2 * place + 3, "a message became a control token"
            sampled += (turn.action == start).sum()
    return Seen("when it is encoded", "stays text")


def poisoned(trial: Trial) -> Seen:
    assert trial.start().wait(600) == 0
    process = trial.spawn("serve", str(trial.out), "--port", "0", "--key", "k")
    try:
        wait_for(lambda: "base_url" in trial.said, process)
        url = re.findall(r"base_url\s+(\S+)", trial.said)[-1]
        good = {"model": "policy", "messages": [{"role": "user", "content": "start amber, links 1"}], "temperature": 0}
        before = ask(url, good)
        assert before[0] == 200
        codes = [ask(url, {**good, **poison})[0] for poison in POISON]
        assert all(400 <= code < 500 for code in codes), codes
        assert ask(url, good)[1] == before[1]
    finally:
        process.terminate()
        process.wait(60)
    return Seen("at the border", f"{len(codes)} times 4xx; others unharmed")


POISON: tuple[dict[str, object], ...] = (
    {"temperature": -1.0},
    {"temperature": 1e-40},
    {"temperature": "warm"},
    {"top_p": -0.5},
    {"top_p": 7},
    {"max_tokens": -1},
    {"max_tokens": 2**63},
    {"seed": 10**30},
    {"stop": ["\ud800"]},
    {"stop": [""]},
    {"messages": [{"role": "user", "content": {"a": 10**400}}]},
    {"messages": "hello"},
)


def ask(url: str, body: dict[str, object]) -> tuple[int, object]:
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body).encode("utf-8", "surrogatepass"),
        {"Content-Type": "application/json", "Authorization": "Bearer k"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, None


# ---------------------------------------------------------------- the matrix

FAULTY = "env.0.settings.fault="
LAGGED = ("max_lag=2", "env.0.settings.pace=0.05")
SHORT = ("rollout.limits.call_seconds=3", "rollout.failures.retries=0")

CELLS = (
    Cell("kill -9", "warm start", partial(killed, after=begun)),
    Cell("kill -9", "first evaluation", partial(killed, after=warmed)),
    Cell("kill -9", "a step", partial(killed, after=lines(3))),
    Cell("kill -9", "a checkpoint is written", partial(killed, after=checkpointing)),
    Cell("kill -9", "three times in a row", partial(killed, after=lines(2), times=3)),
    Cell("kill -9", "a step at lag 2", partial(killed, after=lines(3)), LAGGED, same=False),
    Cell("SIGTERM", "warm start", partial(signalled, after=begun, number=signal.SIGTERM)),
    Cell("SIGTERM", "a step", partial(signalled, after=lines(3), number=signal.SIGTERM)),
    Cell("SIGTERM", "a step at lag 2", partial(signalled, after=lines(3), number=signal.SIGTERM), LAGGED, same=False),
    Cell("SIGINT twice", "first evaluation", partial(signalled, after=warmed, number=signal.SIGINT, times=2)),
    Cell("SIGINT twice", "a step", partial(signalled, after=lines(3), number=signal.SIGINT, times=2)),
    Cell("SIGINT", "learner ranks start", interrupted_while_ranks_start, ("cluster.fsdp=2",), same=False),
    Cell("full disk", "before the start", partial(disk_full, after=begun, how="full at the start")),
    Cell("full disk", "a step", partial(disk_full, after=lines(3))),
    Cell("full disk", "a checkpoint is written", partial(disk_full, after=checkpointing)),
    Cell("files may not grow", "a step", files_limited),
    Cell("flipped bit", "weights of a checkpoint", partial(spoilt, pattern="model.safetensors", spoil=flip_bit)),
    Cell("flipped bit", "optimizer of a checkpoint", partial(spoilt, pattern="optimizer/*", spoil=flip_bit)),
    Cell("flipped bit", "state of a checkpoint", partial(spoilt, pattern="state.json", spoil=flip_bit)),
    Cell("flipped bit", "cached warm start", cache_spoilt),
    Cell("flipped bit", "archive", archive_changed),
    Cell("truncated file", "weights of a checkpoint", partial(spoilt, pattern="model.safetensors", spoil=cut_short)),
    Cell("truncated file", "optimizer of a checkpoint", partial(spoilt, pattern="optimizer/*", spoil=cut_short)),
    Cell("truncated file", "tokenizer of a checkpoint", partial(spoilt, pattern="tokenizer.json", spoil=cut_short)),
    Cell("truncated file", "config.json of the run", partial(refused, pattern="config.json", spoil=cut_short)),
    Cell("torn line", "metrics.jsonl", torn),
    Cell("missing pointer", "resume", partial(pointer, text=None)),
    Cell("wrong pointer", "resume", partial(pointer, text="step-999999\n")),
    Cell("pointer is garbage", "resume", partial(pointer, text="\x00../../etc\n")),
    Cell(  # with pauses it lasts long enough, and batches of calls are others
        "two owners",
        "a second resume",
        partial(two_owners, second="resume"),
        ("env.0.settings.pace=1.0",),
        same=False,
    ),
    Cell("two owners", "a second start", partial(two_owners, second="start")),
    Cell(
        "environment raises",
        "5 % of steps",
        partial(plays_on, noticed="at once", counted="status/failed"),
        (FAULTY + "raises", *SHORT),
        same=False,
        theirs=True,
    ),
    Cell(
        "environment hangs",
        "5 % of steps",
        partial(plays_on, noticed="at its deadline", counted="status/timed_out"),
        (FAULTY + "hangs", *SHORT),
        same=False,
    ),
    Cell(
        "environment swallows cancellation",
        "5 % of steps",
        partial(plays_on, noticed="at its deadline", counted="status/timed_out"),
        (FAULTY + "swallows", *SHORT),
        same=False,
    ),
    Cell(
        "environment lies (NaN, no reply)",
        "5 % of steps",
        partial(plays_on, noticed="at once", counted="status/failed"),
        (FAULTY + "lies", *SHORT),
        same=False,
        theirs=True,
    ),
    Cell(
        "environment pays 1e308",
        "5 % of steps",
        partial(plays_on, noticed="at once", counted="status/failed"),
        (FAULTY + "overpays", *SHORT),
        same=False,
        theirs=True,
    ),
    Cell(
        "environment says 10 MB",
        "5 % of steps",
        partial(plays_on, noticed="before it is tokenised", counted="status/observation_too_large"),
        (FAULTY + "floods", *SHORT),
        same=False,
    ),
    Cell(
        "environment blocks the loop",
        "5 % of steps",
        partial(plays_on, noticed="after blocked_seconds", counted="status/timed_out"),
        (FAULTY + "blocks", "rollout.limits.blocked_seconds=1", *SHORT),
        same=False,
    ),
    Cell(
        "environment blocks the loop",
        "SIGINT twice",
        interrupted_while_blocked,
        (FAULTY + "blocks",),
        same=False,
    ),
    Cell("environment forges a turn", "5 % of steps", forged, (FAULTY + "forges",), same=False),
    Cell("poison requests", "served model", poisoned),
    Cell(
        "engine process killed",
        "a step",
        partial(child_killed, name="^engine process", goes_on=True),
        ("engine.processes=2", *LAGGED),
        same=False,
    ),
    Cell("retrieval server killed", "a step", retrieval_killed, ("env.0.name=faulty:Looking",), same=False),
    Cell(
        "engine actor of Ray killed",
        "a step",
        partial(child_killed, name=r"ray::.*Replica", goes_on=True),
        ("cluster.placement=colocated", "cluster.replicas=2", "cluster.cpus=0.5", *LAGGED),
        same=False,
    ),
    Cell(
        "learner rank killed",
        "a step",
        partial(child_killed, name="^rank", goes_on=False),
        ("cluster.fsdp=2",),
        same=False,
    ),
)
