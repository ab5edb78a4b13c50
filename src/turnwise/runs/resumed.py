"""What may change in the recipe of a run that goes on, and how its folder records it.

All that the state of a run depends on stays: weights and optimizer were trained by it, and groups that wait were made
by it. What is listed here changes how long, where and how quickly a run goes on, and what it records. So a new key
stays until somebody says why it may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.atomic import write_atomically
from turnwise.recipe.schema import Recipe
from turnwise.runs.checksums import NAME as CHECKSUMS
from turnwise.runs.checksums import checksum_line
from turnwise.runs.folder import RunFolder
from turnwise.runs.trust import stamp_where_asked

LENGTH = "says how long the run is"
RECORDS = "says what is recorded, and where"
PLACE = "says where or how quickly things happen, not what"
GUARD = "says when a run warns, waits or stops"

MAY_CHANGE: Mapping[str, str] = {
    "steps": LENGTH,
    "layout": PLACE,
    "max_tokens_per_microbatch": PLACE,
    "trackers": RECORDS,
    "tracking": RECORDS,
    "model.device": PLACE,
    "model.threads": PLACE,
    "model.gradient_checkpointing": PLACE,
    "env.batching": PLACE,
    "env.concurrency": PLACE,
    "env.isolation.memory": GUARD,
    "endpoint": PLACE,
    "rollout.limits.call_seconds": GUARD,
    "rollout.limits.attempt_seconds": GUARD,
    "rollout.limits.blocked_seconds": GUARD,
    "rollout.failures.retries": GUARD,
    "engine.name": PLACE,
    "engine.max_num_seqs": PLACE,
    "engine.processes": PLACE,
    "engine.memory.max_model_len": PLACE,
    "engine.memory.kv_cache": PLACE,
    "engine.memory.max_num_batched_tokens": PLACE,
    "engine.vllm": PLACE,
    "engine.sglang": PLACE,
    "weight_check": GUARD,
    "schedule.overlap_evaluations": RECORDS,
    "schedule.stall_warning_seconds": GUARD,
    "guards": GUARD,
    "evaluation": RECORDS,
    "checkpoints": RECORDS,
    "archive": RECORDS,
    "screen": RECORDS,
    "cluster": PLACE,
}
"""By key of the recipe, with all that is below it: why it may change on a resume."""

WHY_NOT: Mapping[str, str] = {
    "out": "the folder is the run; move the folder, and resume it there",
    "seed": "tasks and samples so far were drawn by it",
    "max_lag": "groups that wait in the checkpoint were made for it",
    "schedule": "groups that wait in the checkpoint were made for it",
    "groups_per_step": "steps so far were counted by it",
    "model": "the checkpoint has the weights",
    "lora": "the checkpoint has adapters of this kind",
    "env": "attempts before and after would not be comparable",
    "rollout": "attempts before and after would not be comparable",
    "sampling": "recorded logprobs are those at this temperature",
    "sft": "the warm start is made already",
    "engine": "recorded logprobs were computed with it",
}
"""By table: why all else in it stays."""
ELSEWHERE = (
    "; to change it, start a new run from a checkpoint: turnwise train RECIPE model=RUN/checkpoints/step-NNNNNN "
    "sft.updates=0"
)
TRAINED = "the weights and the optimizer of the checkpoint were trained with it"


def changes(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """(value before, value after) of each key that two recipes say differently, without the number of an entry."""
    left, right = (dict(values(recipe.model_dump(mode="json"))) for recipe in (before, after))
    return {
        key: (left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    }


def values(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a recipe by its dotted key; those of an environment have its number."""
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and name.rpartition(".")[2] not in ("settings", "tasks"):
            yield from values(value, f"{name}.")
        elif name == "env":
            for number, entry in enumerate(value):
                yield from values(entry, f"env.{number}.")
        else:
            yield name, value


def check_changes(before: Recipe, after: Recipe, made: int) -> None:
    """Refuse what would make a run that has made some steps another one."""
    for key, (_, value) in changes(before, after).items():
        plain = ".".join(part for part in key.split(".") if not part.isdigit())
        if not is_listed(plain, MAY_CHANGE):
            reason = WHY_NOT.get(plain) or WHY_NOT.get(plain.partition(".")[0], TRAINED)
            raise ValueError(f"{key} cannot change on a resume: {reason}{'' if plain == 'out' else ELSEWHERE}")
        if key == "steps" and value < made:
            raise ValueError(f"steps={value} is fewer than the {made} steps that the run has made; give more")


def is_listed(key: str, names: Mapping[str, str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def record_changes(folder: RunFolder, before: Recipe, after: Recipe, step: int) -> list[str]:
    """Write the recipe that holds from `step` on into config.json, and what was there before into changes.jsonl.
    Returns a phrase for each change."""
    if not (found := changes(before, after)):
        return []
    lines = folder.changes.read_text(encoding="utf-8") if folder.changes.exists() else ""
    lines += json.dumps({"step": step, "changes": {key: list(pair) for key, pair in found.items()}}) + "\n"
    text = json.dumps(after.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    stamp = stamp_where_asked(after, text.encode())
    # The checksum goes first and comes last: a kill in between leaves a config.json that is not proven, and no damage.
    (folder.path / CHECKSUMS).unlink(missing_ok=True)
    write_atomically(folder.changes, lines)
    if stamp is not None:
        write_atomically(folder.stamp, stamp + "\n")
    write_atomically(folder.config, text)
    write_atomically(folder.path / CHECKSUMS, checksum_line(text.encode(), folder.config.name))
    phrases = [f"{key} = {json.dumps(now)}, which was {json.dumps(was)}" for key, (was, now) in found.items()]
    if "steps" in found and after.optimizer.schedule != "constant":
        phrases.append(
            f"optimizer.schedule = {after.optimizer.schedule} falls to zero at the new last step, so the learning rate "
            "is that of a run of the new length"
        )
    return phrases
