import pytest

from support.making import make_model
from support.running import micro_recipe
from turnwise.assemble.checks import check_parts, check_settings

VLLM = ["engine.name=vllm"]
SERVED = [*VLLM, "engine.vllm.servers=http://a:8000"]
NCCL = [*SERVED, "engine.vllm.transfer=nccl"]
IPC = [*VLLM, "engine.vllm.transfer=ipc"]
PAIRS = [*VLLM, "engine.vllm.tensor_parallel_size=2", "model.device=cuda"]


def test_the_laptop_is_the_default(tmp_path):
    own = micro_recipe(tmp_path).cluster
    assert not own.is_spread
    assert not own.on_ray


@pytest.mark.parametrize(
    ("overrides", "spread", "on_ray"),
    [
        (["cluster.fsdp=2"], True, False),
        (["cluster.placement=colocated"], True, True),
        (["cluster.placement=disaggregated", "model.device=cuda"], True, True),
    ],
)
def test_one_setting_goes_to_a_cluster(tmp_path, overrides, spread, on_ray):
    own = micro_recipe(tmp_path, *overrides).cluster
    assert (own.is_spread, own.on_ray) == (spread, on_ray)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.replicas=2"], 'replicas is ignored with placement = "local"'),
        (["cluster.gpus=1"], "cluster.gpus is called model.device now"),
        (["cluster.placement=colocated", "model.device=mps"], 'set it to "cuda" or "cpu"'),
        ([*NCCL, "cluster.placement=colocated"], '"nccl" sends from the machine of the run'),
        ([*IPC, "cluster.placement=disaggregated"], '"ipc" sends from the machine of the run'),
        ([*IPC, "cluster.fsdp=2", "engine.vllm.tensor_parallel_size=4"], "the learner, which has 2 of them"),
        (
            [*SERVED, "cluster.placement=colocated", "cluster.replicas=2"],
            "is ignored with engine.vllm.servers",
        ),
        (
            [*PAIRS, "cluster.placement=colocated", "cluster.fsdp=2", "cluster.replicas=2"],
            "2 GPUs each share those of 2",
        ),
        (["env.0.concurrency.actors=2"], "env.concurrency.actors needs a Ray cluster"),
        (["cluster.fsdp=0"], "cluster.fsdp"),
        (["cluster.ranks=2"], "cluster.ranks is called cluster.fsdp now"),
        (["cluster.fsdp=4", "cluster.tp=2", "cluster.ep=3"], "ep = 3 must be 1, or a multiple of tp = 2 that divides"),
        (["cluster.fsdp=2", "cluster.ep=4"], "divides fsdp . cp . tp = 2"),
        (["cluster.tp=2", "cluster.gradient_sync=update"], "gradient_sync is ignored where no two processes"),
        (["cluster.answer_seconds=30"], "answer_seconds is ignored where the run is one process"),
        (["cluster.fsdp=2", "cluster.answer_seconds=1"], "cluster.answer_seconds"),
        (["cluster.offload=true"], "offload is ignored where the learner is one process"),
        (["lora.targets=['q_proj']"], "targets is ignored without a rank"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        micro_recipe(tmp_path, *overrides)


def test_ranks_of_this_machine_send_by_any_transfer(tmp_path):
    for way in (NCCL, [*IPC, "engine.vllm.tensor_parallel_size=4"]):
        assert micro_recipe(tmp_path, *way, "cluster.fsdp=8").cluster.ranks == 8


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("qwen3", ["cluster.ep=2", "cluster.fsdp=2"], "no plan that sends tokens to the experts of Qwen3ForCausalLM"),
        ("qwen3_moe", ["cluster.ep=3", "cluster.fsdp=3"], "cluster.ep = 3 must divide the 8 experts"),
        ("qwen3", ["cluster.tp=4"], "cluster.tp = 4 must divide the 2 key-value heads"),
        ("qwen3", ["cluster.cp=4", "cluster.tp=2"], "together more than the 4 attention heads of this model"),
        ("qwen3", ["cluster.cp=4"], ""),
        ("qwen3_moe", ["cluster.tp=2"], "set cluster.ep = 2 too, which divides experts whole"),
        ("qwen3_moe", ["cluster.tp=2", "cluster.ep=2"], ""),
        ("llama", ["cluster.tp=2"], ""),
        ("qwen3", ["cluster.tp=2", "lora.rank=4"], "set cluster.tp = 1 and cluster.ep = 1"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(tmp_path, kind, overrides, message):
    recipe = micro_recipe(tmp_path, *overrides)
    if not message:
        check_parts(recipe, make_model(kind))
        return
    with pytest.raises(ValueError, match=message):
        check_settings(recipe)
        check_parts(recipe, make_model(kind))


def test_actors_and_batched_calls_exclude_each_other(tmp_path):
    from turnwise.cluster.remote_envs import RemoteEnvironments

    class Many:
        @classmethod
        def step_many(cls, environments, messages):
            return []

    with pytest.raises(ValueError, match=r"Many combines calls in step_many, which env.concurrency.actors prevents"):
        RemoteEnvironments(Many, actors=2, cluster=micro_recipe(tmp_path).cluster)
