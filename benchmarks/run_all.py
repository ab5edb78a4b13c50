"""Run every benchmark, one after another, and write what they print to benchmarks/RESULTS.md.

    python benchmarks/run_all.py [--quick] [--only NAME ...]

Figures go to benchmarks/results/NAME.json. Without --quick that takes hours on a laptop; one that fails is named
in the page and does not stop the others, and those that are not run keep what the page says of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
BENCHMARKS = {
    "quickstart": ["--lags", "0", "2"],
    "prefix_tree": [],
    "env_batching": [],
    "engines": ["--threads", "1", "2"],
    "turn_cost": [],
    "async_training": [],
    "weight_sync": [],
    "rank_weights": [],
    "against_trl": [],
    "search_layouts": [],
    "endpoint": [],
    "viewer": [],
    "recipes": [],
    "curves": [],
    "faults": [],
    "soak": [],
    "stalls": [],
    "why": [],
    "learned": [],
    "guess_alone": [],
}
"""By script: arguments of a whole run."""


def run(name: str, arguments: list[str]) -> tuple[str, str]:
    """(the command as one would type it, what it printed)."""
    command = ["benchmarks/" + name + ".py", *arguments]
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, HERE / f"{name}.py", *arguments, "--json", results / f"{name}.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    minutes = (time.perf_counter() - began) / 60
    ended = f"({minutes:.1f} minutes)" if done.returncode == 0 else f"FAILED:\n{done.stderr.strip()[-2000:]}"
    return "python " + " ".join(command), f"{done.stdout.strip()}\n\n{ended}"


def sections(text: str) -> dict[str, str]:
    """What a page of results says, by benchmark."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each under a minute: shows that they run, no figures")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    chosen = parser.parse_args()
    said = sections(PAGE.read_text()) if PAGE.exists() else {}
    for name in chosen.only:
        print(f"{name} ...", flush=True)
        command, printed = run(name, ["--quick"] if chosen.quick else BENCHMARKS[name])
        said[name] = f"```\n$ {command}\n{printed}\n```"
        page = f"# Results\n\nMade by `make bench` on {platform.machine()}, {os.cpu_count()} cores, " + (
            f"Python {platform.python_version()}. What ran with --quick only shows that it runs.\n"
        )
        known = [name for name in BENCHMARKS if name in said]
        PAGE.write_text(page + "".join(f"\n## {name}\n\n{said[name]}\n" for name in known))
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


if __name__ == "__main__":
    main()
