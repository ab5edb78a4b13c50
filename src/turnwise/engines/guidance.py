"""Grammars compiled for a tokenizer, by llguidance: which tokens may come next.

llguidance bounds the size of a grammar and the work per token. What goes beyond its limits is refused, or fails the
call that asked for it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnwise.allowed import Allowed, compress
from turnwise.engines.grammar import Grammar, GrammarKind

FORMATS = {
    GrammarKind.json_schema: "json_schema",
    GrammarKind.regex: "regex",
    GrammarKind.choice: "choice",
    GrammarKind.lark: "grammar",
}
"""What llguidance calls each kind."""
NOT_INSTALLED = 'a grammar needs llguidance: pip install "turnwise[structured]"'
NOT_FAST = "a grammar needs a tokenizer of the tokenizers library, which this model does not have"
NO_GRAMMARS = "this engine cannot follow a grammar; remove the format from the request"
MOST_GRAMMARS, MOST_SETS = 64, 4096
"""Compiled grammars, and compressed sets, that are kept for later calls."""
LONGEST_REASON = 300

K = TypeVar("K")
V = TypeVar("V")


class Guidance:
    """Compiles grammars for one tokenizer and one vocabulary.

    Example:
        guidance = Guidance(tokenizer, vocabulary=151936, end_tokens=[151645])
        guide = guidance.guide(Grammar(GrammarKind.regex, "yes|no"))
    """

    def __init__(
        self, tokenizer: Any, *, vocabulary: int, end_tokens: Iterable[int], added_are_text: bool = False
    ) -> None:
        """`vocabulary`: rows of the model's output. Tokens that were added to a tokenizer, such as the marks of a chat
        template, are no text: no grammar of text allows them. With `added_are_text`, only those that the tokenizer
        calls special are not, which is how vLLM reads it."""
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.end_tokens = sorted(set(end_tokens))
        self.added_are_text = added_are_text
        self.compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self.compressed: OrderedDict[bytes, bytes] = OrderedDict()
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Guidance], tuple[Any, ...]]:
        """What is compiled stays in its process."""
        return make_guidance, (self.tokenizer, self.vocabulary, self.end_tokens, self.added_are_text)

    def is_compiled(self, grammar: Grammar) -> bool:
        return grammar in self.compiled

    def guide(self, grammar: Grammar) -> Guide:
        """The start of an action that follows a grammar; ValueError for one that cannot be followed. It takes up to
        about a second the first time, and holds no lock of the interpreter meanwhile."""
        with self.lock:
            matcher = self.compiled.get(grammar)
        if matcher is None:
            matcher = self.compile(grammar)
            with self.lock:
                remember(self.compiled, grammar, matcher, MOST_GRAMMARS)
        return Guide(self, matcher.deep_copy())

    def compile(self, grammar: Grammar) -> Any:
        llguidance = self.library
        try:
            text = llguidance.grammar_from(FORMATS[grammar.kind], grammar.text)
        except (ValueError, RecursionError) as error:
            raise unusable(grammar, str(error)) from None
        matcher = llguidance.LLMatcher(self.ll_tokenizer, text, log_level=0)
        bits = self.bits([matcher])
        if matcher.is_error():
            raise unusable(grammar, matcher.get_error())
        if not bits.any() or (bits[0] == self.end_bits).all():
            raise unusable(grammar, "no text fits it")
        return matcher

    # ------------------------------------------------------------ tokens

    @cached_property
    def library(self) -> Any:
        try:
            import llguidance
        except ImportError:
            raise ValueError(NOT_INSTALLED) from None
        return llguidance

    @cached_property
    def ll_tokenizer(self) -> Any:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(NOT_FAST)
        described = json.loads(backend.to_str())
        described["truncation"] = described["padding"] = None
        for added in [] if self.added_are_text else described.get("added_tokens", []):
            added["special"] = True
        size = max(self.vocabulary, len(self.tokenizer))
        ends = [token for token in self.end_tokens if token < size]
        if not ends:
            raise ValueError("a grammar needs a model with an end token, so that an action can end")
        try:
            return self.library.LLTokenizer(json.dumps(described), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise ValueError(f"no grammar can be followed with this tokenizer: {one_line(str(error))}") from None

    @cached_property
    def end_bits(self) -> NDArray[np.int32]:
        dense = np.zeros(self.width * 32, bool)
        dense[self.end_tokens] = True
        return np.packbits(dense, bitorder="little").view(np.int32)

    @property
    def width(self) -> int:
        """Words of 32 bits that the bits of all tokens take."""
        return -(-int(self.ll_tokenizer.vocab_size) // 32)

    @cached_property
    def executor(self) -> Any:
        return self.library.LLExecutor()

    # ------------------------------------------------------------ a batch

    def bits(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """[matchers, width] a bit for each token that may come next."""
        bits = np.zeros((len(matchers), self.width), np.int32)
        rows = list(zip(matchers, range(len(matchers)), strict=True))
        if len(rows) == 1:
            matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        elif rows:
            self.executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * 4, len(rows))
        return bits

    def compress(self, raw: bytes) -> bytes:
        """The compressed set of some bits: the same object for equal ones, as far as they are remembered."""
        key = hashlib.blake2b(raw, digest_size=16).digest()
        with self.lock:
            packed = self.compressed.get(key)
        if packed is None:
            packed = compress(np.frombuffer(raw, np.uint8))
        with self.lock:
            remember(self.compressed, key, packed, MOST_SETS)
        return packed


class Guide:
    """One action that follows a grammar: what may come next, and what was allowed so far."""

    def __init__(self, guidance: Guidance, matcher: Any) -> None:
        self.guidance = guidance
        self.matcher = matcher
        self.places: list[int] = []
        self.seen: dict[bytes, int] = {}

    def take(self, token: int, bits: NDArray[np.int32]) -> None:
        """Go on with a token that was drawn from these bits."""
        self.places.append(self.seen.setdefault(bits.tobytes(), len(self.seen)))
        self.matcher.consume_token(token)

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; empty where it can."""
        if not self.matcher.is_error():
            return ""
        reason = one_line(self.matcher.get_error())
        return f"the grammar cannot be followed after {len(self.places)} tokens: {reason}; make it simpler"

    @property
    def allowed(self) -> Allowed:
        """What each token so far was drawn from."""
        return Allowed(np.array(self.places, np.int32), tuple(map(self.guidance.compress, self.seen)))

    def allowed_after(self, count: int) -> Allowed:
        """What each token after the first `count` was drawn from."""
        used, places = np.unique(np.array(self.places[count:], np.int32), return_inverse=True)
        all_bits = list(self.seen)
        return Allowed(
            places.astype(np.int32), tuple(self.guidance.compress(all_bits[index]) for index in used.tolist())
        )


def follow(guidance: Guidance, grammar: Grammar, tokens: Sequence[int]) -> Allowed:
    """What each token of an action was drawn from by an engine that follows the grammar in the same way; ValueError if
    it cannot have followed it."""
    guide = guidance.guide(grammar)
    for number, token in enumerate(tokens):
        [bits] = guidance.bits([guide.matcher])
        inside = 0 <= token < 32 * len(bits)
        if guide.problem or not inside or not int(bits.view(np.uint8)[token >> 3]) >> (token & 7) & 1:
            raise ValueError(f"token {number} of the action, {token}, does not follow the grammar")
        guide.take(token, bits)
    return guide.allowed


def make_guidance(tokenizer: Any, vocabulary: int, end_tokens: list[int], added_are_text: bool) -> Guidance:
    return Guidance(tokenizer, vocabulary=vocabulary, end_tokens=end_tokens, added_are_text=added_are_text)


def remember(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Keep a value as the newest one, and drop the oldest beyond `most`."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def unusable(grammar: Grammar, reason: str) -> ValueError:
    return ValueError(f"the {grammar.kind} cannot be followed: {one_line(reason)}")


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."
