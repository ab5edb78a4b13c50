"""A vLLM that the run starts: its AsyncLLM in this process, its forward passes in a child."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.engines.vllm.guided import BACKEND as BACKEND_OF_GRAMMARS
from turnwise.engines.vllm.service import Span, VllmAnswer, VllmCall
from turnwise.types import TurnTiming
from turnwise.weights.shared_memory import shared_memory_folder
from turnwise.weights.vllm_file import BACKEND

MIB = 1 << 20
DEFAULT_CACHE = 1024
"""MiB on a CPU, where vLLM would take most of the memory."""
BLOCK = 32
"""Tokens per block of the cache on a CPU, and so the least that two calls can share; vLLM's own choice is 128."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of a vLLM that the run starts.

    Example:
        LocalSettings(slots=64, dtype="float32", device="cpu", threads=1)
    """

    slots: int
    """Calls computed together."""
    dtype: str
    device: str
    """cpu or cuda."""
    threads: int
    """On a CPU."""
    cache: int = 0
    """MiB of keys and values; 0 for 1024 on a CPU and for what `memory` leaves on a GPU."""
    pass_tokens: int = 2048
    """Tokens per pass."""
    memory: float = 0.5
    """Share of a GPU."""
    eager: bool = True
    """Whether the model is neither compiled nor captured as graphs."""
    tensor_parallel: int = 1
    transfer: str = "file"
    routes: bool = False
    """Whether calls ask for routes."""
    sleep: bool = False
    """Whether it gives its memory away now and then; on a CPU vLLM goes through the motions."""


class LocalVllm:
    """`VllmService` that starts a vLLM on a model that `save` writes into a folder."""

    guidance_problem = ""

    def __init__(self, save: Callable[[Path], None], settings: LocalSettings) -> None:
        self.save = save
        self.settings = settings
        self.llm: Any = None
        self.folder: Any = None

    async def start(self, context: int) -> None:
        if self.llm is None:
            self.create(context)
        # vLLM reports that it is ready shortly before it reads the folder for the last time.
        await self.alive(self.llm.get_weight_version())
        self.folder.cleanup()

    def create(self, context: int) -> None:
        """Start vLLM's process; blocks until it is ready."""
        self.folder = tempfile.TemporaryDirectory(prefix="turnwise-", dir=shared_memory_folder())
        self.save(Path(self.folder.name))
        with environment(vllm_variables(self.settings)):
            from vllm.config import StructuredOutputsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.executor import Executor

            guided = StructuredOutputsConfig(backend=BACKEND_OF_GRAMMARS)
            settings = engine_arguments(self.settings, context)
            arguments = AsyncEngineArgs(model=self.folder.name, structured_outputs_config=guided, **settings)
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            with environment(child_variables(self.settings)):
                self.llm = AsyncLLM(
                    config,
                    Executor.get_class(config),
                    log_stats=False,
                    log_requests=False,
                    stat_loggers=[silent_logger()],  # that there is one has vLLM measure each request
                )

    async def alive(self, answer: Awaitable[Any]) -> Any:
        """The answer of vLLM's process, or a RuntimeError where it died: vLLM itself would wait for ever."""
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({waiting}, timeout=1.0))[0]:
                await self.check_alive()
            return waiting.result()
        finally:
            waiting.cancel()

    async def check_alive(self) -> None:
        if self.llm is None or self.llm.errored:
            raise RuntimeError("its process has ended; what it said last is above")

    async def generate(self, call: VllmCall) -> VllmAnswer:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        prompt = tokens_input(call.prompt.tolist(), cache_salt=call.salt)
        given: dict[str, Any] = dict(call.sampling)
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        sampling = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
        last: Any = None
        async for update in self.llm.generate(prompt, sampling, call.name, session_id=call.session):
            last = update
        [output] = last.outputs
        logprobs = output.logprobs
        return VllmAnswer(
            tokens=list(output.token_ids),
            logprobs=[logprobs.logprobs[index] for index in logprobs.start_indices] if logprobs else [],
            spans=[Span(span.version, span.start, span.end) for span in output.weight_versions or ()],
            finish=output.finish_reason,
            stop=output.stop_reason,
            timing=timing_of(last.metrics),
            routes=output.routed_experts,
        )

    async def abort(self, name: str) -> None:
        await self.llm.abort(name)

    async def pause(self) -> None:
        await self.alive(self.llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await self.alive(self.llm.resume_generation())

    async def sleep(self, level: int) -> None:
        await self.alive(self.llm.sleep(level))

    async def wake(self, part: str) -> None:
        await self.alive(self.llm.wake_up([part]))

    async def name_version(self, version: str) -> None:
        await self.alive(self.llm.update_weight_version(version))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.alive(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def start_update(self) -> None:
        await self.alive(self.llm.start_weight_update())

    async def update(self, info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.alive(self.llm.update_weights(WeightTransferUpdateRequest(info)))

    async def finish_update(self, version: str) -> None:
        await self.alive(self.llm.finish_weight_update(version))

    async def num_workers(self) -> int:
        return int(self.llm.vllm_config.parallel_config.world_size_across_dp)

    async def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)


def engine_arguments(settings: LocalSettings, context: int) -> dict[str, Any]:
    """vLLM's engine arguments."""
    arguments = {
        "max_model_len": context,
        "dtype": settings.dtype,
        "max_num_seqs": settings.slots,
        "max_num_batched_tokens": settings.pass_tokens,
        "enforce_eager": settings.eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # those of the distribution sampled from
        "generation_config": "vllm",  # and not the model folder's own, which may have a top-p
        "seed": 0,
        "tensor_parallel_size": settings.tensor_parallel,
        "weight_transfer_config": {"backend": BACKEND if settings.transfer == "file" else settings.transfer},
        "worker_extension_cls": "turnwise.engines.vllm.worker.Extension",
    }
    cache = settings.cache or (DEFAULT_CACHE if settings.device == "cpu" else 0)
    arguments |= {"kv_cache_memory_bytes": cache * MIB} if cache else {"gpu_memory_utilization": settings.memory}
    if settings.routes:
        arguments["enable_return_routed_experts"] = True
    if settings.sleep and settings.device != "cpu":
        arguments["enable_sleep_mode"] = True
    if settings.tensor_parallel == 1:
        arguments["distributed_executor_backend"] = "uni"
    if settings.device == "cpu":
        # Chunked prefill would rewind the noise of a request, which generators on a CPU cannot do.
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(settings.pass_tokens, context)}
        arguments |= {"block_size": BLOCK, **whole}
    return arguments


def vllm_variables(settings: LocalSettings) -> dict[str, str]:
    """Environment variables that vLLM reads when it is imported and when it starts processes; values that the user has
    set win."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit the learner's threads, and hang
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.transfer == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a handle to memory of a GPU travels as a pickle
    if settings.routes:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that gives routes
    if settings.device == "cpu":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the learner computes on the same cores
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process and not two; AsyncLLM has at least that
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def child_variables(settings: LocalSettings) -> dict[str, str]:
    """Variables for vLLM's processes that would do harm in this one."""
    if settings.device != "cpu":
        return {}
    # No compiler: the first call would wait for it, and it would compile two small functions only.
    return {"OMP_NUM_THREADS": str(settings.threads), **({"TORCHDYNAMO_DISABLE": "1"} if settings.eager else {})}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def timing_of(metrics: Any) -> TurnTiming:
    if metrics is None or not metrics.first_token_ts:
        return TurnTiming()
    return TurnTiming(
        queued=max(0.0, metrics.scheduled_ts - metrics.queued_ts),
        prefill=max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
        decode=max(0.0, metrics.last_token_ts - metrics.first_token_ts),
    )


def silent_logger() -> Any:
    """A logger of vLLM's statistics that logs nothing."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Silent(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            return None

        def record(self, *arguments: Any, **named: Any) -> None:
            return None

        def log_engine_initialized(self) -> None:
            return None

    return Silent
