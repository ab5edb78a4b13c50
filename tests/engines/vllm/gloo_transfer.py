"""vLLM's transfer over nccl, played over gloo, so that it can be run on CPUs: a worker's end, and a trainer's end for
vLLM's own factory. vLLM's process imports this module by the name of its extension, ranks import it to send."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from turnwise.engines.vllm.worker import FileEngine

NAME = "played_nccl"
LOCAL = "127.0.0.1"
PATIENCE = timedelta(seconds=600)


def group_of(rank: int, port: int, size: int) -> Any:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOCAL, port, size, is_master=rank == 0, timeout=PATIENCE
    )
    return dist.ProcessGroupGloo(store, rank, size, PATIENCE)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()


@dataclass
class GlooInit(WeightTransferInitInfo):
    port: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(FileEngine):
    """Receives each tensor as it is sent."""

    init_info_cls: Any = GlooInit
    update_info_cls: Any = GlooUpdate

    def init_transfer_engine(self, init_info: Any) -> None:
        self.group = group_of(1, init_info.port, init_info.world_size)

    def receive_weights(self, update_info: Any) -> None:
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            self.model.load_weights([(name, tensor)])


@dataclass
class GlooTrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = NAME
    port: int
    world_size: int


class GlooTrainer(TrainerWeightTransferEngine):
    """Every rank iterates the source; the first one sends."""

    init_info_cls = GlooTrainerInit
    group: Any = None

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        trainer = cls(client=client, source=source, is_sender=init_info.is_sender)
        if trainer.is_sender:
            info = asdict(GlooInit(init_info.port, init_info.world_size))
            calling = Thread(target=client.init_weight_transfer_engine, args=(info,))
            calling.start()
            trainer.group = group_of(0, init_info.port, init_info.world_size)
            calling.join()
        return trainer

    def send_weights(self) -> None:
        source: Any = self.source
        announced = source.metadata()
        if self.group is None:
            for _ in source:
                pass
            return
        names, shapes = [meta.name for meta in announced], [list(meta.shape) for meta in announced]
        update = GlooUpdate(names, [str(meta.dtype).partition(".")[2] for meta in announced], shapes)
        self.client.start_weight_update()
        receiving = Thread(target=self.client.update_weights, args=(asdict(update),))
        receiving.start()
        for _, tensor in source:
            broadcast(self.group, tensor)
        receiving.join()
        self.client.finish_weight_update()


class Extension:
    """Nothing by itself."""


def trainer_of(route: Any, rank: int, client: Any, source: Any) -> Any:
    """In place of that of `vllm_native`, in ranks."""
    info = GlooTrainerInit(route.port, 1 + route.num_workers, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


WeightTransferEngineFactory.register_engine(NAME, GlooEngine)
WeightTransferTrainerFactory.register_engine(NAME, GlooTrainer)
