"""Lines of metrics as runs log them, made up."""

from __future__ import annotations

from typing import Any

from turnwise.recipe.parse import apply_override, parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.why.history import MetricHistory
from turnwise.runs.why.table import CHECKS, is_read

HEALTHY = {
    "success": 0.5,
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "trajectory/count": 64.0,
    "trajectory/failed": 0.0,
    "turn/count": 128.0,
    "turn/faults": 0.0,
    "turn/prompt_tokens": 80.0,
    "turn/prompt_tokens_refused": 0.0,
    "stop/length": 0.02,
    "stop/missed_end": 0.0,
    "status/prompt_too_long": 0.0,
    "status/too_long": 0.0,
    "status/too_many_turns": 0.0,
    "failure/rate": 0.0,
    "prefix/repeated": 0.0,
    "groups/kept": 8.0,
    "groups/dropped": 0.0,
    "groups/zero_variance": 2.0,
    "groups/identical": 1.0,
    "tasks/distinct": 400.0,
    "tasks/epochs": 0.1,
    "gradient_norm": 0.3,
    "entropy": 1.0,
    "ratio": 1.0,
    "clipped": 0.01,
    "skipped": 0.0,
    "gap/mean": 1e-7,
    "lag/mean": 0.0,
    "lag/masked_turns": 0.0,
}
EVALUATED = {
    "eval/sampled/success": 0.5,
    "eval/sampled/success_high": 0.6,
    "eval/sampled/version": 0.0,
    "eval/sampled/tasks": 64.0,
    "eval/sampled/reward/min": 0.0,
    "eval/sampled/reward/max": 1.0,
    "eval/sampled/status/prompt_too_long": 0.0,
    "eval/sampled/trajectory/count": 64.0,
    "eval/sampled/trajectory/failed": 0.0,
    "eval/sampled/turn/prompt_tokens_refused": 0.0,
}


def run_of(steps: int, **changed: Any) -> list[dict[str, Any]]:
    """The lines of a healthy run, its first evaluation included. A changed metric is a number, or one for each step;
    names are written with _ for /, and with eval_ for those of the evaluation before training."""
    names = {name.replace("eval/sampled/", "eval/").replace("/", "_"): name for name in (*HEALTHY, *EVALUATED)}
    lines: list[dict[str, Any]] = [{"step": 0, **EVALUATED}]
    lines += [{"step": step, **HEALTHY} for step in range(1, steps + 1)]
    for key, value in changed.items():
        name = names[key]
        if name in EVALUATED:
            lines[0][name] = value
            continue
        values = value if isinstance(value, (list, tuple)) else [value] * steps
        for line, of_step in zip(lines[1:], values, strict=True):
            line[name] = of_step
    return lines


def recipe_with(*overrides: str) -> Recipe:
    """A recipe with nothing in it but these."""
    tree: dict[str, Any] = {"env": [{"name": "hops"}]}
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, "test")


def seen_by(name: str, lines: list[dict[str, Any]], *overrides: str) -> Any:
    """What one check sees in these lines."""
    (check,) = (check for check in CHECKS if check.name == name)
    finding = check.look(MetricHistory.of(lines, is_read), recipe_with(*overrides))
    return None if finding is None else finding.seen
