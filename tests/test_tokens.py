"""Common prefixes of token arrays, and turns that extend each other."""

import itertools
from types import SimpleNamespace

import numpy as np

from turnwise.tokens import common_prefix, extends


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_common_prefix():
    assert common_prefix(tokens("abc"), tokens("abd")) == 2
    assert common_prefix(tokens("abc"), tokens("ab")) == 2
    assert common_prefix(tokens("abc"), tokens("xbc")) == 0
    assert common_prefix(tokens(""), tokens("x")) == 0


def test_turns_of_one_buffer_extend_each_other_as_their_copies_do():
    """Where two arrays begin in memory says that they are equal only if they are views of the same tokens."""
    buffer = tokens("abcabcab")
    spans = [(start, start + p, start + p + a) for start in (0, 1, 3) for p in (1, 3) for a in (0, 1, 2)]
    views = [SimpleNamespace(prompt=buffer[a:b], action=buffer[b:c]) for a, b, c in spans]
    views += [
        SimpleNamespace(prompt=buffer[::2], action=buffer[1::2]),
        SimpleNamespace(prompt=buffer, action=buffer[:1]),
    ]
    copies = [SimpleNamespace(prompt=each.prompt.copy(), action=each.action.copy()) for each in views]
    found = [extends(one, other) for one, other in itertools.product(views, views)]
    assert found == [extends(one, other) for one, other in itertools.product(copies, copies)]
    assert {True, False} == set(found)
