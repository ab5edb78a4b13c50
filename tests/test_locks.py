"""Every package that the Makefile installs is known by its checksums, but for torch."""

import re

import pytest

from support.paths import ROOT

PINNED = {"dev": ["constraints.txt"]} | {
    path.stem.removeprefix("requirements-"): [path.name] for path in ROOT.glob("requirements-*.txt")
}


def pins(text):
    """By package: its version."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[[\w,-]*\])?==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def locked(name):
    """By package: its version, where at least one checksum follows."""
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    whole = re.findall(r"^\S+==\S+(?: ;[^\\\n]*)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", text, re.MULTILINE)
    assert len(whole) == len(pins(text)) == len(pins("\n".join(whole)))
    return pins(text)


@pytest.mark.parametrize("name", PINNED)
def test_what_is_pinned_is_locked(name):
    wanted = pins("\n".join((ROOT / file).read_text() for file in PINNED[name]))
    wanted.pop("torch", None)
    assert locked(name) == wanted, "run: make lock"


def test_what_turnwise_needs_is_in_the_lock_of_those_who_only_train():
    wanted = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[1]
    names = set(re.findall(r'"([a-z0-9-]+)', wanted)) - {"torch"}
    assert names <= locked("base").keys(), "run: make lock"
    assert locked("base").items() <= locked("dev").items()


def test_the_makefile_installs_by_checksums():
    """All but torch, turnwise itself, and the tool that makes the locks."""
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if re.search(r"PIP\) |pip install", line)]
    recipes = [line for line in installs if line.startswith("\t")]
    for line in recipes:
        assert "$(LOCKED)" in line or "^torch==" in line or "--no-deps --editable ." in line or line.endswith("uv; }")
    assert len([line for line in recipes if "$(LOCKED)" in line]) == 8


@pytest.mark.parametrize("name", ["base", *PINNED])
def test_a_lock_names_no_index(name):
    assert not re.search(r"://|--\S*index", (ROOT / "locks" / f"{name}.txt").read_text())
