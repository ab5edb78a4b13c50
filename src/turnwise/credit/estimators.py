"""The advantage estimators that a recipe can name (`credit.name`), each with what it needs and what it assumes.

To add one, write a pure function (groups, scores, *, settings) -> one array per turn, one number per action token, and
enter it in ESTIMATORS. The record decides what is scored before the first update of a step and which recipes are
refused; no other file knows an estimator by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate

from turnwise.credit.returns import Credit, Scores
from turnwise.credit.teaching import distill, none
from turnwise.credit.temporal import critic_targets, gae, gigpo, reinforce_pp, reward_to_go, turn_baseline
from turnwise.credit.totals import grpo, maxrl, reinforce, rloo
from turnwise.types import Group

Estimate = Callable[Concatenate[Sequence[Group], Scores, ...], Credit]
"""(groups, scores, *, settings) -> one array per turn of `turns_of(groups)`, one number per action token."""

KNOWN_SCORES = frozenset({"old", "reference", "teacher", "values"})
"""The scores that an estimator may need: logprobs of the policy before the step, of the reference and of the teacher,
and the critic's values."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator and the facts about it that the rest of the system asks for.

    Example:
        Estimator(gae, needs=frozenset({"values"}), by_token=True, critic_targets=critic_targets)
    """

    function: Estimate
    """Computes the advantages. Its keyword arguments are the settings that a recipe may give in [credit]."""
    needs: frozenset[str] = frozenset()
    """The scores it reads whatever its settings, from KNOWN_SCORES. They are computed before the first update."""
    by_token: bool = False
    """It may give the tokens of one turn different advantages. A KL penalty on the reward is then passed to it per
    token, as the keyword argument `kl`; the others get groups whose turns have been penalised."""
    compares_attempts: bool = False
    """It compares the attempts of a group with each other and with nothing else, so a group of one teaches it little
    or nothing. Recipes must keep rollout.failures.min_attempts at 2 or more."""
    reads_rewards: bool = True
    """Its advantages depend on rewards. If not, settings that change rewards would be ignored and are refused."""
    zero_for_equal_totals: bool = False
    """A group whose attempts all have the same total gets advantages of exactly 0, so dropping it loses nothing."""
    always_zero: bool = False
    """Its advantages are 0 everywhere, so the policy loss is 0 and another term of the objective must train."""
    takes_negative_totals: bool = True
    """It accepts totals below 0. If not, a KL penalty on the reward is refused, because it may push a total below."""
    critic_targets: Estimate | None = None
    """Computes what the critic is trained towards, with those of the settings that this function takes. Required of
    estimators that need values, None for the others."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.needs - KNOWN_SCORES):
            raise ValueError(f"no model scores {', '.join(unknown)}; known: {', '.join(sorted(KNOWN_SCORES))}")
        if ("values" in self.needs) != (self.critic_targets is not None):
            raise ValueError('an estimator has critic_targets if it needs "values", and only then')


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo, compares_attempts=True, zero_for_equal_totals=True),
    "rloo": Estimator(rloo, compares_attempts=True, zero_for_equal_totals=True),
    "maxrl": Estimator(maxrl, compares_attempts=True, zero_for_equal_totals=True, takes_negative_totals=False),
    "reinforce": Estimator(reinforce),
    "reinforce_pp": Estimator(reinforce_pp, by_token=True),
    "reward_to_go": Estimator(reward_to_go, compares_attempts=True),
    "turn_baseline": Estimator(turn_baseline, compares_attempts=True),
    "gae": Estimator(gae, needs=frozenset({"values"}), by_token=True, critic_targets=critic_targets),
    "gigpo": Estimator(gigpo, compares_attempts=True),
    "distill": Estimator(distill, needs=frozenset({"teacher"}), reads_rewards=False),
    "none": Estimator(none, reads_rewards=False, always_zero=True),
}
