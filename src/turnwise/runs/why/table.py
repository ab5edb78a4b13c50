"""Every check, in one table, and what they find together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

from turnwise.recipe.schema import Recipe
from turnwise.runs.why.attempts import ATTEMPT_CHECKS
from turnwise.runs.why.check import Check, Finding
from turnwise.runs.why.history import MetricHistory
from turnwise.runs.why.rewards import REWARD_CHECKS
from turnwise.runs.why.updates import UPDATE_CHECKS

log = logging.getLogger(__name__)

CHECKS: tuple[Check, ...] = (*ATTEMPT_CHECKS, *REWARD_CHECKS, *UPDATE_CHECKS)


@lru_cache(4096)
def is_read(name: str) -> bool:
    """Whether a check looks at a metric."""
    reads = [read for check in CHECKS for read in check.reads]
    return name in reads or any(read.endswith("/") and name.startswith(read) for read in reads)


def find_causes(history: MetricHistory, recipe: Recipe, checks: tuple[Check, ...] = CHECKS) -> list[Finding]:
    """What the checks find, without what follows from another cause that was found. A check that fails is left out: it
    must not end the run that it watches."""
    found: dict[str, Finding] = {}
    for check in checks:
        try:
            finding = check.look(history, recipe)
        except Exception:
            log.debug("the check %s failed", check.name, exc_info=True)
            continue
        if finding is not None:
            found[check.name] = finding
    return without_consequences(found, checks)


def without_consequences(found: Mapping[str, Finding], checks: tuple[Check, ...] = CHECKS) -> list[Finding]:
    """The findings, by the names of their checks, that no other of them explains."""
    explained = {name for check in checks if check.name in found for name in check.explains}
    return [finding for name, finding in found.items() if name not in explained]
