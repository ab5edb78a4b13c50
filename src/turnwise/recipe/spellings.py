"""Words that other libraries have for the keys and values of a recipe, and shorter ways to write ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KEYS = {
    "ac": "model.gradient_checkpointing",
    "adam_beta1": "optimizer.adamw.betas",
    "adam_beta2": "optimizer.adamw.betas",
    "adv_estimator": "credit.name",
    "advantage_estimator": "credit.name",
    "batch_size": "groups_per_step (groups of rollout.group_size attempts each)",
    "beta": "kl.coefficient",
    "bf16": 'model.dtype (= "bfloat16")',
    "checkpoint_interval": "checkpoints.every",
    "ckpt_interval": "checkpoints.every",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "cliprange": "loss.clip_low and loss.clip_high",
    "default_local_dir": "out",
    "entropy_coeff": "entropy",
    "entropy_loss_coef": "entropy",
    "eps_clip_high": "loss.clip_high",
    "eps_clip_low": "loss.clip_low",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "eval_interval": "evaluation.every",
    "eval_steps": "evaluation.every",
    "experiment_name": "out (the name of a run is that of its folder)",
    "gradient_accumulation_steps": "max_tokens_per_microbatch (which never changes the result)",
    "gradient_clip_val": "optimizer.adamw.clip_norm",
    "group_size": "rollout.group_size",
    "kl_coef": "kl.coefficient",
    "kl_loss_coef": "kl.coefficient",
    "learning_rate": "optimizer.learning_rate",
    "logger": "trackers",
    "logging_steps": "screen.attempts_every (metrics are logged at every step)",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "loss_agg_mode": "weighting.name",
    "loss_type": "loss.name",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup",
    "mask_truncated_completions": 'rollout.failures.on_truncation (= "mask")',
    "max_async_level": "max_lag",
    "max_completion_length": "rollout.max_action_tokens",
    "max_epochs": "steps (training is counted in steps)",
    "max_generate_length": "rollout.max_action_tokens",
    "max_grad_norm": "optimizer.adamw.clip_norm",
    "max_input_length": "rollout.max_prompt_tokens",
    "max_new_tokens": "rollout.max_action_tokens",
    "max_off_policy_steps": "max_lag",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_action_tokens",
    "max_seq_len": "rollout.max_trajectory_tokens",
    "max_staleness_steps": "max_lag",
    "max_steps": "steps",
    "max_tokens": "rollout.max_action_tokens",
    "max_turns": "rollout.max_turns",
    "micro_batch_size": "max_tokens_per_microbatch",
    "mini_batch_size": "groups_per_update",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_iterations": "epochs",
    "num_train_epochs": "steps (training is counted in steps)",
    "optim": "optimizer (AdamW)",
    "output_dir": "out",
    "per_device_train_batch_size": "groups_per_step (groups of rollout.group_size attempts each)",
    "policy_mini_batch_size": "groups_per_update",
    "ppo_epochs": "epochs",
    "ppo_max_token_len_per_gpu": "max_tokens_per_microbatch",
    "ppo_mini_batch_size": "groups_per_update",
    "project_name": "tracking.project",
    "report_to": "trackers",
    "resume_from_checkpoint": "no key: turnwise train --resume RUN",
    "resume_mode": "no key: turnwise train --resume RUN",
    "reward_funcs": "no key: the environment pays rewards (env.name)",
    "rollouts_per_example": "rollout.group_size",
    "save_freq": "checkpoints.every",
    "save_steps": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "scale_rewards": "credit.norm_by_std",
    "seq_len": "rollout.max_trajectory_tokens",
    "temperature": "sampling.temperature",
    "tensor_model_parallel_size": "engine.vllm.tensor_parallel_size",
    "test_freq": "evaluation.every",
    "tool_call_parser": "rollout.tools",
    "total_epochs": "steps (training is counted in steps)",
    "total_training_steps": "steps",
    "train_batch_size": "groups_per_step (groups of rollout.group_size attempts each)",
    "train_files": "env.data",
    "update_epochs_per_batch": "epochs",
    "use_kl_loss": "kl.coefficient (above 0 there is a penalty)",
    "use_vllm": 'engine.name (= "vllm")',
    "val_files": "env.heldout",
    "val_freq": "evaluation.every",
    "vllm_gpu_memory_utilization": "engine.vllm.gpu_memory_utilization",
    "wandb": 'trackers (= ["wandb"])',
    "warmup_ratio": "optimizer.warmup (in updates)",
    "warmup_steps": "optimizer.warmup",
    "weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.name": "engine.name",
    "ckpt.interval": "checkpoints.every",
    "critic.optim.lr": "critic.optimizer.learning_rate",
    "eval.interval": "evaluation.every",
    "generator.n_samples_per_prompt": "rollout.group_size",
    "model.name": "model.path",
    "trainer.epochs": "steps (training is counted in steps)",
    "trainer.policy.model.path": "model.path",
    "trainer.ref.model.path": "kl.reference",
    "wandb.project": "tracking.project",
}
"""What TRL, verl, SkyRL and prime-rl call our keys: a whole dotted name, or the last part of one. A new line begins
with our key; what else is to be known is in parentheses."""

DAPO = "DAPO is loss=ppo_clip loss.clip_high=0.28 filter=dynamic_sampling weighting=token_mean"
DR_GRPO = "Dr. GRPO is credit=grpo credit.norm_by_std=false weighting=constant"
VALUES = {
    "credit": {
        "dapo": DAPO,
        "dr_grpo": DR_GRPO,
        "drgrpo": DR_GRPO,
        "ppo": "the estimator of PPO is credit=gae",
        "reinforce++": "it is called credit=reinforce_pp here",
        "reinforce_plus_plus": "it is called credit=reinforce_pp here",
    },
    "loss": {
        "bnpo": "its weights are weighting=token_mean",
        "clip": "it is called loss=ppo_clip here",
        "dapo": DAPO,
        "dr_grpo": DR_GRPO,
        "grpo": "GRPO is credit=grpo loss=ppo_clip",
        "ppo": "it is called loss=ppo_clip here",
        "regular": "it is called loss=ppo_clip here",
        "rloo": "RLOO is credit=rloo loss=reinforce",
        "vanilla": "it is called loss=ppo_clip here",
    },
    "weighting": {
        "seq-mean-token-mean": "it is called weighting=trajectory_mean here",
        "seq-mean-token-sum-norm": "it is called weighting=constant here",
        "sequence_mean": "it is called weighting=trajectory_mean here",
        "token-mean": "it is called weighting=token_mean here",
    },
}
"""What other libraries choose by a name, by the table that has the name here."""

MAIN_KEYS = {"kl": "coefficient", "lora": "rank", "model": "path"}
"""Of tables without a name: the key that a single value given to the table is for."""


def our_names(location: Sequence[Any], value: Any) -> list[str]:
    """A phrase for the unknown key at a location, or for each key of the tables there, that another library has for
    one of ours; empty unless all of them are known."""
    found = []
    for path in leaves([str(part) for part in location], value):
        ours = KEYS.get(".".join(path)) or KEYS.get(path[-1])
        if ours is None:
            return []
        if ours.startswith("no key"):
            found.append(f"{'.'.join(path)} has {ours}")
            continue
        if path[0] in ("critic", "sft") and ours.startswith("optimizer."):  # which have optimizers of their own
            ours = f"{path[0]}.{ours}"
        found.append(f"{'.'.join(path)} is {ours} here")
    return found


def leaves(path: list[str], value: Any) -> Iterator[list[str]]:
    """The paths of all values below a key."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves([*path, str(name)], inner)
    else:
        yield path


def our_values(tree: Mapping[str, Any]) -> Iterator[str]:
    """A phrase for each name in a recipe that another library has for something that is here."""
    for table, words in VALUES.items():
        section = tree.get(table)
        value = section.get("name") if isinstance(section, Mapping) else None
        if isinstance(value, str) and value.lower() in words:
            yield f'{table}.name = "{value}" does not exist; {words[value.lower()]}'
