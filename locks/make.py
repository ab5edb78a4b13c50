"""Writes the locks of this folder: the checksums of all files that a pinned version of a package may be installed from.

    make lock

What is pinned stands in constraints.txt and requirements-*.txt; this adds nothing but checksums, as uv finds them at
the index that is configured here, for every platform. torch is left out: it has builds for CPUs, CUDA and others, each
from an index of its own, and so are the packages of CUDA that its own build asks for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
UV = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
PLAIN = ["--no-header", "--no-annotate"]
APART = "torch"


def key(pin: str) -> str:
    """The name of a package, as one that may be written in several ways."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=\[ ;]", pin, maxsplit=1)[0]).lower()


def pins(path: Path) -> dict[str, str]:
    """By package: the line that pins it."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return {key(line): line for line in lines if line and not line.startswith("#") and key(line) != APART}


def needed(*extras: str) -> set[str]:
    """The packages that turnwise and extras of it ask for, and those that these ask for."""
    more = [part for extra in extras for part in ("--extra", extra)]
    command = [*UV, *PLAIN, "pyproject.toml", *more, "--constraint", "constraints.txt"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {key(line) for line in found.splitlines() if "==" in line}


def lock(name: str, wanted: list[str]) -> None:
    command = [*UV, *PLAIN, "--no-deps", "--generate-hashes", "-"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, input="\n".join(wanted) + "\n")
    head = f"# Made by `make lock`. pip: --require-hashes --no-deps --requirement locks/{name}.txt\n"
    (HERE / f"{name}.txt").write_text(head + done.stdout)
    print(f"locks/{name}.txt: {len(wanted)} packages")


def main() -> None:
    own = pins(ROOT / "constraints.txt")
    base = needed()
    lock("base", [line for name, line in own.items() if name in base])
    lock("dev", list(own.values()))
    for path in sorted(ROOT.glob("requirements-*.txt")):
        lock(path.stem.removeprefix("requirements-"), list(pins(path).values()))


if __name__ == "__main__":
    main()
