import random

import pytest

from support.acting import byte_tokenizer
from turnwise.engines.recent_text import WINDOW, RecentText


def bytes_of(tokens):
    """A token per byte; those from 256 on are nothing."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


WORDS = [" a", " b", "c", " ", "", "", "  d", "ab", " ab", "é"]


def stripped(tokens):
    """Words of which the first loses its leading space, as in SentencePiece."""
    return "".join(WORDS[token] for token in tokens).removeprefix(" ")


def joined(tokens):
    return " ".join(map(str, tokens))


def tokenized(tokens):
    return byte_tokenizer().decode(tokens)


def drawn_bytes(draw, size):
    """Whole characters, halves of them, and tokens that are nothing between their bytes."""
    tokens = []
    while len(tokens) < size:
        part = list(draw.choice(["a", "b", "é", "木", "🙂", " "]).encode())
        if draw.random() < 0.2:
            part = part[: draw.randrange(1, len(part) + 1)]
        for byte in part:
            tokens += [byte] + [256] * (draw.random() < 0.2) * draw.randrange(1, 5)
    return tokens[:size]


KINDS = {
    "bytes": (bytes_of, drawn_bytes),
    "stripped": (stripped, lambda draw, size: [draw.randrange(len(WORDS)) for _ in range(size)]),
    "joined": (joined, lambda draw, size: [draw.randrange(12) for _ in range(size)]),
    "tokenizer": (tokenized, lambda draw, size: [draw.randrange(len(byte_tokenizer())) for _ in range(size)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_end_of_the_text_of_all_tokens(kind):
    """And as much of it as is wanted, after every token."""
    decode, drawn = KINDS[kind]
    for seed in range(30):
        draw = random.Random(seed)
        keep = draw.choice([0, 1, 3, 20, 60])
        recent, tokens = RecentText(keep), drawn(draw, 120)
        for end in range(1, len(tokens) + 1):
            found, whole = recent.add(tokens[end - 1], decode), decode(tokens[:end])
            assert whole.endswith(found), (seed, end)
            assert len(found) >= min(len(whole), keep), (seed, end)


def test_a_character_whose_bytes_are_far_apart():
    recent = RecentText(4)
    first, second, third = "木".encode()
    tokens = [97, first, *[256] * 100, second, *[256] * 100, third]
    assert [recent.add(token, bytes_of) for token in tokens][-1] == "a木"


@pytest.mark.parametrize("token", [4, 0x80, 256], ids=["words that are nothing", "half characters", "no bytes"])
def test_a_long_action_costs_as_much_per_token_as_a_short_one(token):
    decoded = 0

    def decode(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return stripped(tokens) if token == 4 else bytes_of(tokens)

    recent = RecentText(100)
    for _ in range(5000):
        recent.add(token, decode)
    assert decoded < 5000 * 4 * WINDOW
    assert len(recent.window) <= WINDOW
