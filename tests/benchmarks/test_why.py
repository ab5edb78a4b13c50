"""The recipes of benchmarks/why.py: they parse, and what they expect is a check."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from turnwise.recipe.parse import load_recipe
from turnwise.runs.why.table import CHECKS

BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "why.py"))
CASES = (*BENCHMARK["BROKEN"], *BENCHMARK["SOUND"], *BENCHMARK["MORE"])


def test_there_are_ten_broken_five_sound_and_ten_more() -> None:
    assert [len(BENCHMARK[name]) for name in ("BROKEN", "SOUND", "MORE")] == [10, 5, 10]
    assert len({case.name for case in CASES}) == 25
    assert all(case.expected for case in (*BENCHMARK["BROKEN"], *BENCHMARK["MORE"]))
    assert not any(case.expected for case in BENCHMARK["SOUND"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_recipe_parses_and_expects_a_check(case: Any, tmp_path: Path) -> None:
    load_recipe(BENCHMARK["recipe_of"](case, tmp_path), case.overrides)
    assert set(case.expected) <= {check.name for check in CHECKS}


def outcome(case: Any, live: dict[str, int], afterwards: tuple[str, ...]) -> bool:
    return BENCHMARK["Outcome"](case, live, afterwards, 0.0, 0.0, "finished").is_right


def test_a_cause_counts_only_if_it_is_named_in_time_and_afterwards() -> None:
    broken, sound = BENCHMARK["BROKEN"][0], BENCHMARK["SOUND"][0]
    assert outcome(broken, {"learning_rate": 5}, ("learning_rate",))
    assert not outcome(broken, {"learning_rate": 6}, ("learning_rate",))
    assert not outcome(broken, {"learning_rate": 5}, ())
    assert not outcome(broken, {"gap": 1}, ("gap",))
    assert outcome(sound, {}, ())
    assert not outcome(sound, {"gap": 1}, ())
