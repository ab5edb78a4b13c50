"""What a run is computed on and with: processor, memory, GPUs, and the versions of the packages.

A file in the run folder has one entry for the start and one for each resume on another machine or with other versions.
It names no host, no user and no path, so that it can be published with the run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import turnwise
from turnwise.atomic import write_atomically

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"),
    *("peft", "flash-attn", "triton", "vllm", "ray"),
)
GIT_SECONDS = 10.0


def record_machine(path: Path, step: int, gpus: Sequence[str]) -> None:
    """Write to `path` what the run is computed with from `step` on, unless the file says so already."""
    here, entries = {"step": step, **this_machine(gpus)}, read_machines(path)
    if entries and {**entries[-1], "step": step} == here:
        return
    earlier = [entry for entry in entries if entry["step"] < step]
    write_atomically(path, json.dumps([*earlier, here], indent=2) + "\n")


def read_machines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, in order, each with the step that it is from; empty where it cannot be read."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def this_machine(gpus: Sequence[str]) -> dict[str, Any]:
    """What this process computes on and with, as JSON."""
    commit = commit_of(Path(turnwise.__file__).parent)
    return {
        "turnwise": turnwise.__version__,
        **({"commit": commit} if commit else {}),
        "python": platform.python_version(),
        "packages": installed(PACKAGES),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": memory(),
        "gpus": list(gpus),
    }


def installed(names: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit_of(package: Path) -> str:
    """The git commit of a package's source, with "+" where files differ from it; "" for an installed package."""
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return ""
    try:
        commit = git(root, "rev-parse", "HEAD").strip()
        return commit + ("+" if git(root, "status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    return done.stdout


def cpu_model(file: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def memory() -> int | None:
    """Bytes of memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
