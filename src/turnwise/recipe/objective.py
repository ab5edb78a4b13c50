"""What is added to the policy loss, and how credit is corrected."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.recipe.section import Section


class KlConfig(Section):
    """How the policy is kept near a reference."""

    coefficient: float = Field(0.0, ge=0)
    """How strongly; 0 for not at all."""
    apply_to: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a charge of k1, the log ratio, on every token's reward."""
    divergence: Literal["k2", "k3"] = "k3"
    """Estimate in the loss. k2 has the divergence's own gradient; k3 is never negative and has the gradient of the
    divergence the other way round."""
    reference: str = "start"
    """A folder that transformers can load, or "start": the policy as it is before the first step."""

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
    """A term of the loss that draws the policy's whole distribution at every action token to the teacher's."""

    coefficient: float = Field(0.0, ge=0)
    """How strongly; 0 for not at all."""
    top_k: int = Field(16, ge=1)
    """How many of the teacher's likeliest tokens are compared one by one; all others are compared as one."""
    direction: Literal["reverse", "forward"] = "reverse"
    """reverse is the KL divergence from policy to teacher, which keeps the policy to what the teacher would do; forward
    is that from teacher to policy, which has it do all of that."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.coefficient and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a coefficient")
        return self


class CorrectionConfig(Section):
    """Credit corrected for the gap between the engine that sampled and the learner that trains, by the ratio of the
    learner's logprobs before the first update to the engine's."""

    truncate: Literal["off", "token", "sequence"] = "off"
    """Importance weights: none, each token's own ratio, or the product over a sequence."""
    cap: float = Field(2.0, gt=0)
    """Ratios count at most this."""
    token_band: tuple[float, float] | None = None
    """Tokens with a ratio outside do not train."""
    sequence_band: tuple[float, float] | None = None
    """Sequences with a geometric mean ratio outside do not train."""
    scope: Literal["turn", "trajectory"] = "trajectory"
    """What a sequence is."""

    @property
    def active(self) -> bool:
        return self.truncate != "off" or self.token_band is not None or self.sequence_band is not None

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if "cap" in self.changed and self.truncate == "off":
            raise ValueError('cap is ignored with truncate = "off"')
        if "scope" in self.changed and self.truncate != "sequence" and self.sequence_band is None:
            raise ValueError('scope is ignored without truncate = "sequence" or a sequence_band')
        for name in ("token_band", "sequence_band"):
            low, high = getattr(self, name) or (0.0, 1.0)
            if not 0.0 <= low < high:
                raise ValueError(f"{name} = [{low:g}, {high:g}]: write two bounds, 0 <= low < high")
        return self
