"""Weights lie where PyTorch would have put them, whoever has loaded them: kernels round by address."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from turnwise.learn.learner import save_policy
from turnwise.learn.lora import add_adapters
from turnwise.learn.policy import load_model
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.weights.publisher import Publisher
from turnwise.weights.skeleton import model_of_skeleton, skeleton_of

SIZES = [(hidden, layers) for hidden in (32, 64, 96, 128, 256) for layers in (1, 2, 3)]


def built(hidden: int, layers: int) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(["a b c d"])
    return build_model(tokenizer, hidden, layers, 64, 0), tokenizer


def misaligned(model: Any) -> list[str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if tensor.data_ptr() % 64]


@torch.no_grad()
def logits(model: Any, num_tokens: int) -> torch.Tensor:
    found: torch.Tensor = model(torch.arange(5, 5 + num_tokens)[None]).logits
    return found


@pytest.mark.parametrize(("hidden", "layers"), SIZES)
def test_a_loaded_model_computes_bit_for_bit_what_the_saved_one_did(tmp_path: Path, hidden: int, layers: int) -> None:
    model, tokenizer = built(hidden, layers)
    save_policy(model, tokenizer, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert misaligned(loaded) == []
    for num_tokens in (1, 2, 3, 17):  # a single row shows it, and two and three on some machines
        assert torch.equal(logits(model, num_tokens), logits(loaded, num_tokens))


def test_loaded_weights_are_tied_and_trainable_and_do_not_change_with_their_file(tmp_path: Path) -> None:
    model, tokenizer = built(32, 2)
    save_policy(model, tokenizer, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert all(p.requires_grad and p.is_leaf for p in loaded.parameters())
    before = logits(loaded, 3)
    with open(tmp_path / "saved" / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size // 2))
    assert torch.equal(logits(loaded, 3), before)


def test_engine_processes_and_ranks_have_aligned_weights_too() -> None:
    model, _ = built(32, 2)
    publisher = Publisher()
    try:
        assert misaligned(model_of_skeleton(skeleton_of(model), publisher.publish(model.state_dict(), 0))) == []
    finally:
        publisher.close()
    assert misaligned(pickle.loads(pickle.dumps(model))) == []


ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["up_proj"], "lora_alpha": 1.7, "r": 3}


def test_adapters_are_added_as_if_they_had_been_made_here(tmp_path: Path) -> None:
    """Wherever a file has them: a header of one more byte moves all tensors by eight."""
    first, second = torch.randn(3, 32), torch.randn(32, 3)
    found = []
    for number in range(8):
        model, _ = built(32, 1)
        name = "base_model.model.model.layers.0.mlp.up_proj"
        shape = model.model.layers[0].mlp.up_proj.weight.shape
        weights = {f"{name}.lora_A.weight": first, f"{name}.lora_B.weight": second.repeat(8, 1)[: shape[0]].clone()}
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt" + "." * 8 * number})
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
        adapted: Any = add_adapters(model, folder)
        found.append(adapted.model.layers[0].mlp.up_proj.weight.detach())
    assert all(torch.equal(found[0], other) for other in found)
