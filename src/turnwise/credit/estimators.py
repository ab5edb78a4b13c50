"""The advantage estimators by name: pure functions of whole groups that return one array per turn, one number per
action token. Each takes (groups, scores, *, its own settings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwise.credit.returns import Credit, Scores
from turnwise.credit.teaching import distill, imitate, none
from turnwise.credit.temporal import critic_targets, gae, gigpo, reinforce_pp, reward_to_go, turn_baseline
from turnwise.credit.totals import centre, grpo, maxrl, reinforce, rloo

__all__ = [
    "BY_TOKEN",
    "COMPARE_ATTEMPTS",
    "ESTIMATORS",
    "NEEDS",
    "WITHOUT_REWARD",
    "Credit",
    "Estimator",
    "Scores",
    "centre",
    "critic_targets",
    "distill",
    "gae",
    "gigpo",
    "grpo",
    "imitate",
    "maxrl",
    "needs",
    "none",
    "reinforce",
    "reinforce_pp",
    "reward_to_go",
    "rloo",
    "turn_baseline",
]

Estimator = Callable[..., Credit]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reward_to_go": reward_to_go,
    "turn_baseline": turn_baseline,
    "gae": gae,
    "gigpo": gigpo,
    "distill": distill,
    "none": none,
}
COMPARE_ATTEMPTS = frozenset({"grpo", "rloo", "maxrl", "reward_to_go", "turn_baseline", "gigpo"})
"""Estimators that compare the attempts of a group, so that a group of one tells them little or nothing."""
BY_TOKEN = frozenset({"reinforce_pp", "gae"})
"""Estimators that tell the tokens of a turn apart and so take a KL charge per token themselves."""
WITHOUT_REWARD = frozenset({"distill", "none"})
"""Estimators that look at no reward, so that nothing that is done to rewards reaches them."""
NEEDS: dict[str, frozenset[str]] = {"gae": frozenset({"values"}), "distill": frozenset({"teacher"})}
"""Scores that an estimator cannot do without, whatever its settings; those not named here need none."""


def needs(name: str, settings: Mapping[str, Any]) -> frozenset[str]:
    """The scores that an estimator with these settings cannot do without."""
    of_settings = {"reference"} if settings.get("kl", 0.0) > 0 else set()
    return NEEDS.get(name, frozenset()) | of_settings
