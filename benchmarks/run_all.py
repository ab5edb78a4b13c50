"""Run every benchmark, one after another, and write what they print to benchmarks/RESULTS.md.

    python benchmarks/run_all.py [--quick] [--only NAME ...]

Figures go to benchmarks/results/NAME.json. Without --quick that takes hours on a laptop; one that fails is named
in the page and does not stop the others.
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
BENCHMARKS = {
    "quickstart": ["--lags", "0", "2"],
    "prefix_tree": [],
    "curves": [],
    "env_batching": [],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each under a minute: shows that they run, no figures")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    chosen = parser.parse_args()
    page = [
        "# Results",
        "",
        f"Made by `make bench` on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        + (", with --quick: shows that they run, no figures." if chosen.quick else "."),
    ]
    for name in chosen.only:
        print(f"{name} ...", flush=True)
        command, printed = run(name, ["--quick"] if chosen.quick else BENCHMARKS[name])
        page += ["", f"## {name}", "", "```", f"$ {command}", printed, "```"]
    (HERE / "RESULTS.md").write_text("\n".join(page) + "\n")
    print("wrote benchmarks/RESULTS.md")


if __name__ == "__main__":
    main()
