"""From a recipe to the engine that samples: in this process, in others, on a cluster, a vLLM, or servers."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from turnwise.assemble.learner import device_of, policy_of
from turnwise.assemble.model import renderer_of
from turnwise.assemble.models import ModelSource, copy_model
from turnwise.cluster.placement import Site
from turnwise.cluster.replica import open_replicas
from turnwise.engines.base import Engine, vocabulary_of
from turnwise.engines.guidance import Guidance
from turnwise.engines.remote.connection import Connection
from turnwise.engines.remote.process import ProcessEngine
from turnwise.engines.remote.router import Router, WeightStore
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.sglang.engine import SglangEngine
from turnwise.engines.sglang.server import SglangServer
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.local import LocalSettings, LocalVllm
from turnwise.engines.vllm.server import VllmServer
from turnwise.learn.model_cut import model_on_meta
from turnwise.learn.policy import DTYPES, load_model
from turnwise.learn.routers import Routers
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.recipe.servers import ServersConfig
from turnwise.rollout.render.renderer import Renderer
from turnwise.schedule.workers import Worker, Workers, in_own_thread, inline
from turnwise.weights.publisher import Publisher
from turnwise.weights.served_files import LiveWeights, ServedFiles
from turnwise.weights.skeleton import skeleton_of
from turnwise.weights.vllm_file import FileTransfer
from turnwise.weights.vllm_native import NativeTransfer
from turnwise.weights.vllm_transfer import OneAtATime


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server's model must be, as far as one can ask."""

    vocabulary: int = 0
    """Tokens that it has; 0 for any number."""
    kind: str = ""
    """The `model_type` of its config; empty for any."""

    @classmethod
    def of(cls, model: CausalLM) -> ServedModel:
        return cls(vocabulary_of(model), model.config.model_type)


def context_of(recipe: Recipe) -> int:
    """Tokens that prompt and action may have together."""
    return recipe.engine.memory.max_model_len or recipe.rollout.max_trajectory_tokens


def cluster_engine(recipe: Recipe, source: ModelSource, version: int, site: Site) -> Engine:
    """Engines on a Ray cluster, which read their first weights from the source's folder."""
    make = partial(replica_of_folder, recipe, source.own_folder, source.tokenizer, version)
    # A vLLM computes with weights in the recipe's dtype; the slot engine keeps them as the learner has them.
    dtype = DTYPES[recipe.model.dtype] if recipe.engine.name == "vllm" else None
    sleeps = recipe.engine.vllm.sleep
    return open_replicas(site, make, context=context_of(recipe), dtype=dtype, sleeps=sleeps)


def engine_of(
    recipe: Recipe, model: CausalLM, renderer: Renderer, version: int, workers: Workers = in_own_thread
) -> Engine:
    """The engine that a recipe names: on the learner's own module at lag 0, on a copy where sampling and learning
    overlap or learning happens in other processes."""
    if recipe.engine.processes:
        return process_engines(recipe, model, renderer, version)
    apart = inline if recipe.cluster.is_spread else None
    worker = workers("engine") if recipe.max_lag else apart
    return ENGINES[recipe.engine.name](recipe, model, renderer, version, worker)


def engine_of_nobody(renderer: Renderer) -> Engine:
    """An engine for a loop that samples nothing: it counts versions."""
    return ScriptedEngine(lambda prompt, session, seed: "", lambda text: [], end_token=renderer.end_token)


def evaluation_engine_of(recipe: Recipe, model: CausalLM, renderer: Renderer, version: int, workers: Workers) -> Engine:
    """A second engine, with a copy of the weights, for evaluations that overlap training."""
    model = copy.deepcopy(model) if recipe.cluster.is_spread else model
    return ENGINES[recipe.engine.name](without_replay(recipe), model, renderer, version, workers("evaluation"))


def without_replay(recipe: Recipe) -> Recipe:
    """The recipe for a model whose attempts nobody trains on: it records no routes, and may have none."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"router_replay": False})})


def slot_engine(
    recipe: Recipe, model: CausalLM, renderer: Renderer, version: int, worker: Worker | None = None
) -> SlotEngine:
    """An in-process engine: on the model itself, in the event loop, or on a copy of it, where a worker computes. A
    model that is whole here while the learner is elsewhere is nobody else's."""
    if recipe.cluster.is_spread:
        policy_of(recipe, model)  # which makes it ready for an engine
    own = worker is None or recipe.cluster.is_spread
    slot_model = slot_model_of(recipe, model if own else copy.deepcopy(model), renderer, version)
    in_loop = worker is None or worker is inline
    return SlotEngine(slot_model, run=worker or inline, shares_weights=worker is None, is_deterministic=in_loop)


def replica_of_folder(recipe: Recipe, folder: Path, tokenizer: ChatTokenizer, version: int) -> Engine:
    """The engine of a process that reads a model by itself. A vLLM does so in its own process."""
    model = model_on_meta(folder) if recipe.engine.name == "vllm" else load_model(folder)
    return replica_engine(recipe, model, tokenizer, version)


def replica_engine(recipe: Recipe, model: CausalLM, tokenizer: ChatTokenizer, version: int) -> Engine:
    """The engine of a process of its own, which has the model for itself."""
    torch.set_num_threads(recipe.model.threads or max(1, int(recipe.cluster.cpus)))
    if model.device.type != "meta":
        model = model.to(device_of(recipe))
        policy_of(recipe, model)  # which makes it ready for an engine
    renderer = renderer_of(recipe, model, tokenizer)
    return REPLICAS[recipe.engine.name](recipe, model, renderer, version)


def slot_replica(recipe: Recipe, model: CausalLM, renderer: Renderer, version: int) -> SlotEngine:
    """An in-process engine on a model that nobody else uses."""
    slot_model = slot_model_of(recipe, model, renderer, version)
    return SlotEngine(slot_model, run=in_own_thread("engine"), shares_weights=False)


def process_engines(recipe: Recipe, model: CausalLM, renderer: Renderer, version: int) -> Router:
    """Engines in processes of this machine, which read their weights from one place."""
    publisher = Publisher()
    publisher.publish(model.state_dict(), version)
    make = partial(engine_of_process, recipe, renderer.tokenizer)
    skeleton = skeleton_of(model)

    def start(number: int) -> ProcessEngine:
        return ProcessEngine(make, skeleton, publisher, context=context_of(recipe), name=f"engine process {number}")

    return Router(start, recipe.engine.processes, publisher, answer_seconds=recipe.cluster.answer_seconds)


def engine_of_process(recipe: Recipe, tokenizer: ChatTokenizer, model: CausalLM, version: int) -> Engine:
    return replica_engine(recipe, model, tokenizer, version)


def slot_model_of(recipe: Recipe, model: CausalLM, renderer: Renderer, version: int) -> SlotModel:
    return SlotModel(
        model,
        slots=recipe.engine.max_num_seqs,
        context=context_of(recipe),
        end_tokens=renderer.end_tokens,
        decode=renderer.decode,
        dtype=DTYPES[recipe.model.dtype],
        version=version,
        cache=recipe.engine.memory.kv_cache,
        keep_cache=recipe.engine.memory.keep_cache,
        pass_tokens=recipe.engine.memory.max_num_batched_tokens,
        guidance=Guidance(renderer.tokenizer, vocabulary=vocabulary_of(model), end_tokens=renderer.end_tokens),
        record_routes=recipe.model.router_replay,
    )


def vllm_engine(
    recipe: Recipe, model: CausalLM, renderer: Renderer, version: int, worker: Worker | None = None
) -> Engine:
    """A vLLM with a copy of the model, which starts when it is first needed, or the servers that a recipe names. It
    computes in a process of its own and needs no worker."""
    vllm, dtype = recipe.engine.vllm, DTYPES[recipe.model.dtype]
    if vllm.servers:
        return vllm_servers(recipe, model, renderer, version)
    engine, device = recipe.engine, device_of(recipe)
    local = LocalSettings(
        slots=engine.max_num_seqs,
        dtype=recipe.model.dtype,
        device=device,
        threads=torch.get_num_threads(),
        cache=engine.memory.kv_cache,
        pass_tokens=engine.memory.max_num_batched_tokens,
        memory=vllm.gpu_memory_utilization,
        eager=device == "cpu" if vllm.enforce_eager == "auto" else vllm.enforce_eager,
        tensor_parallel=vllm.tensor_parallel_size,
        transfer=vllm.transfer,
        routes=recipe.model.router_replay,
        sleep=vllm.sleep,
    )
    save = partial(copy_model, ModelSource(model, renderer.tokenizer, Path(model.config.name_or_path)))
    folder = Path(vllm.folder) if vllm.folder else None
    transfer = FileTransfer(dtype, folder) if vllm.transfer == "file" else NativeTransfer(vllm.transfer, dtype)
    return VllmEngine(LocalVllm(save, local), transfer, version=version, **vllm_settings(recipe, model, renderer))


def vllm_settings(recipe: Recipe, model: CausalLM, renderer: Renderer) -> dict[str, Any]:
    """What an engine over vLLM is told, wherever vLLM runs."""
    return {
        "slots": recipe.engine.max_num_seqs,
        "context": context_of(recipe),
        "vocabulary": vocabulary_of(model),
        "end_tokens": renderer.end_tokens,
        "tensors": model.state_dict(),
        "keep_cache": recipe.engine.memory.keep_cache,
        "guidance": vllm_guidance(model, renderer),
        "sleeps": recipe.engine.vllm.sleep,
        "route_layers": Routers(model).layers if recipe.model.router_replay else None,
    }


def vllm_servers(recipe: Recipe, model: CausalLM, renderer: Renderer, version: int) -> Router:
    """Servers that run already, each with an engine of its own."""
    vllm, dtype = recipe.engine.vllm, DTYPES[recipe.model.dtype]
    settings = vllm_settings(recipe, model, renderer)
    first = model.state_dict() if model.device.type != "meta" else None
    turn = asyncio.Lock()
    store: WeightStore
    if vllm.transfer == "file":
        store = ServedFiles(dtype, Path(vllm.folder) if vllm.folder else None)
        if first is not None:
            store.publish(first, version)
    else:
        store = LiveWeights(first, version)

    def start(number: int) -> VllmEngine:
        service = vllm_server(recipe, connections_of(vllm)[number], ServedModel.of(model))
        newest = store.newest
        return VllmEngine(
            service,
            FileTransfer(dtype) if vllm.transfer == "file" else OneAtATime(NativeTransfer(vllm.transfer, dtype), turn),
            version=None if newest is None else newest.version,
            first_weights=newest,
            name=service.url,
            **settings,
        )

    return Router(start, len(vllm.servers), store, answer_seconds=recipe.cluster.answer_seconds, starts=None)


def vllm_server(recipe: Recipe, connection: Connection, model: ServedModel) -> VllmServer:
    """A server as a recipe needs it."""
    vllm = recipe.engine.vllm
    return VllmServer(
        connection,
        routes=recipe.model.router_replay,
        sleeps=vllm.sleep,
        has_extension=vllm.transfer == "file",
        vocabulary=model.vocabulary,
    )


def sglang_engine(
    recipe: Recipe, model: CausalLM, renderer: Renderer, version: int, worker: Worker | None = None
) -> Router:
    """The SGLang servers that a recipe names, each with an engine of its own, which needs no worker."""
    sglang = recipe.engine.sglang
    store = ServedFiles(DTYPES[recipe.model.dtype], Path(sglang.folder) if sglang.folder else None)
    if model.device.type != "meta":
        store.publish(model.state_dict(), version)

    def start(number: int) -> SglangEngine:
        service = sglang_server(recipe, connections_of(sglang)[number], ServedModel.of(model))
        return SglangEngine(
            service,
            store,
            slots=recipe.engine.max_num_seqs,
            context=context_of(recipe),
            vocabulary=vocabulary_of(model),
            end_tokens=renderer.end_tokens,
            tensors=model.state_dict(),
            decode=renderer.decode,
            first_weights=store.newest,
            keep_cache=recipe.engine.memory.keep_cache,
            seeds=sglang.seeds,
            name=service.url,
        )

    return Router(start, len(sglang.servers), store, answer_seconds=recipe.cluster.answer_seconds, starts=None)


def sglang_server(recipe: Recipe, connection: Connection, model: ServedModel) -> SglangServer:
    """A server as a recipe needs it."""
    return SglangServer(connection, seeds=recipe.engine.sglang.seeds, model_type=model.kind)


def connections_of(servers: ServersConfig) -> list[Connection]:
    """A connection to each server of a recipe, not open yet."""
    key = os.environ.get(servers.api_key_variable, "") if servers.api_key_variable else ""
    return [Connection(url, key=key, ca_file=servers.ca_file) for url in servers.servers]


def vllm_guidance(model: CausalLM, renderer: Renderer) -> Guidance:
    """Reads a tokenizer as vLLM does: its end token alone ends a grammar, and marks that it does not call special are
    text."""
    tokenizer = renderer.tokenizer
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Guidance(tokenizer, vocabulary=vocabulary_of(model), end_tokens=ends, added_are_text=True)


ENGINES: dict[str, Callable[[Recipe, CausalLM, Renderer, int, Worker | None], Engine]] = {
    "slots": slot_engine,
    "vllm": vllm_engine,
    "sglang": sglang_engine,
}
"""By name: the engine of a run, computed by a worker where it has a copy of the model."""
REPLICAS: dict[str, Callable[[Recipe, CausalLM, Renderer, int], Engine]] = {
    "slots": slot_replica,
    "vllm": vllm_engine,
    "sglang": sglang_engine,
}
"""By name: the engine of another process, which has the model to itself."""
SERVERS: dict[str, Callable[[Recipe, Connection, ServedModel], VllmServer | SglangServer]] = {
    "vllm": vllm_server,
    "sglang": sglang_server,
}
"""By name: a server of a run's engine, not connected yet."""
