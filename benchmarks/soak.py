"""A long run at lag 2 whose environments fail and whose engine processes are killed: does anything grow?

    python benchmarks/soak.py [--minutes 60] [--kill-every 5] [--svg FILE] [--json FILE] [--quick]

5 % of all steps of environments raise, and an engine process is killed by kill -9 every few minutes. Memory,
descriptors and threads of the run's own process, its children, and all of /dev/shm are read every few seconds. Prints
the slope of each after a quarter of the time, by least squares, and the names of the threads that came and went.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from fault_cells import FAULTY
from faulty import THREAD_NAMES
from trial import Trial, children, command_of, kill, wait_for

SETTINGS = (
    "steps=1000000",
    "max_lag=2",
    "engine.processes=2",
    "env.0.settings.pace=0.05",
    "env.0.tasks.count=4096",
    FAULTY + "raises",
    "rollout.failures.retries=1",
    "evaluation.every=200",
    "checkpoints.every=100",
    "archive.steps=50",
)


def look(pid: int) -> dict[str, float]:
    """What a process holds at this moment."""
    status = Path(f"/proc/{pid}/status").read_text()
    field = lambda name: float(next(line for line in status.splitlines() if line.startswith(name)).split()[1])
    return {
        "memory": field("VmRSS:") / 1024,
        "threads": field("Threads:"),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "shared": shared_megabytes(),
        "children": float(len(children(pid))),
    }


def thread_names(pid: int, answer: Path) -> list[str]:
    """The names of a run's Python threads, as its environment writes them on SIGUSR1, sorted."""
    answer.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    with suppress(RuntimeError):  # its main thread may be busy, or the run be over
        wait_for(answer.exists, patience=5.0)
        return sorted(answer.read_text().split("\n"))
    return []


def shared_megabytes(folder: Path = Path("/dev/shm")) -> float:
    """What all files in shared memory add up to; one may go while it is looked at."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(place, name)).st_size
    return size / 2**20


def slope(minutes: list[float], values: list[float]) -> float:
    """Units per minute, by least squares."""
    return float(np.polyfit(minutes, values, 1)[0])


def draw(path: Path, seen: list[dict[str, float]], kills: list[float]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(8, 5))
    minutes = [one["minute"] for one in seen]
    axes[0].plot(minutes, [one["memory"] for one in seen])
    axes[0].set_ylabel("memory, MB")
    axes[0].set_ylim(bottom=0)
    for name in ("threads", "descriptors", "shared", "children"):
        axes[1].plot(minutes, [one[name] for one in seen], label=name)
    axes[1].set_ylim(bottom=0)
    axes[1].legend(loc="lower right", fontsize="small")
    axes[1].set_xlabel("minutes")
    for axis in axes:
        for moment in kills:
            axis.axvline(moment, color="0.85", zorder=0)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="MINUTES")
    parser.add_argument("--quick", action="store_true", help="two minutes, a kill every half minute")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    minutes, every = (2.0, 0.5) if chosen.quick else (chosen.minutes, chosen.kill_every)
    trial = Trial(Path(tempfile.mkdtemp(prefix="turnwise-soak-")) / "soak", *SETTINGS)
    os.environ[THREAD_NAMES] = str(trial.folder / "threads")
    process = trial.start()
    wait_for(lambda: len(trial.metrics) >= 2, process)
    began = time.monotonic()
    seen: list[dict[str, float]] = []
    kills: list[float] = []
    threads: list[tuple[float, list[str]]] = []
    while (minute := (time.monotonic() - began) / 60) < minutes:
        if process.poll() is not None:
            print(f"the run ended after {minute:.1f} minutes with {process.returncode}:\n{trial.said[-2000:]}")
            return 1
        if minute >= every * (len(kills) + 1):
            engines = [child for child in children(process.pid) if command_of(child).startswith("engine process")]
            kill(engines[len(kills) % len(engines)])
            kills.append(minute)
        seen.append({"minute": minute, **look(process.pid)})
        if (names := thread_names(process.pid, trial.folder / "threads")) != (threads[-1][1] if threads else []):
            threads.append((minute, names))
        time.sleep(min(5.0, minutes))
    process.send_signal(signal.SIGTERM)
    code = process.wait(600)
    lines = trial.metrics
    failed = sum(line.get("status/failed", 0.0) for line in lines)
    counted = sum(line.get("trajectory/count", 0.0) for line in lines)
    late = [one for one in seen if one["minute"] >= minutes / 4]
    slopes = {name: slope([one["minute"] for one in late], [one[name] for one in late]) for name in look_names(seen)}
    print(f"{minute:.0f} minutes, {len(lines) - 1} steps, {counted:.0f} attempts and {failed:.0f} failed ones")
    print(f"{len(kills)} engine processes killed; the run was stopped by SIGTERM and ended with {code}")
    print("| | first | after a quarter | last | slope after a quarter, per minute |\n|---|---|---|---|---|")
    for name, unit in (("memory", " MB"), ("descriptors", ""), ("threads", ""), ("shared", " MB"), ("children", "")):
        values = (seen[0][name], late[0][name], seen[-1][name])
        print(f"| {name} | {' | '.join(f'{value:.0f}{unit}' for value in values)} | {slopes[name]:+.3f}{unit} |")
    for minute, names in threads:
        print(f"threads from minute {minute:.1f} on: {', '.join(names)}")
    if chosen.svg:
        draw(chosen.svg, seen, kills)
    if chosen.json:
        chosen.json.write_text(json.dumps({"seen": seen, "kills": kills, "slopes": slopes, "threads": threads}))
    return 0 if code == 130 else 1


def look_names(seen: list[dict[str, float]]) -> list[str]:
    return [name for name in seen[0] if name != "minute"]


if __name__ == "__main__":
    sys.exit(main())
