"""The warm start in the cache: made again when its environment was fixed, when it is damaged, and when one says so."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.assembling import warm_model
from support.running import SilentScreen, micro_recipe
from turnwise.cli.commands import main
from turnwise.recipe.schema import Recipe
from turnwise.testing.micro import MICRO


def made(recipe: Recipe) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights after the warm start, and what was said."""
    torch.set_num_threads(1)
    screen = SilentScreen()
    model, _ = asyncio.run(warm_model(recipe, screen))
    return model.state_dict(), screen.said


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)  # False where shapes differ


def only_entry(folder: Path) -> Path:
    [entry] = (folder / "cache").glob("warm-*")
    return entry


def test_a_cached_one_says_when_it_was_made_and_how_to_make_it_again(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path)
    first, said = made(recipe)
    assert said == []
    second, [line] = made(recipe)
    assert equal(first, second)
    assert line.startswith(f"warm start: from {only_entry(tmp_path)}, made 20")
    assert line.endswith("; sft.remake=true makes it again")
    stamp = only_entry(tmp_path).stat().st_ino
    third, said = made(micro_recipe(tmp_path, "sft.remake=true"))
    assert equal(first, third)
    assert said == []
    assert only_entry(tmp_path).stat().st_ino != stamp


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "damage"),
    [("model.safetensors", flip), ("tokenizer.json", cut), ("config.json", Path.unlink), ("SHA256SUMS", Path.unlink)],
)
def test_a_damaged_one_is_made_again_and_said_to_be(tmp_path: Path, file: str, damage: Any) -> None:
    recipe = micro_recipe(tmp_path)
    first, _ = made(recipe)
    entry = only_entry(tmp_path)
    damage(entry / file)
    second, said = made(recipe)
    assert equal(first, second)
    assert said[0].startswith(f"warm start: {entry} is damaged: ")
    assert file in said[0]
    assert said[0].endswith("; it is made again")
    assert made(recipe)[1][0].startswith("warm start: from")


ENVIRONMENT = """
from turnwise.envs.hops import Hops
from words import BEGINNING


class Mine(Hops):
    async def open(self, task):
        return await super().open(task)

    def demonstrate(self, noise, random):
        return BEGINNING + super().demonstrate(noise, random)
"""


def test_the_fix_of_a_typo_in_an_environment_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of everybody's first hour: run, look, fix the environment or what it imports, run again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_environment.py").write_text(ENVIRONMENT)
    (tmp_path / "words.py").write_text('BEGINNING = "oepn "\n')
    recipe = micro_recipe(tmp_path, 'env.0.name="my_environment:Mine"')
    first, said = made(recipe)
    assert said == []
    assert "warm start: from" in made(recipe)[1][0]
    (tmp_path / "words.py").write_text('BEGINNING = ""\n')
    for name in ("my_environment", "words"):  # as in the next process
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    second, said = made(recipe)
    [line] = said
    assert line.endswith("is not used; changed since: code words")
    assert not equal(first, second)
    assert len(list((tmp_path / "cache").glob("warm-*"))) == 2


def test_remaking_nothing_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text(MICRO)
    assert main(["train", str(tmp_path / "recipe.toml"), "sft.updates=0", "sft.remake=true"]) == 2
    assert "remake is ignored with updates = 0" in capsys.readouterr().err
