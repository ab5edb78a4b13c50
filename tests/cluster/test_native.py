"""vLLM's own transfers from several ranks, rehearsed: all ranks iterate one source in lockstep, the first one sends."""

import asyncio
from dataclasses import replace
from multiprocessing import AuthenticationError

import pytest
import torch

from cluster.pool import OPEN, Made
from support.acting import run
from support.making import make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.lora import LoraSettings
from turnwise.weights import vllm_native
from turnwise.weights.vllm_control import ControlCaller, ControlServer
from turnwise.weights.vllm_native import NativeTransfer, WholeTensors

LORA = {"lora": LoraSettings(rank=4, alpha=8.0)}


class PlayedTrainer:
    """As vLLM's sender over nccl: every rank iterates the source, the first one announces it, has the other side
    receive, and checks that what comes is what was announced. Tensors go with the calls instead of over nccl."""

    def __init__(self, route, rank, client, source):
        self.rank, self.client, self.source = rank, client, source
        if rank == 0:
            client.init_weight_transfer_engine({"world_size": 1 + route.num_workers, "port": route.port})

    def send_weights(self):
        announced = self.source.metadata()
        if self.rank:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        for meta, (name, tensor) in zip(announced, self.source, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
            assert tensor.is_contiguous()
            self.client.update_weights({"name": name, "bytes": tensor.view(-1).view(torch.uint8).numpy().tobytes()})
        self.client.finish_weight_update()

    def shutdown(self):
        pass


class PlayedVllm:
    """A vLLM that keeps what it is given."""

    def __init__(self, problem=""):
        self.calls, self.received, self.version, self.problem = [], {}, "", problem

    async def init_transfer(self, info):
        self.calls.append(("init", info["world_size"]))

    async def start_update(self):
        self.calls.append("start")
        self.received = {}

    async def update(self, info):
        if self.problem:
            raise OSError(self.problem)
        self.received[info["name"]] = torch.frombuffer(bytearray(info["bytes"]), dtype=torch.bfloat16)

    async def finish_update(self, version):
        self.calls.append("finish")
        self.version = version

    async def num_workers(self):
        return 3


def play():
    setattr(vllm_native, "trainer_of", PlayedTrainer)  # noqa: B010


def listed(number):
    """(what the source of a rank announces, what it yields)"""
    source = WholeTensors(OPEN[number].share(), torch.bfloat16)
    announced = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    return announced, [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]


def spread_of(pool, kind, shape, **how):
    return pool.learner(Made(make_model(kind, tie_word_embeddings=not how), **how), shape)


@pytest.mark.parametrize(
    ("kind", "shape", "how"),
    [
        ("qwen3", MeshShape(tp=2), {}),
        ("qwen3", MeshShape(fsdp=2), LORA),
        pytest.param("qwen3_moe", MeshShape(fsdp=2), {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", MeshShape(fsdp=2, ep=2), {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_announce_what_they_yield_and_the_first_sends_it(pool, kind, shape, how):
    spread = spread_of(pool, kind, shape, **how)
    [first, second] = pool.run(listed, [spread.ranks.number] * 2)
    assert first[0] == first[1] == second[0] == second[1]
    pool.run(play)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in spread.publish().items()}
    transfer, vllm = NativeTransfer("nccl", torch.bfloat16), PlayedVllm()

    async def scene():
        for version in (1, 2):
            await transfer.send(await transfer.prepare(spread.publish(), version), version, vllm)
        await transfer.close()

    run(scene(), 300.0)
    assert vllm.calls == [("init", 4), "start", "finish", "start", "finish"]
    assert vllm.version == "2"
    assert list(vllm.received) == [name for name, *_ in first[0]]
    assert vllm.received.keys() == spread.outline.shapes.keys()
    assert all(torch.equal(found, wanted[name].view(-1)) for name, found in vllm.received.items())
    spread.close()


def test_a_learner_of_one_process_sends_the_same_way(monkeypatch):
    monkeypatch.setattr(vllm_native, "trainer_of", PlayedTrainer)
    weights = make_model(tie_word_embeddings=True).state_dict()
    transfer, vllm = NativeTransfer("ipc", torch.bfloat16), PlayedVllm()

    async def scene():
        await transfer.send(weights, 5, vllm)
        await transfer.close()

    run(scene())
    assert vllm.version == "5"
    assert vllm.received.keys() == weights.keys() - {"lm_head.weight"}
    assert all(torch.equal(found, weights[name].bfloat16().view(-1)) for name, found in vllm.received.items())


def test_a_vllm_that_fails_is_an_error_of_the_sender_and_nothing_hangs(monkeypatch):
    monkeypatch.setattr(vllm_native, "trainer_of", PlayedTrainer)
    transfer = NativeTransfer("ipc", torch.bfloat16)

    async def scene():
        with pytest.raises(RuntimeError, match="OSError: no memory"):
            await transfer.send({"norm": torch.ones(2)}, 5, PlayedVllm("no memory"))
        await transfer.close()

    run(scene())


def test_a_control_answers_nobody_without_its_key_and_closes_while_a_caller_is_there():
    async def scene():
        server = ControlServer(PlayedVllm(), asyncio.get_running_loop())
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(ControlCaller, replace(server.address, key=b"another"))
        caller = await asyncio.to_thread(ControlCaller, server.address)
        await asyncio.to_thread(caller.start_weight_update)
        await asyncio.to_thread(server.close)
        assert not server.thread.is_alive()
        with pytest.raises(OSError, match="No such file"):
            ControlCaller(server.address)
        with pytest.raises((EOFError, OSError)):
            caller.start_weight_update()

    run(scene())
