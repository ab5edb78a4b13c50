"""A tokenizer's texts to tokens and back, without what transformers does around each call.

Around a call of its Rust backend transformers checks, copies and wraps some thirty values. For the few hundred
characters of a turn that takes longer than the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.pretrained import ChatTokenizer
from turnwise.tokens import Tokens

WRAPPERS = ("encode", "_encode_plus", "decode", "_decode")
"""Methods of transformers that add nothing to the backend, unless a tokenizer has its own."""


class Codec:
    """Encodes and decodes exactly as the tokenizer's own methods do. They are called for whatever the backend alone
    does not do alike: a tokenizer with methods of its own, one that somebody has told to pad, and texts that cannot be
    read.

    Example:
        Codec(tokenizer).encode("get amber")
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.backend = backend_of(tokenizer)

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, including control tokens, and none that it does not have."""
        backend = self.backend
        if backend is not None and not (backend.encode_special_tokens or backend.truncation or backend.padding):
            try:
                return np.array(backend.encode(text, add_special_tokens=False).ids, np.int32)
            except Exception:  # of a text that cannot be read: the tokenizer says what is wrong with it
                pass
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        if self.backend is not None:
            try:
                return str(self.backend.decode(tokens, skip_special_tokens=False))
            except Exception:  # the tokenizer says what is wrong with these tokens
                pass
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def backend_of(tokenizer: ChatTokenizer) -> Any | None:
    """The Rust tokenizer inside; None where transformers' methods, or the tokenizer's own, do more than call it."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    plain = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in WRAPPERS)
    changed = set(WRAPPERS) & getattr(tokenizer, "__dict__", {}).keys()
    if not plain or changed or getattr(tokenizer, "split_special_tokens", True):
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
