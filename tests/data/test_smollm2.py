from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.data.smollm2 import SMOLLM2, plain_model, plain_tokenizer
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.learn.tiny import build_tokenizer

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_the_tokenizer_ends_turns_as_its_template_does_and_takes_digits_one_by_one():
    tokenizer = build_tokenizer(["2024 2024 2024 2024"])
    tokenizer.eos_token = "<|im_start|>"
    assert len(tokenizer.encode("2024")) < 4
    plain = plain_tokenizer(tokenizer)
    assert (plain.eos_token, plain.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert len(plain.encode("2024")) == 4
    assert plain.decode(plain.encode(" in 2024,  12x")) == " in 2024,  12x"


def test_a_model_that_was_quantised_can_be_saved_again(tmp_path):
    tokenizer = build_tokenizer([])
    packed = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **SMALL))
    packed.config.quantization_config = {"quant_method": "gguf"}
    model = plain_model(packed, tokenizer)
    model.save_pretrained(tmp_path)
    again: Any = load_model(tmp_path)
    assert not hasattr(again.config, "quantization_config")
    assert again.config.eos_token_id == again.generation_config.eos_token_id == tokenizer.eos_token_id
    assert all(torch.equal(one, packed.state_dict()[name]) for name, one in again.state_dict().items())


@pytest.mark.slow
def test_the_real_one_speaks(monkeypatch):
    """Where the user has fetched it."""
    monkeypatch.setenv("TURNWISE_CACHE", str(Path("~/.cache/turnwise").expanduser()))
    if not SMOLLM2.is_here:
        pytest.skip("run: turnwise data smollm2-135m")
    model: Any = load_model("smollm2-135m")
    tokenizer: Any = load_tokenizer("smollm2-135m")
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert sum(one.numel() for one in model.parameters()) == 134_515_008
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    said = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
