"""Keys and values of recipes as they were called once, and as they are called now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RENAMED = {
    "cluster.patience": "cluster.placement_seconds",
    "cluster.gpus": "model.device",
    "cluster.ranks": "cluster.fsdp",
    "correction.cap": "correction.importance_ratio_cap",
    "correction.truncate": "correction.importance_sampling",
    "critic.optimizer.betas": "critic.optimizer.adamw.betas",
    "critic.optimizer.clip_norm": "critic.optimizer.adamw.clip_norm",
    "dropped_limit": "guards.max_dropped_groups",
    "engine.cache": "engine.memory.kv_cache",
    "engine.context": "engine.memory.max_model_len",
    "engine.keep_cache": "engine.memory.keep_cache",
    "engine.kv_cache": "engine.memory.kv_cache",
    "engine.max_model_len": "engine.memory.max_model_len",
    "engine.max_num_batched_tokens": "engine.memory.max_num_batched_tokens",
    "engine.pass_tokens": "engine.memory.max_num_batched_tokens",
    "engine.slots": "engine.max_num_seqs",
    "engine.vllm.eager": "engine.vllm.enforce_eager",
    "engine.vllm.memory": "engine.vllm.gpu_memory_utilization",
    "engine.vllm.server": "engine.vllm.servers",
    "engine.vllm.tensor_parallel": "engine.vllm.tensor_parallel_size",
    "env.actors": "env.concurrency.actors",
    "env.agents_at_once": "env.concurrency.max_concurrent_agents",
    "env.isolated": "env.isolation.enabled",
    "env.max_concurrent_agents": "env.concurrency.max_concurrent_agents",
    "env.max_open": "env.concurrency.max_open",
    "env.memory": "env.isolation.memory",
    "env.variables": "env.isolation.variables",
    "evaluation.overlap": "schedule.overlap_evaluations",
    "evaluation.temperature": "evaluation.sampling.temperature",
    "evaluation.top_k": "evaluation.sampling.top_k",
    "evaluation.top_p": "evaluation.sampling.top_p",
    "gap_limit": "guards.max_logprob_gap",
    "kl.place": "kl.apply_to",
    "model.checkpointing": "model.gradient_checkpointing",
    "nonfinite_limit": "guards.max_nonfinite_updates",
    "optimizer.betas": "optimizer.adamw.betas",
    "optimizer.clip_norm": "optimizer.adamw.clip_norm",
    "order": "schedule.order",
    "patience": "schedule.stall_warning_seconds",
    "rollout.attempt_seconds": "rollout.limits.attempt_seconds",
    "rollout.attempts": "rollout.group_size",
    "rollout.blocked_seconds": "rollout.limits.blocked_seconds",
    "rollout.max_observation_bytes": "rollout.limits.max_observation_bytes",
    "rollout.min_attempts": "rollout.failures.min_attempts",
    "rollout.on_failure": "rollout.failures.on_failure",
    "rollout.retries": "rollout.failures.retries",
    "rollout.success_at": "rollout.success_threshold",
    "rollout.truncated": "rollout.failures.on_truncation",
    "rollout.trust_text": "rollout.rendering.trust_text",
    "rollout.turn_seconds": "rollout.limits.call_seconds",
    "runs.archive_steps": "archive.steps",
    "runs.checkpoint_every": "checkpoints.every",
    "runs.checkpoints": "checkpoints.keep",
    "runs.evaluations": "archive.evaluations",
    "runs.project": "tracking.project",
    "runs.trackers": "trackers",
    "sft.optimizer.betas": "sft.optimizer.adamw.betas",
    "sft.optimizer.clip_norm": "sft.optimizer.adamw.clip_norm",
    "stale": "schedule.stale",
    "stall_warning_seconds": "schedule.stall_warning_seconds",
    "sync": "weight_check",
    "tokens_per_pass": "max_tokens_per_microbatch",
}
"""Keys, without the number of an entry of env."""

RENAMED_VALUES = {("filter", "name"): {"zero_variance": "dynamic_sampling"}}
"""Values, by the path of their key."""


def new_names(location: Sequence[Any], value: Any) -> list[str]:
    """A phrase for the unknown key at a location, or for each key of the table there, that is called otherwise now."""
    key = ".".join(str(part) for part in location)
    plain = ".".join(str(part) for part in location if not isinstance(part, int))
    if plain in RENAMED:
        return [f"{key} is called {RENAMED[plain]} now"]
    below = value if isinstance(value, Mapping) else {}
    known = [name for name in below if f"{plain}.{name}" in RENAMED]
    return [f"{key}.{name} is called {RENAMED[f'{plain}.{name}']} now" for name in known]


def new_values(tree: Mapping[str, Any]) -> Iterator[str]:
    """A phrase for each value in a recipe that is called otherwise now."""
    for (table, key), renamed in RENAMED_VALUES.items():
        section = tree.get(table)
        value = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(value, str) and value in renamed:
            yield f'{table}.{key} = "{value}" is called "{renamed[value]}" now'
