"""A model as transformers and vLLM read it: the files that save_pretrained writes, in a dtype, of a size."""

import json

import pytest
import torch
import transformers

from support.acting import byte_tokenizer
from support.making import make_model
from turnwise.learn import export
from turnwise.learn.export import gathered, layers_of, stage_export, weights_of
from turnwise.learn.policy import load_model


def mixture():
    """Its experts are joined in memory, and each has its own tensors in files."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3MoeForCausalLM(config)


MODELS = {
    "tied": lambda: make_model("qwen3"),
    "untied": lambda: make_model("llama"),
    "float64": lambda: make_model("llama", dtype="float64"),
    "mixture": mixture,
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_is_that_of_save_pretrained_byte_by_byte(tmp_path, kind):
    model, tokenizer = MODELS[kind](), byte_tokenizer()
    stage_export(model, tokenizer, None).write(tmp_path / "own")
    model.save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == names
    for name in names:
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name


def test_what_is_written_is_what_was_when_it_was_staged(tmp_path):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    staged = stage_export(model, byte_tokenizer(), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.config.hidden_size = 7
    staged.write(tmp_path)
    found = load_model(tmp_path).state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["tied", "mixture"])
def test_a_dtype_rounds_the_files_and_not_the_model(tmp_path, kind):
    model = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stage_export(model, byte_tokenizer(), torch.bfloat16).write(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert stock.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype != "bfloat16"
    assert all(torch.equal(tensor, before[name].bfloat16()) for name, tensor in stock.state_dict().items())


@pytest.mark.parametrize("kind", ["tied", "untied", "mixture"])
def test_a_large_model_is_several_files_with_an_index(tmp_path, monkeypatch, kind):
    room = 9_000
    monkeypatch.setattr(export, "LARGEST", room)
    monkeypatch.setattr(export, "SMALLEST", room)
    model = MODELS[kind]()
    staged = stage_export(model, byte_tokenizer(), None)
    for tensors in staged.files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= room
    staged.write(tmp_path)
    assert len(staged.files) > 2
    assert sorted(staged.files) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {name: file for file, tensors in staged.files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(model).values())
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_is_gathered_one_layer_at_a_time():
    weights = weights_of(make_model("llama"))
    layers = list(layers_of(weights))
    assert [name for layer in layers for name in layer] == list(weights)
    assert [len(layer) for layer in layers] == [1, 9, 9, 1, 1]
    assert gathered(layers[0], None).keys() == {"model.embed_tokens.weight"}
