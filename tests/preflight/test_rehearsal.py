"""Qwen3-8B over 8 ranks and Qwen3-30B-A3B over 16 by the shipped recipes, on tensors without numbers.

Cut to two layers in the quick suite, whole in the slow one.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from turnwise.preflight.brief import rehearse_a_few
from turnwise.preflight.model_config import config_at
from turnwise.preflight.operation_counter import BUFFERS, GATHER, GATHER_ROOT, HEAD, LAYERS, OperationCounter
from turnwise.preflight.rehearsal import GRADIENTS, MASTERS, MOMENTS, rehearse, shallower
from turnwise.preflight.share_guard import OverShareError, ShareGuard
from turnwise.recipe.parse import load_recipe

CASES = {"qwen3-8b-8gpu": ("Qwen/Qwen3-8B", 8, 36), "qwen3-30b-a3b-16gpu": ("Qwen/Qwen3-30B-A3B", 16, 48)}
QUICK = 2
ON_HOST = ("learner.py", "shard.py", "stepper.py", "head.py")
"""Where the host may wait for the device: once a pass or a step, and nowhere within a layer."""


@dataclass(frozen=True)
class Sizes:
    """Bytes, from the config alone."""

    layer: float
    embeddings: float
    whole: float

    @classmethod
    def of(cls, config, layers):
        inner = 3 * config.hidden_size * getattr(config, "moe_intermediate_size", config.intermediate_size)
        inner = inner * getattr(config, "num_experts", 1)
        router = config.hidden_size * getattr(config, "num_experts", 0)
        heads = config.num_attention_heads + config.num_key_value_heads
        attention = 2 * config.hidden_size * heads * config.head_dim
        norms = 2 * config.hidden_size + 2 * config.head_dim
        layer, embeddings = inner + router + attention + norms, 2 * config.vocab_size * config.hidden_size
        return cls(layer, embeddings, layers * layer + embeddings + config.hidden_size)


@cache
def found(name, layers, overrides=()):
    path, ranks, depth = CASES[name]
    recipe = load_recipe(Path(name), list(overrides))
    config = config_at(path).config
    sizes = Sizes.of(config, layers or depth)
    counter = OperationCounter()
    # Its share in float32, one layer that is computed with, one that is gathered meanwhile, and the embeddings; all of
    # these in bfloat16, and each once more on its way.
    may_gather = 2 * (2 * 2 * sizes.layer + 2 * sizes.embeddings)
    counter.watch = ShareGuard(counter.memory, share=1.01 * 4 * sizes.whole / ranks, gathered=may_gather)
    return rehearse(recipe, config, "cuda", layers, counter), sizes, ranks


SHALLOW_AND_WHOLE = [
    *(pytest.param(name, QUICK, id=f"{name}, {QUICK} layers") for name in CASES),
    *(pytest.param(name, None, id=name, marks=pytest.mark.slow) for name in CASES),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_a_rank_stays_under_70_gb_and_counts_what_the_config_says(name, layers):
    rehearsal, sizes, ranks = found(name, layers)
    assert rehearsal.ranks == ranks
    assert 0.95 * 16384 < rehearsal.num_tokens <= 16384
    assert rehearsal.num_parameters == sizes.whole
    assert rehearsal.peak < 70e9
    assert rehearsal.most[MASTERS] == pytest.approx(4 * sizes.whole / ranks, rel=0.01)
    assert rehearsal.most[MOMENTS] == pytest.approx(8 * sizes.whole / ranks, rel=0.01)
    assert rehearsal.most[GRADIENTS] == pytest.approx(4 * sizes.whole / ranks, rel=0.01)
    assert sum(rehearsal.at_peak.values()) == rehearsal.peak


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_no_rank_has_more_than_its_share_and_what_it_computes_with(name, layers):
    """The guard of `found` would have failed at the operation."""
    rehearsal, sizes, ranks = found(name, layers)
    assert rehearsal.peak_of_loading == pytest.approx(4 * sizes.whole / ranks, rel=0.01)


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_copies_in_bfloat16_are_at_most_those_of_two_layers(name, layers):
    rehearsal, sizes, _ = found(name, layers)
    assert rehearsal.most[GATHER] <= 2 * 2 * sizes.layer
    assert rehearsal.most[GATHER_ROOT] <= 2 * sizes.embeddings * 1.01
    assert rehearsal.most[BUFFERS] <= 2 * (2 * sizes.layer + sizes.embeddings) * 1.01


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_the_head_moves_less_than_a_tenth_of_what_the_layers_do(name, layers):
    rehearsal, _, _ = found(name, layers)
    depth = CASES[name][2]
    of_layers = rehearsal.bytes[LAYERS] * depth / rehearsal.layers
    print(f"{name}: the head moves {rehearsal.bytes[HEAD] / of_layers:.1%}")
    assert rehearsal.bytes[HEAD] < 0.1 * of_layers


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_every_product_is_in_bfloat16(name, layers):
    rehearsal, _, _ = found(name, layers)
    assert {dtypes for part, _, dtypes in rehearsal.products if part == LAYERS} == {("bfloat16", "bfloat16")}
    experts = sum(count for (_, product, _), count in rehearsal.products.items() if product == "_grouped_mm")
    assert (experts > 0) == ("a3b" in name)


@pytest.mark.parametrize(("name", "layers"), SHALLOW_AND_WHOLE)
def test_the_host_waits_for_no_layer(name, layers):
    rehearsal, _, _ = found(name, layers)
    assert {place.partition(":")[0] for place in rehearsal.waits} <= set(ON_HOST)
    assert sum(rehearsal.waits.values()) < 20


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_deeper_model_waits_no_longer(name):
    assert found(name, QUICK)[0].waits == found(name, None)[0].waits


@pytest.mark.parametrize(
    ("name", "layers"),
    [("qwen3-8b-8gpu", 6), *(pytest.param(name, None, marks=pytest.mark.slow) for name in CASES)],
)
def test_a_few_layers_predict_the_peak_of_all_of_them(name, layers):
    config = shallower(config_at(CASES[name][0]).config, layers)
    recipe = load_recipe(Path(name), [])
    predicted, whole = rehearse_a_few(recipe, config, "cuda"), rehearse(recipe, config, "cuda", None, brief=True)
    assert predicted.layers == whole.layers == config.num_hidden_layers
    assert predicted.num_parameters == whole.num_parameters
    assert predicted.peak == pytest.approx(whole.peak, rel=0.01)
    assert predicted.at_peak == pytest.approx(whole.at_peak, rel=0.05, abs=0.01 * whole.peak)


def test_the_guard_fails_where_a_rank_gathers_the_whole_model():
    """One rank of one: its share is the whole."""
    path, _, _ = CASES["qwen3-8b-8gpu"]
    config = config_at(path).config
    counter, sizes = OperationCounter(), Sizes.of(config, 1)
    counter.watch = ShareGuard(counter.memory, share=4 * sizes.whole / 8, gathered=2 * sizes.embeddings)
    recipe = load_recipe(Path("qwen3-8b-8gpu"), ["cluster.fsdp=1"])
    with pytest.raises(OverShareError, match="its share is"):
        rehearse(recipe, config, "cuda", 1, counter)


@pytest.mark.slow
def test_more_tokens_take_more_memory_for_activations_alone():
    small = ("max_tokens_per_microbatch=8192", "rollout.max_trajectory_tokens=8192", "rollout.max_prompt_tokens=4096")
    wide = found("qwen3-8b-8gpu", QUICK)[0]
    narrow = found("qwen3-8b-8gpu", QUICK, small)[0]
    assert narrow.most["activations"] == pytest.approx(wide.most["activations"] / 2, rel=0.1)
    assert narrow.most[MOMENTS] == wide.most[MOMENTS]


def test_offload_takes_masters_moments_and_gradients_from_the_gpu():
    """And nothing else: what a pass computes with is as large as before."""
    name = "qwen3-8b-8gpu"
    plain, sizes, ranks = found(name, QUICK)
    offloaded, _, _ = found(name, QUICK, ("cluster.offload=true",))
    kept = (MASTERS, MOMENTS, GRADIENTS)
    assert {each: offloaded.on_host[each] for each in kept} == {each: plain.most[each] for each in kept}
    assert plain.on_host == {}
    assert not set(kept) & {*offloaded.most, *offloaded.at_peak}
    assert sum(offloaded.at_peak.values()) == offloaded.peak
    assert plain.peak - offloaded.peak == pytest.approx(16 * sizes.whole / ranks, rel=0.3)
    assert {each: size for each, size in plain.most.items() if each not in kept} == offloaded.most
