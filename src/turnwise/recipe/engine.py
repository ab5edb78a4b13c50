"""The engine that samples, and the check of its weights."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class VllmConfig(Section):
    """What engine vllm needs beside the settings that it shares with others."""

    server: str = ""
    """URL of a vLLM server that runs already; empty starts a vLLM in processes of its own."""
    transfer: Literal["file", "nccl", "ipc"] = "file"
    """How weights get there: file through memory or a disk; nccl to GPUs of a server; ipc on the learner's own GPU."""
    folder: str = ""
    """Where files of weights pass through, and both sides can see; empty takes the machine's memory."""
    memory: float = Field(0.5, gt=0, le=1)
    """Share of a GPU that vLLM takes, where engine.kv_cache = 0."""
    eager: bool | Literal["auto"] = "auto"
    """Neither compile the model nor capture graphs: a quick start and slower sampling; auto does so on a CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.server and (ignored := {"memory", "eager", "tensor_parallel"} & set(self.changed)):
            raise ValueError(f"{min(ignored)} is a setting of the server itself; remove it, or remove server")
        if self.transfer != "file" and self.folder:
            raise ValueError(f'folder is ignored with transfer = "{self.transfer}"')
        if self.server and self.transfer == "ipc":
            raise ValueError('transfer = "ipc" shares memory of one GPU; use "nccl" or "file" with a server')
        if not self.server and self.transfer == "nccl":
            raise ValueError('transfer = "nccl" goes to the GPUs of a server; without one use "ipc" or "file"')
        return self


class EngineConfig(Section):
    """What samples actions."""

    name: Literal["slots", "vllm"] = "slots"
    """slots: in-process continuous batching on the learner's own module; vllm: vLLM, with weights of its own."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests decoded together; the others wait."""
    max_model_len: int = Field(0, ge=0)
    """Tokens that prompt and action may have together; 0 takes max_trajectory_tokens."""
    kv_cache: int = Field(0, ge=0)
    """MiB of keys and values, those of requests under way and those kept to be shared; 0 takes 1024, or four contexts
    if that is more. What was used longest ago goes first."""
    keep_cache: bool = False
    """Share keys and values that older weights computed, where false computes prefixes anew after every step."""
    processes: int = Field(0, ge=0)
    """Processes of this machine that sample, each with a copy of the weights; one that dies is started again. 0 samples
    in the run's own process."""
    max_num_batched_tokens: int = Field(2048, ge=2)
    """Tokens computed together: one of every request that samples, the rest of prompts."""
    vllm: VllmConfig = VllmConfig()
    """What engine vllm needs beside these."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.name == "vllm" and self.processes:
            raise ValueError('processes is ignored with name = "vllm", which has processes of its own')
        if self.name != "vllm" and self.vllm.changed:
            raise ValueError(f'vllm.{self.vllm.changed[0]} is ignored with name = "{self.name}"')
        if self.kv_cache and "memory" in self.vllm.changed:
            raise ValueError(f"vllm.memory is ignored with kv_cache = {self.kv_cache}")
        if self.vllm.server and (ignored := {"kv_cache", "max_num_batched_tokens"} & set(self.changed)):
            raise ValueError(f"{min(ignored)} is a setting of the server itself; remove it, or remove vllm.server")
        return self

    @model_validator(mode="after")
    def prompts_get_on(self) -> Self:
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} leaves no room for prompts beside "
                f"max_num_seqs = {self.max_num_seqs}"
            )
        return self


class WeightCheckConfig(Section):
    """How loads of new weights are checked, where the engine has weights of its own."""

    every: int = Field(1, ge=1)
    """Versions between checks."""
    limit: float = Field(0.0, ge=0)
    """Mean difference between the engine's logprobs and the learner's, on tokens sampled for the check, at which the
    run stops; 0 takes 1e-5 in float32, and in bfloat16 four times what is found at the start."""
