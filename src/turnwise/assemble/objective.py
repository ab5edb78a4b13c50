"""From the names in a recipe to the functions of a step: failure, filter, credit, correction, weighting, loss.

A setting that would be ignored, or would not mean what it says, is refused here with the reason. What is refused comes
from the records of the variants (ESTIMATORS, FILTERS, LOSSES, ...); no variant is known here by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from turnwise.credit.correction import Correct, Correction, uncorrected
from turnwise.credit.estimators import ESTIMATORS, Estimator
from turnwise.credit.failure import ON_FAILURE
from turnwise.credit.filters import FILTERS
from turnwise.credit.kl_penalty import penalise
from turnwise.credit.returns import Credit
from turnwise.credit.scope import Anchor, anchor_sequences, anchor_tokens
from turnwise.credit.truncation import TRUNCATIONS
from turnwise.credit.weighting import WEIGHTINGS, WeighTokens
from turnwise.learn.losses import LOSSES, LossFunction
from turnwise.learn.objective import DIVERGENCES, Objective
from turnwise.learn.teacher import DIRECTIONS
from turnwise.recipe.arguments import choose
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice
from turnwise.types import Group, by_seat

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
GIVEN_TO_ESTIMATORS = ("groups", "scores", "kl")
"""Parameters of estimators that are no settings of [credit]: kl is the coefficient of [kl]."""


class Variant(Protocol):
    """A record that a recipe can name."""

    @property
    def function(self) -> Callable[..., Any]: ...


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
    """Refuse settings that the estimator cannot use, or has too few attempts for."""
    name, estimator, truncated = (
        recipe.credit.name,
        ESTIMATORS[recipe.credit.name],
        recipe.rollout.failures.on_truncation,
    )
    estimator.function([], {}, **estimator_arguments(recipe))  # refuses settings out of range
    if recipe.critic.changed and "values" not in estimator.needs:
        with_critic = " or ".join(names_of(lambda other: "values" in other.needs))
        raise ValueError(f"credit {name} would ignore the critic; use credit {with_critic}, or remove [critic]")
    if not estimator.reads_rewards and TRUNCATIONS[truncated].changes_rewards:
        others = " or ".join(f'"{other}"' for other, record in TRUNCATIONS.items() if not record.changes_rewards)
        raise ValueError(
            f'rollout.failures.on_truncation = "{truncated}" would be ignored: credit {name} looks at no reward; '
            f"write {others}"
        )
    if estimator.compares_attempts and recipe.rollout.failures.min_attempts < 2:
        raise ValueError(f"credit {name} compares attempts; rollout.failures.min_attempts must be at least 2")
    compares_groups = estimator.reads_rewards and not estimator.compares_attempts
    if compares_groups and recipe.groups_per_step * recipe.rollout.group_size < 2:
        raise ValueError(
            "a step of one attempt has nothing to compare it with; raise groups_per_step or rollout.group_size"
        )


def check_teacher(recipe: Recipe) -> None:
    """A recipe that learns from a teacher has one, and one that has a teacher learns from it."""
    name, estimator, in_loss = recipe.credit.name, ESTIMATORS[recipe.credit.name], recipe.distill.coefficient > 0
    in_credit = "teacher" in estimator.needs
    if (in_credit or in_loss) and not recipe.teacher:
        raise ValueError(f"{f'credit {name}' if in_credit else 'distill.coefficient'} needs teacher = FOLDER")
    if recipe.teacher and not (in_credit or in_loss):
        raise ValueError(f"credit {name} would ignore the teacher; remove it, or set distill.coefficient")
    if in_loss and FILTERS[recipe.filter.name].drops_equal_totals:
        raise ValueError(
            f"filter {recipe.filter.name} would drop groups whose tokens the teacher still has something to say of; "
            "remove it"
        )
    if estimator.always_zero:
        check_zero_credit(recipe)


def check_zero_credit(recipe: Recipe) -> None:
    """With credit that is 0 everywhere only the teacher can train, and settings of the policy loss mean nothing."""
    name = recipe.credit.name
    if not recipe.distill.coefficient > 0:
        raise ValueError(f"credit {name} gives nothing to learn by itself; set distill.coefficient, or another credit")
    for section, settings in (("loss", recipe.loss), ("correction", recipe.correction)):
        if settings != Recipe.model_fields[section].default:
            raise ValueError(f"[{section}] would be ignored: with credit {name} the policy loss is zero; remove it")


def check_kl(recipe: Recipe) -> None:
    """Refuse a KL penalty on rewards that would be ignored, or that the estimator or the filter cannot take."""
    if not charges_kl(recipe):
        return
    name, estimator = recipe.credit.name, ESTIMATORS[recipe.credit.name]
    if not estimator.reads_rewards:
        raise ValueError(f"credit {name} looks at no reward, so that a KL charge on it would be ignored")
    if not estimator.takes_negative_totals:
        raise ValueError(
            f"credit {name} needs totals of 0 or more, which a KL charge does not leave; put it in the loss"
        )
    if FILTERS[recipe.filter.name].drops_equal_totals:
        raise ValueError(
            f"filter {recipe.filter.name} looks at rewards before the KL charge and would drop groups that carry "
            'signal; set kl.apply_to = "loss", or remove the filter'
        )


def charges_kl(recipe: Recipe) -> bool:
    """Whether the KL penalty is taken from the reward, and not added to the loss."""
    return recipe.kl.coefficient > 0 and recipe.kl.apply_to == "reward"


def needs(recipe: Recipe) -> frozenset[str]:
    """The scores that a step computes before its first update."""
    for_kl = {"reference"} if recipe.kl.coefficient else set()
    for_teacher = {"buckets"} if recipe.distill.coefficient else set()
    several = recipe.updates_per_step > 1
    for_loss = {"old"} if ratio_of(recipe).anchor == "learner" and (several or recipe.correction.active) else set()
    for_archive = {"inspection"} if recipe.archive.scores else set()
    return ESTIMATORS[recipe.credit.name].needs | for_kl | for_teacher | for_loss | for_archive


def names_of(holds: Callable[[Estimator], bool]) -> list[str]:
    """The names of the estimators for which something holds, sorted."""
    return sorted(name for name, estimator in ESTIMATORS.items() if holds(estimator))


def arguments_of(kind: str, choice: Choice, variants: Mapping[str, Variant], supplied: Sequence[str]) -> dict[str, Any]:
    """The settings of the variant that a recipe names, checked against the signature of its function."""
    return choose(kind, choice, {name: variant.function for name, variant in variants.items()}, supplied)


# ---------------------------------------------------------------- groups


def failure_of(recipe: Recipe) -> Callable[[Group], Group]:
    """What happens to attempts that failed for good."""
    choice = recipe.rollout.failures.on_failure
    arguments = arguments_of("rollout.failures.on_failure", choice, ON_FAILURE, ("group",))
    return partial(ON_FAILURE[choice.name].function, **arguments)


def keep_of(recipe: Recipe) -> Callable[[Group], bool]:
    """Whether a group is worth training on."""
    arguments = arguments_of("filter", recipe.filter, FILTERS, ("group",))
    chosen, estimator = FILTERS[recipe.filter.name], ESTIMATORS[recipe.credit.name]
    if chosen.drops_equal_totals and not estimator.zero_for_equal_totals:
        fitting = names_of(lambda other: other.zero_for_equal_totals)
        raise ValueError(
            f"filter {recipe.filter.name} would drop groups that still carry signal for {recipe.credit.name}; "
            f"use it with {' or '.join(fitting)}, or remove it"
        )
    is_worth_it = partial(chosen.function, **arguments)
    pay = TRUNCATIONS[recipe.rollout.failures.on_truncation].pay
    return lambda group: any(
        len(part.trajectories) >= recipe.rollout.failures.min_attempts and is_worth_it(pay([part])[0])
        for part in by_seat([group])
    )


# ---------------------------------------------------------------- credit and token weights


def estimator_arguments(recipe: Recipe) -> dict[str, Any]:
    return arguments_of("credit", recipe.credit, ESTIMATORS, GIVEN_TO_ESTIMATORS)


def estimate_of(recipe: Recipe) -> Callable[..., Credit]:
    """Credit of a step's groups, given scores."""
    arguments, estimator = estimator_arguments(recipe), ESTIMATORS[recipe.credit.name]
    estimate = partial(estimator.function, **arguments)
    pay, kl = TRUNCATIONS[recipe.rollout.failures.on_truncation].pay, recipe.kl.coefficient
    if not charges_kl(recipe):
        return lambda groups, scores: estimate(pay(by_seat(groups)), scores)
    if estimator.by_token:
        return lambda groups, scores: estimate(pay(by_seat(groups)), scores, kl=kl)
    return lambda groups, scores: estimate(penalise(pay(by_seat(groups)), scores, kl), scores)


def targets_of(recipe: Recipe) -> Callable[..., Credit] | None:
    """What the critic is trained towards; None if the estimator needs no critic."""
    targets = ESTIMATORS[recipe.credit.name].critic_targets
    if targets is None:
        return None
    taken = inspect.signature(targets).parameters
    arguments = {name: value for name, value in estimator_arguments(recipe).items() if name in taken}
    pay, kl = (
        TRUNCATIONS[recipe.rollout.failures.on_truncation].pay,
        recipe.kl.coefficient if charges_kl(recipe) else 0.0,
    )
    return lambda groups, scores: targets(pay(groups), scores, kl=kl, **arguments)


def weighting_of(recipe: Recipe) -> WeighTokens:
    """The token weights of a mini-batch's groups."""
    arguments = arguments_of("weighting", recipe.weighting, WEIGHTINGS, ("groups",))
    weigh = partial(WEIGHTINGS[recipe.weighting.name].function, **arguments)
    weigh_groups = TRUNCATIONS[recipe.rollout.failures.on_truncation].weigh(weigh)
    return lambda groups: weigh_groups(by_seat(groups))


def correct_of(recipe: Recipe) -> Correct:
    """The off-policy correction of credit."""
    return Correction(**recipe.correction.model_dump()) if recipe.correction.active else uncorrected


# ---------------------------------------------------------------- loss


def ratio_of(recipe: Recipe) -> Ratio:
    """What the loss compares the policy with."""
    settings = recipe.loss.arguments
    corrected, name, loss = recipe.correction.active, recipe.loss.name, LOSSES[recipe.loss.name]
    anchor = settings.get("anchor", "learner" if corrected else "engine")
    if anchor not in ("learner", "engine"):
        raise ValueError(
            f'loss.anchor = {anchor!r}: write "learner" (scored before the update) or "engine" (as sampled)'
        )
    if corrected and anchor == "engine":
        raise ValueError(
            'with loss.anchor = "engine" the loss compares with the engine already, and a correction would count the '
            'ratio twice; set loss.anchor = "learner", or remove the correction'
        )
    if not loss.has_ratio and "anchor" in settings and not corrected:
        raise ValueError(f"loss.anchor would be ignored: {name} has no ratio; remove it")
    if not loss.of_sequences:
        return Ratio(anchor, anchor_tokens)
    if settings.get("scope") not in ("turn", "trajectory"):
        raise ValueError(f'loss {name} needs loss.scope = "turn" or "trajectory": what its ratio is one of')
    return Ratio(anchor, partial(anchor_sequences, scope=settings["scope"]))


def policy_loss(recipe: Recipe) -> LossFunction:
    """The loss function with its settings."""
    scoped = recipe.loss.name in LOSSES and LOSSES[recipe.loss.name].of_sequences
    not_its_own = ("anchor", "scope") if scoped else ("anchor",)
    settings = {key: value for key, value in recipe.loss.arguments.items() if key not in not_its_own}
    choice = Choice(name=recipe.loss.name, **settings)
    arguments = arguments_of("loss", choice, LOSSES, ("logprobs", "old", "advantages"))
    loss = partial(LOSSES[recipe.loss.name].function, **arguments)
    refuse_bad_settings(loss)
    ratio = ratio_of(recipe)
    lag = recipe.max_lag > 0 and not recipe.correction.active
    if ratio.anchor == "learner" and recipe.updates_per_step == 1 and (settings or lag):
        ignored = "max_lag" if lag else f"loss.{next(iter(settings))}"
        raise ValueError(
            f'{ignored} would be ignored: with loss.anchor = "learner" the ratio of a step\'s only update is 1; '
            'set loss.anchor = "engine", or more updates by groups_per_update or epochs'
        )
    return loss


def refuse_bad_settings(loss: LossFunction) -> None:
    """Call the loss on nothing: it checks its settings."""
    nothing = torch.zeros(0)
    loss(nothing, nothing, nothing)


def objective_of(recipe: Recipe) -> Objective:
    """What every update minimises."""
    kl_in_loss = 0.0 if charges_kl(recipe) else recipe.kl.coefficient
    return Objective(
        policy_loss(recipe),
        recipe.entropy,
        kl_in_loss,
        DIVERGENCES[recipe.kl.divergence],
        recipe.distill.coefficient,
        DIRECTIONS[recipe.distill.direction],
    )


def max_logprob_gap_of(recipe: Recipe) -> float:
    return recipe.guards.max_logprob_gap or GAP_LIMITS[recipe.model.dtype]
