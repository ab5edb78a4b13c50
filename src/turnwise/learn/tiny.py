"""A tiny Qwen3 and a tokenizer of its own, built by code: what a first run trains, without fetching anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from turnwise.pretrained import import_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def build_tokenizer(texts: Iterable[str], vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`: frequent words are one token, and any string round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocabulary: int, hidden: int, layers: int, context: int) -> Qwen3Config:
    """The sizes of a tiny Qwen3."""
    from transformers import Qwen3Config

    heads = max(1, hidden // 32)
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=max(32, hidden * 8 // 3 // 32 * 32),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=32,
        max_position_embeddings=max(context, 1024),
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,  # the usual 0.02 suits widths in the thousands and learns to copy late here
        bos_token_id=None,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, context: int, seed: int
) -> PreTrainedModel:
    """A Qwen3 with random weights that knows the tokenizer's end token."""
    import torch

    import_models()
    from transformers import Qwen3ForCausalLM

    config = tiny_config(len(tokenizer), hidden, layers, context)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
