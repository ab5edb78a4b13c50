"""The model card of a checkpoint: figures before and after, the curve, the recipe, versions, and how to evaluate it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.data.hub import HubName

KINDS = ("sampled", "greedy")
CURVE, RECIPE = "curve.png", "recipe.toml"

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the page of a model says.

    Example:
        ModelCard("org/name", 40, ("hops",), metrics, recipe, machine, HubName("Qwen/Qwen3-0.6B", "c1899d..."), True)
    """

    repo: str
    step: int
    datasets: tuple[str, ...]
    metrics: Sequence[Metrics]
    """The lines of the run's metrics up to the step."""
    recipe: str
    """As TOML."""
    machine: Mapping[str, Any]
    """What the run was computed on and with."""
    base: HubName | None
    """The model that training started from, where it is one of the Hub."""
    is_adapter: bool
    """Whether only adapters are pushed, which need the base."""

    @property
    def text(self) -> str:
        parts = (self.head, self.about, self.figures, self.pictures, self.use, self.origin)
        return "\n".join(line for part in parts for line in part()) + "\n"

    def head(self) -> Iterator[str]:
        """What the Hub reads."""
        yield "---"
        yield f"library_name: {'peft' if self.is_adapter else 'transformers'}"
        yield "pipeline_tag: text-generation"
        if self.base is not None:
            yield f"base_model: {self.base.repo}"
            yield f"base_model_relation: {'adapter' if self.is_adapter else 'finetune'}"
        yield "tags:"
        yield from (f"- {tag}" for tag in ("turnwise", "reinforcement-learning", "agent"))
        yield "---"
        yield ""

    def about(self) -> Iterator[str]:
        yield f"# {self.repo.rpartition('/')[2]}"
        yield ""
        what = "LoRA adapters" if self.is_adapter else "A language model"
        base = f" of `{self.base}`" if self.is_adapter else f" that started from `{self.base}`"
        trained = ", ".join(f"`{name}`" for name in self.datasets)
        yield (
            f"{what}{base if self.base is not None else ''}, trained with turnwise by reinforcement learning, as an "
            f"agent in {trained}; the weights after step {self.step}."
        )
        yield ""

    def figures(self) -> Iterator[str]:
        """Held-out success before training and of these weights."""
        yield "## Held-out success"
        yield ""
        before, after = (dict(evaluated(self.metrics, version)) for version in (0, self.step))
        if not after:
            yield f"The weights of step {self.step} were not evaluated; see below how to do it."
            yield ""
        rows = [
            (kind, name, found[kind])
            for kind in KINDS
            for name, found in (("before", before), ("after", after))
            if kind in found
        ]
        if not rows:
            return
        yield "| sampling | training | success | 95 % interval | tasks | attempts |"
        yield "|---|---|---|---|---|---|"
        for kind, name, line in rows:
            low, high = (shown(line.get(f"success_{end}", math.nan)) for end in ("low", "high"))
            tasks, attempts = (f"{line.get(key, math.nan):g}" for key in ("tasks", "attempts"))
            yield f"| {kind} | {name} | {shown(line['success'])} | {low} to {high} | {tasks} | {attempts} |"
        yield ""
        yield "Held-out tasks are not trained on. An attempt that failed has not succeeded."
        yield ""

    def pictures(self) -> Iterator[str]:
        yield f"![success while training and on held-out tasks]({CURVE})"
        yield ""

    def use(self) -> Iterator[str]:
        yield "## Use"
        yield ""
        yield "~~~bash"
        yield f"hf download {self.repo} {RECIPE} --local-dir ."
        yield f"turnwise eval {self.repo} --recipe {RECIPE}"
        yield f"turnwise serve {self.repo}"
        yield "~~~"
        yield ""

    def origin(self) -> Iterator[str]:
        yield "## Recipe"
        yield ""
        yield f"What is not at its default ([{RECIPE}]({RECIPE})); keys of the machine are left out."
        yield ""
        yield "~~~toml"
        yield self.recipe.rstrip("\n")
        yield "~~~"
        yield ""
        yield "## Versions"
        yield ""
        packages = self.machine.get("packages")
        named = {name: self.machine.get(name) for name in ("turnwise", "commit", "python")}
        versions = {**named, **(packages if isinstance(packages, dict) else {})}
        yield ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        places = [*(self.machine.get("gpus") or []), self.machine.get("cpu")]
        if computed := [str(place) for place in places if place]:
            yield ""
            yield f"Computed on: {', '.join(computed)}"


def evaluated(metrics: Sequence[Metrics], version: int) -> Iterator[tuple[str, Metrics]]:
    """(kind, figures) of the evaluations of a version; of two of a kind the later, which is the larger, counts."""
    for line in metrics:
        for kind in KINDS:
            prefix = f"eval/{kind}/"
            found = {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}
            if "success" in found and found.get("version", line["step"]) == version:
                yield kind, found


def shown(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def adapter_settings(text: str, base: HubName) -> str:
    """The settings of adapters with the model that they are for named by its commit, as peft reads them."""
    settings = {**json.loads(text), "base_model_name_or_path": base.repo, "revision": base.revision}
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
