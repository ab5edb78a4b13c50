"""The engine that samples, and the check of its weights."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section
from turnwise.recipe.servers import ServersConfig


class VllmConfig(ServersConfig):
    """Settings of engine vllm alone. Open it when `engine.name` is vllm and the model does not fit, or vLLM servers run
    elsewhere; without servers vLLM is started in processes of the run."""

    in_short_list = ()

    transfer: Literal["file", "nccl", "ipc"] = "file"
    """How weights travel: file through memory or a disk, nccl to the GPUs of servers, ipc on the learner's GPU."""
    folder: str = ""
    """Folder for files of weights that the learner and vLLM both see; empty takes the machine's memory."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes where engine.memory.kv_cache = 0; the default leaves half to the
    learner."""
    enforce_eager: bool | Literal["auto"] = "auto"
    """Whether vLLM neither compiles the model nor captures graphs, for a quick start and slower sampling; auto does so
    on a CPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""

    sleep: bool = False
    """Whether vLLM gives the memory of its weights, keys and values to the learner on the same GPUs while that works
    (sleep level 2), and takes it again with the weights of every step. Only where sampling and learning take turns:
    max_lag = 0."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        of_the_server = {"gpu_memory_utilization", "enforce_eager", "tensor_parallel_size"}
        if self.servers and (ignored := of_the_server & set(self.changed)):
            raise ValueError(f"{min(ignored)} is a setting of the servers themselves; remove it, or remove servers")
        if self.transfer != "file" and self.folder:
            raise ValueError(f'folder is ignored with transfer = "{self.transfer}"')
        if self.servers and self.transfer == "ipc":
            raise ValueError('transfer = "ipc" shares memory of one GPU; use "nccl" or "file" with servers')
        if not self.servers and self.transfer == "nccl":
            raise ValueError('transfer = "nccl" goes to the GPUs of servers; without them use "ipc" or "file"')
        return self


class SglangConfig(ServersConfig):
    """Settings of engine sglang alone. Open it when `engine.name` is sglang, to name the servers. The engine was
    rehearsed against a played server, not run with SGLang itself."""

    in_short_list = ()

    folder: str = ""
    """Folder for weights that the learner and the servers both see; empty takes the machine's memory."""
    seeds: bool = True
    """Whether servers must sample by the seeds of calls, for which they need --enable-deterministic-inference; false
    takes servers that do not, and samples something else each time."""


class EngineMemoryConfig(Section):
    """How much memory the engine takes. Open it when sampling runs out of memory, or when long prompts are computed
    again and again."""

    in_short_list = ()

    max_model_len: int = Field(0, ge=0)
    """Longest prompt and action together, in tokens; 0 takes rollout.max_trajectory_tokens."""
    kv_cache: int = Field(0, ge=0)
    """MiB for keys and values, of requests under way and of prefixes that are shared; 0 takes 1024, or room for four
    texts of max_model_len if that is more. The least recently used prefix goes first."""
    keep_cache: bool = False
    """Whether keys and values that older weights computed are shared after new weights are loaded; false computes
    prefixes again after every step, which keeps logprobs exact."""
    max_num_batched_tokens: int = Field(2048, ge=2)
    """Tokens computed together: one of every request that samples, the rest of prompts."""


class EngineConfig(Section):
    """The engine, which samples actions."""

    name: Literal["slots", "vllm", "sglang"] = "slots"
    """slots is continuous batching in this process, with the learner's module; vllm is vLLM, with a copy of the
    weights; sglang is SGLang on servers (rehearsed against a played one, not run with SGLang itself)."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests decoded together; the others wait."""
    processes: int = Field(0, ge=0)
    """Processes of this machine that sample, each with a copy of the weights; one that dies is started again. 0 samples
    in the run's process."""
    memory: EngineMemoryConfig = EngineMemoryConfig()
    """How much memory the engine takes."""
    vllm: VllmConfig = VllmConfig()
    """Settings of engine vllm alone."""
    sglang: SglangConfig = SglangConfig()
    """Settings of engine sglang alone."""

    @property
    def remote(self) -> ServersConfig:
        """The table of the servers that sample; the one of vLLM, which names none, for an engine without."""
        return self.sglang if self.name == "sglang" else self.vllm

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the servers that sample; none where the run starts its engine."""
        return self.remote.servers

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.name != "slots" and self.processes:
            raise ValueError(f'processes is ignored with name = "{self.name}", which has processes of its own')
        for name, table in (("vllm", self.vllm), ("sglang", self.sglang)):
            if self.name != name and table.changed:
                raise ValueError(f'{name}.{table.changed[0]} is ignored with name = "{self.name}"')
        if self.name == "sglang" and not self.servers:
            raise ValueError('name = "sglang" samples on servers that run already; name them in sglang.servers')
        if self.vllm.sleep and self.memory.keep_cache:
            raise ValueError("memory.keep_cache is ignored with vllm.sleep, which keeps no keys and values")
        if self.memory.kv_cache and "gpu_memory_utilization" in self.vllm.changed:
            raise ValueError(f"vllm.gpu_memory_utilization is ignored with memory.kv_cache = {self.memory.kv_cache}")
        if self.servers and (ignored := {"kv_cache", "max_num_batched_tokens"} & set(self.memory.changed)):
            raise ValueError(
                f"memory.{min(ignored)} is a setting of the servers themselves; remove it, or remove "
                f"{self.name}.servers"
            )
        return self

    @model_validator(mode="after")
    def prompts_get_on(self) -> Self:
        if self.memory.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"memory.max_num_batched_tokens = {self.memory.max_num_batched_tokens} leaves no room for prompts "
                f"beside max_num_seqs = {self.max_num_seqs}"
            )
        return self


class WeightCheckConfig(Section):
    """How loads of new weights are checked, where the engine has a copy of the weights. Open it when a weight check has
    stopped a run, or when checks take long."""

    in_short_list = ()

    every: int = Field(0, ge=0)
    """Versions between checks; 0 checks as often as takes at most 2 % of the run's time. The first load is always
    checked, and the first after an engine was started again."""
    limit: float = Field(0.0, ge=0)
    """Largest mean difference between the engine's logprobs and the learner's, on tokens sampled for the check, before
    the run stops; 0 takes 1e-5 in float32, and in bfloat16 four times the difference at the start."""
