"""What is added to the policy loss, and how credit is corrected."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.recipe.section import Section


class KlConfig(Section):
    """The KL penalty, which keeps the policy near a reference. Open it when you set `kl.coefficient`."""

    in_short_list = ("coefficient",)

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL penalty; 0 for none."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: loss adds it to the loss; reward subtracts k1, the log ratio, from every token's
    reward."""
    divergence: Literal["k2", "k3"] = "k3"
    """Estimator of the divergence in the loss: k2 has the gradient of KL(policy, reference); k3 is never negative and
    has the gradient of KL(reference, policy)."""
    reference: str = "start"
    """A folder that transformers can load, a name of the Hub, or "start": the policy as it is before the first step."""

    @field_validator("divergence", mode="before")
    @classmethod
    def k1_is_no_loss(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError(
                'k1 as a loss has an expected gradient of zero; use "k2" or "k3", or apply_to = "reward", which '
                "charges k1"
            )
        return value

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.coefficient and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a coefficient")
        if self.apply_to == "reward" and "divergence" in self.changed:
            raise ValueError('divergence is one of the loss; with apply_to = "reward" the charge is k1')
        return self


class DistillConfig(Section):
    """A term of the loss that compares the policy's whole distribution at every action token with the teacher's. Open
    it when you set `teacher`."""

    in_short_list = ()

    coefficient: float = Field(0.0, ge=0)
    """Weight of the term; 0 for none."""
    top_k: int = Field(16, ge=1)
    """How many of the teacher's likeliest tokens are compared one by one; all others are compared as one."""
    direction: Literal["reverse", "forward"] = "reverse"
    """reverse is KL(policy, teacher), which keeps the policy to a part of what the teacher does; forward is
    KL(teacher, policy), which has the policy cover all that the teacher does."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.coefficient and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a coefficient")
        return self


class CorrectionConfig(Section):
    """Off-policy correction of credit, by the importance ratio: the learner's probability of a token before the first
    update over the engine's. Open it when `gap/mean` is large or `max_lag` is above 0."""

    in_short_list = ()

    importance_sampling: Literal["off", "token", "sequence"] = "off"
    """Truncated importance sampling: off, by the ratio of each token, or by the product of ratios over a sequence."""
    importance_ratio_cap: float = Field(2.0, gt=0)
    """Larger ratios count as this one."""
    token_band: tuple[float, float] | None = None
    """Lowest and highest ratio of a token that trains; the default sets no bounds."""
    sequence_band: tuple[float, float] | None = None
    """Lowest and highest geometric mean of the ratios of a sequence that trains; the default sets no bounds."""
    scope: Literal["turn", "trajectory"] = "trajectory"
    """What a sequence is."""

    @property
    def active(self) -> bool:
        return self.importance_sampling != "off" or self.token_band is not None or self.sequence_band is not None

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if "importance_ratio_cap" in self.changed and self.importance_sampling == "off":
            raise ValueError('importance_ratio_cap is ignored with importance_sampling = "off"')
        if "scope" in self.changed and self.importance_sampling != "sequence" and self.sequence_band is None:
            raise ValueError('scope is ignored without importance_sampling = "sequence" or a sequence_band')
        for name in ("token_band", "sequence_band"):
            low, high = getattr(self, name) or (0.0, 1.0)
            if not 0.0 <= low < high:
                raise ValueError(f"{name} = [{low:g}, {high:g}]: write two bounds, 0 <= low < high")
        return self
