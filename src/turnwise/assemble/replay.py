"""From a recorded run to a run that trains on its groups again: the same loop, with nothing that samples.

The recorded logprobs stand for those of an engine. With the recipe and the first weights of the recorded run, every
step is the recorded one bit for bit. With others the training is off-policy, as far as the weights are apart from those
that sampled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from turnwise.assemble.engines import engine_of_nobody
from turnwise.assemble.learner import layout_of, open_learner, placed, tokens_per_pass
from turnwise.assemble.model import check_group, renderer_of
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import Plans, resuming, settings_of, stages_of, training
from turnwise.engines.base import vocabulary_of
from turnwise.learn.policy import load_tokenizer
from turnwise.pretrained import ChatTokenizer
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs.checkpoint import Checkpoint, latest_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.runs.origin import REPLAY, Origin
from turnwise.runs.recorded_archive import RecordedArchive, names_of_steps
from turnwise.runs.screen import Screen
from turnwise.runs.trust import Trust
from turnwise.schedule.recorded import RecordedGroups
from turnwise.schedule.workers import Workers, in_own_thread, inline
from turnwise.training.loop import LoopParts
from turnwise.training.run import Run, RunParts

NEEDS_ENGINE = ("engine", "weight_check", "evaluation", "endpoint", "schedule.overlap_evaluations")
"""Tables and keys that say how to sample or evaluate. A replay does neither."""
ALREADY_MADE = ("env", "rollout", "schedule.max_rest", "guards.max_logprob_gap")
"""Tables and keys that say how attempts are made and paid, which is recorded."""
COUNTED = ("rollout.failures", "rollout.success_threshold")
"""Keys of those that a replay reads."""


@asynccontextmanager
async def replaying(
    recipe: Recipe, source: RecordedArchive, screen: Screen, stop: asyncio.Event, workers: Workers = in_own_thread
) -> AsyncIterator[Run]:
    """A new run in its folder that trains on the groups of another."""
    check_replay(recipe, source)
    for line in limits_of(recipe, source):
        screen.say(f"replay: {line}")
    recipe, origin = without_evaluation(recipe), Origin.of(REPLAY, source).text
    async with training(recipe, screen, stop, workers, partial(replay_parts, source), origin) as run:
        yield run


@asynccontextmanager
async def resuming_replay(
    path: Path,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    overrides: Sequence[str] = (),
    trust: Trust = "ask",
) -> AsyncIterator[Run]:
    """A replay as its last checkpoint left it."""
    refuse_ignored(overrides)
    origin = Origin.read(RunFolder.open(path))
    if origin.kind != REPLAY:
        raise ValueError(f"{path} has groups of {origin.run} with other rewards and never trained; see --from")
    async with resuming(path, screen, stop, workers, overrides, trust, partial(replay_parts, origin.reopen())) as run:
        yield run


# ---------------------------------------------------------------- what can be replayed


def check_replay(recipe: Recipe, source: RecordedArchive) -> None:
    """Refuse what would make the recorded logprobs or rewards mean something else than they do."""
    recorded = parse_recipe(source.folder.read_config(), str(source.folder.config), is_recorded=True)
    if recipe.sampling.temperature != recorded.sampling.temperature:
        raise ValueError(
            f"sampling.temperature = {recipe.sampling.temperature:g}, and the recorded logprobs are those at "
            f"{recorded.sampling.temperature:g}; set it to that"
        )
    failure = recorded.rollout.failures.on_failure
    if failure.name != "drop" and recipe.rollout.failures.on_failure != failure:
        raise ValueError(
            f'rollout.failures.on_failure differs from the recorded "{failure.name}", which has paid the failed '
            "attempts already; set it to that of the recorded run"
        )
    if recipe.cluster.on_ray:
        raise ValueError('a replay has no engine to place on a Ray cluster; set cluster.placement = "local"')


def refuse_ignored(overrides: Sequence[str]) -> None:
    """Refuse overrides of what samples and evaluates, and of what was settled when the attempts were made."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if is_below(key, ALREADY_MADE) and not is_below(key, COUNTED):
            raise ValueError(
                f"{override} would be ignored: the attempts are made and paid already; remove it, or pay them anew "
                'with "turnwise rescore"'
            )
        if is_below(key, NEEDS_ENGINE):
            raise ValueError(
                f"{override} would be ignored: a replay has no engine, samples nothing and evaluates nothing; remove "
                'it, and evaluate the result with "turnwise eval"'
            )


def is_below(key: str, tables: Sequence[str]) -> bool:
    """Whether a key is one of these or in one of these tables."""
    return any(f"{key}.".startswith(f"{table}.") for table in tables)


def limits_of(recipe: Recipe, source: RecordedArchive) -> list[str]:
    """What a person has to know of a replay before it begins."""
    steps = source.steps
    lines = [f"trains on {names_of_steps(steps)} of {source.folder.path}; no engine, so nothing is evaluated"]
    if steps[0] > 1:
        lines.append(f"the archive begins with step {steps[0]}, which trained other weights than a start has")
    if source.missing:
        lines.append(f"not in the archive, and left out: {', '.join(f'step {step}' for step in source.missing)}")
    if recipe.steps > len(steps):
        lines.append(f"{len(steps)} steps are recorded, and steps = {recipe.steps}: it stops when they are used up")
    return lines


def without_evaluation(recipe: Recipe) -> Recipe:
    """The recipe with no evaluation during training, which its own config.json can be read back as."""
    tree = recipe.model_dump(mode="json")
    tree["evaluation"]["every"], tree["schedule"]["overlap_evaluations"] = 0, False
    return parse_recipe(tree, "replay")


def check_tokenizer(source: RecordedArchive, tokenizer: ChatTokenizer) -> None:
    """Refuse tokens that mean something else to the model, where the recorded run has a checkpoint to tell."""
    latest = latest_checkpoint(source.folder.checkpoints)
    if latest is not None and load_tokenizer(latest.path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the model has another vocabulary than that of {source.folder.path}; start from one with the same, for "
            f"instance \"model={{path='{latest.path}'}}\" sft.updates=0"
        )


# ---------------------------------------------------------------- parts


@asynccontextmanager
async def replay_parts(
    source: RecordedArchive,
    recipe: Recipe,
    environments: Environments,
    start: ModelSource,
    evaluations: Path,
    checkpoint: Checkpoint | None = None,
    beginning: Path | None = None,
    workers: Workers = in_own_thread,
) -> AsyncIterator[RunParts]:
    """The parts of a replay, as `run_parts` has those of a run: recorded groups in the place of sampled ones."""
    model, tokenizer = start.model, start.tokenizer
    check_tokenizer(source, tokenizer)
    renderer = renderer_of(recipe, model, tokenizer)
    groups = RecordedGroups(source, partial(check_group, recipe, renderer, vocabulary_of(model)))
    with placed(recipe) as site, closing(open_learner(recipe, start, beginning, site)) as learner:
        if checkpoint is not None:
            learner.restore(checkpoint.path)
        run = workers("learner") if recipe.max_lag else inline
        lay_out = layout_of(recipe, model)
        plan: Plans = lambda turns: lay_out(turns, tokens_per_pass(recipe))
        loop = LoopParts(
            # Other weights than those that sampled are no mistake here.
            settings=replace(settings_of(recipe), max_logprob_gap=math.inf),
            stages=stages_of(recipe, groups.make_group, plan, run),
            learner=learner,
            engine=engine_of_nobody(renderer),
            tasks=groups,
        )
        yield RunParts(
            loop=loop, evaluator=None, environments=environments, tokenizer=tokenizer, save=workers("checkpoint")
        )
