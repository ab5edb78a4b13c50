"""From the names in a recipe to the functions of a step: failure, filter, credit, correction, weighting, loss.

What would be ignored, or would not mean what it says, is refused here with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from turnwise.credit.correction import Correct, Correction, uncorrected
from turnwise.credit.estimators import (
    BY_TOKEN,
    COMPARE_ATTEMPTS,
    ESTIMATORS,
    NEEDS,
    WITHOUT_REWARD,
    Credit,
    critic_targets,
)
from turnwise.credit.failure import ON_FAILURE
from turnwise.credit.filters import FILTERS, WITHIN_GROUPS
from turnwise.credit.kl_penalty import penalise
from turnwise.credit.scope import Anchor, anchor_sequences, anchor_tokens
from turnwise.credit.truncation import TRUNCATIONS
from turnwise.credit.weighting import WEIGHTINGS, Weighting
from turnwise.learn.losses import LOSSES, OF_SEQUENCES, Loss
from turnwise.learn.objective import DIVERGENCES, Objective
from turnwise.learn.teacher import DIRECTIONS
from turnwise.recipe.arguments import choose
from turnwise.recipe.schema import Choice, Recipe
from turnwise.types import Group

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class Ratio:
    """What a loss compares the policy with."""

    anchor: str
    """The logprobs below the fraction: "engine" (as sampled) or "learner" (scored before the first update)."""
    compare: Anchor
    """Token by token, or by sequences of a scope."""


def check(recipe: Recipe) -> None:
    """Refuse what cannot be, and what would be ignored."""
    estimator_arguments(recipe)
    keep_of(recipe)
    check_credit(recipe)
    check_teacher(recipe)
    failure_of(recipe)
    weighting_of(recipe)([])
    policy_loss(recipe)
    check_kl(recipe)


def check_credit(recipe: Recipe) -> None:
    name = recipe.credit.name
    ESTIMATORS[name]([], {}, **estimator_arguments(recipe))  # settings out of range are refused here
    if recipe.critic.changed and "values" not in NEEDS.get(name, ()):
        raise ValueError(f"credit {name} would ignore the critic; use credit gae, or remove [critic]")
    if name in WITHOUT_REWARD and recipe.rollout.truncated == "zero":
        raise ValueError(
            f'rollout.truncated = "zero" would be ignored: credit {name} looks at no reward; write "train" or "mask"'
        )
    if name in COMPARE_ATTEMPTS and recipe.rollout.min_attempts < 2:
        raise ValueError(f"credit {name} compares attempts; rollout.min_attempts must be at least 2")
    compares = name not in COMPARE_ATTEMPTS | WITHOUT_REWARD  # with those of other groups
    if compares and recipe.groups_per_step * recipe.rollout.attempts < 2:
        raise ValueError(
            "a step of one attempt has nothing to compare it with; raise groups_per_step or rollout.attempts"
        )


def check_teacher(recipe: Recipe) -> None:
    """Who learns from a teacher has one, and who has one learns from it; credit none learns from nothing else."""
    name, term = recipe.credit.name, recipe.distill.coefficient > 0
    of_credit = "teacher" in NEEDS.get(name, ())
    if (of_credit or term) and not recipe.teacher:
        raise ValueError(f"{f'credit {name}' if of_credit else 'distill.coefficient'} needs teacher = FOLDER")
    if recipe.teacher and not (of_credit or term):
        raise ValueError(f"credit {name} would ignore the teacher; remove it, or set distill.coefficient")
    if term and recipe.filter.name == "zero_variance":
        raise ValueError(
            "filter zero_variance would drop groups whose tokens the teacher still has something to say of; remove it"
        )
    if name != "none":
        return
    if not term:
        raise ValueError("credit none gives nothing to learn by itself; set distill.coefficient, or another credit")
    for section in ("loss", "correction"):
        if getattr(recipe, section) != Recipe.model_fields[section].default:
            raise ValueError(f"[{section}] would be ignored: with credit none the policy loss is zero; remove it")


def check_kl(recipe: Recipe) -> None:
    if not charges_kl(recipe):
        return
    name = recipe.credit.name
    if name in WITHOUT_REWARD:
        raise ValueError(f"credit {name} looks at no reward, so that a KL charge on it would be ignored")
    if name == "maxrl":
        raise ValueError("credit maxrl needs totals of 0 or more, which a KL charge does not leave; put it in the loss")
    if recipe.filter.name == "zero_variance":
        raise ValueError(
            "filter zero_variance looks at rewards before the KL charge and would drop groups that carry signal; "
            'set kl.place = "loss", or remove the filter'
        )


def charges_kl(recipe: Recipe) -> bool:
    """Whether the reward, and not the loss, holds the policy near the reference."""
    return recipe.kl.coefficient > 0 and recipe.kl.place == "reward"


def needs(recipe: Recipe) -> frozenset[str]:
    """What a step has to have scored before its first update."""
    of_credit = NEEDS.get(recipe.credit.name, frozenset())
    of_kl = {"reference"} if recipe.kl.coefficient else set()
    of_teacher = {"buckets"} if recipe.distill.coefficient else set()
    several = recipe.updates_per_step > 1
    of_loss = {"old"} if ratio_of(recipe).anchor == "learner" and (several or recipe.correction.active) else set()
    return of_credit | of_kl | of_teacher | of_loss


# ---------------------------------------------------------------- groups


def failure_of(recipe: Recipe) -> Callable[[Group], Group]:
    """What becomes of attempts that failed for good."""
    choice = recipe.rollout.on_failure
    arguments = choose("rollout.on_failure", choice, ON_FAILURE, ("group",))
    return partial(ON_FAILURE[choice.name], **arguments)


def keep_of(recipe: Recipe) -> Callable[[Group], bool]:
    """Whether a group is worth training on."""
    arguments = choose("filter", recipe.filter, FILTERS, ("group",))
    if recipe.filter.name == "zero_variance" and recipe.credit.name not in WITHIN_GROUPS:
        raise ValueError(
            f"filter zero_variance would drop groups that still carry signal for {recipe.credit.name}; "
            f"use it with {' or '.join(sorted(WITHIN_GROUPS))}, or remove it"
        )
    worth = partial(FILTERS[recipe.filter.name], **arguments)
    pay = TRUNCATIONS[recipe.rollout.truncated].pay
    return lambda group: len(group.trajectories) >= recipe.rollout.min_attempts and worth(pay([group])[0])


# ---------------------------------------------------------------- credit and weights


def estimator_arguments(recipe: Recipe) -> dict[str, Any]:
    return choose("credit", recipe.credit, ESTIMATORS, ("groups", "scores", "kl"))


def estimate_of(recipe: Recipe) -> Callable[..., Credit]:
    """Credit of a step's groups, given scores."""
    estimate = partial(ESTIMATORS[recipe.credit.name], **estimator_arguments(recipe))
    pay, kl = TRUNCATIONS[recipe.rollout.truncated].pay, recipe.kl.coefficient
    if not charges_kl(recipe):
        return lambda groups, scores: estimate(pay(groups), scores)
    if recipe.credit.name in BY_TOKEN:
        return lambda groups, scores: estimate(pay(groups), scores, kl=kl)
    return lambda groups, scores: estimate(penalise(pay(groups), scores, kl), scores)


def targets_of(recipe: Recipe) -> Callable[..., Credit] | None:
    """What the critic learns, where there is one: gae's own settings without those of whitening."""
    if "values" not in NEEDS.get(recipe.credit.name, ()):
        return None
    arguments = {name: value for name, value in estimator_arguments(recipe).items() if name != "whiten"}
    pay, kl = TRUNCATIONS[recipe.rollout.truncated].pay, recipe.kl.coefficient if charges_kl(recipe) else 0.0
    return lambda groups, scores: critic_targets(pay(groups), scores, kl=kl, **arguments)


def weighting_of(recipe: Recipe) -> Weighting:
    arguments = choose("weighting", recipe.weighting, WEIGHTINGS, ("groups",))
    return TRUNCATIONS[recipe.rollout.truncated].weigh(partial(WEIGHTINGS[recipe.weighting.name], **arguments))


def correct_of(recipe: Recipe) -> Correct:
    """Credit as the loss shall take it."""
    if not recipe.correction.active:
        return uncorrected
    return Correction(**recipe.correction.model_dump())


# ---------------------------------------------------------------- loss


def ratio_of(recipe: Recipe) -> Ratio:
    """What the loss compares the policy with."""
    named = recipe.loss.arguments
    corrected, name = recipe.correction.active, recipe.loss.name
    anchor = named.get("anchor", "learner" if corrected else "engine")
    if anchor not in ("learner", "engine"):
        raise ValueError(
            f'loss.anchor = {anchor!r}: write "learner" (scored before the update) or "engine" (as sampled)'
        )
    if corrected and anchor == "engine":
        raise ValueError(
            'with loss.anchor = "engine" the loss compares with the engine already, and a correction would count the '
            'ratio twice; set loss.anchor = "learner", or remove the correction'
        )
    if name == "reinforce" and "anchor" in named and not corrected:
        raise ValueError("loss.anchor would be ignored: reinforce has no ratio; remove it")
    if name not in OF_SEQUENCES:
        return Ratio(anchor, anchor_tokens)
    if named.get("scope") not in ("turn", "trajectory"):
        raise ValueError(f'loss {name} needs loss.scope = "turn" or "trajectory": what its ratio is one of')
    return Ratio(anchor, partial(anchor_sequences, scope=named["scope"]))


def policy_loss(recipe: Recipe) -> Loss:
    """The loss function with its settings."""
    apart = ("anchor", "scope") if recipe.loss.name in OF_SEQUENCES else ("anchor",)
    named = {key: value for key, value in recipe.loss.arguments.items() if key not in apart}
    choice = Choice(name=recipe.loss.name, **named)
    arguments = choose("loss", choice, LOSSES, ("logprobs", "old", "advantages"))
    loss = partial(LOSSES[recipe.loss.name], **arguments)
    refuse_bad_settings(loss)
    ratio = ratio_of(recipe)
    lag = recipe.max_lag > 0 and not recipe.correction.active
    if ratio.anchor == "learner" and recipe.updates_per_step == 1 and (named or lag):
        ignored = "max_lag" if lag else f"loss.{next(iter(named))}"
        raise ValueError(
            f'{ignored} would be ignored: with loss.anchor = "learner" the ratio of a step\'s only update is 1; '
            'set loss.anchor = "engine", or more updates by groups_per_update or epochs'
        )
    return loss


def refuse_bad_settings(loss: Loss) -> None:
    """Call the loss on nothing: it checks its settings."""
    nothing = torch.zeros(0)
    loss(nothing, nothing, nothing)


def objective_of(recipe: Recipe) -> Objective:
    """What every update minimises."""
    in_loss = 0.0 if charges_kl(recipe) else recipe.kl.coefficient
    return Objective(
        policy_loss(recipe),
        recipe.entropy,
        in_loss,
        DIVERGENCES[recipe.kl.divergence],
        recipe.distill.coefficient,
        DIRECTIONS[recipe.distill.direction],
    )


def gap_limit_of(recipe: Recipe) -> float:
    return recipe.gap_limit or GAP_LIMITS[recipe.model.dtype]
