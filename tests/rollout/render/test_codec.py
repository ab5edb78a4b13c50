import copy

import numpy as np
import pytest

from support.acting import byte_tokenizer
from turnwise.rollout.render.codec import Codec, backend_of

TEXTS = [
    "",
    "get amber",
    "<|im_start|>user\nwhat is <|im_end|>?<|im_end|>\n",
    " white  space\n\n",
    "día 日本 \U0001f600",
    "a" * 999,
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_texts_are_those_of_the_tokenizer(text):
    tokenizer = byte_tokenizer()
    codec = Codec(tokenizer)
    assert codec.backend is not None
    tokens = codec.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert codec.decode(tokens.tolist()) == whole


def test_a_tokenizer_that_was_told_to_pad_or_cut_gives_the_same_tokens():
    tokenizer = copy.deepcopy(byte_tokenizer())
    codec = Codec(tokenizer)
    wanted = codec.encode(TEXTS[2]).tolist()
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    assert codec.encode(TEXTS[2]).tolist() == wanted
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert codec.encode(TEXTS[2]).tolist() == wanted
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert codec.encode(TEXTS[2]).tolist() == wanted


def test_methods_of_a_tokenizers_own_are_used():
    tokenizer = copy.deepcopy(byte_tokenizer())
    kind = type(tokenizer)
    tokenizer.__class__ = type("Own", (kind,), {"_decode": lambda self, *_, **__: "own words"})
    assert backend_of(tokenizer) is None
    assert Codec(tokenizer).decode([5]) == "own words"


def test_what_cannot_be_read_fails_as_in_the_tokenizer():
    tokenizer, bad = byte_tokenizer(), "half \ud800 of a pair"
    with pytest.raises(Exception) as wanted:
        tokenizer.encode(bad, add_special_tokens=False)
    with pytest.raises(type(wanted.value)) as own:
        Codec(tokenizer).encode(bad)
    assert str(own.value) == str(wanted.value)
