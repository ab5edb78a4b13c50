"""Common prefixes of token arrays."""

import numpy as np

from turnwise.tokens import common_prefix


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_common_prefix():
    assert common_prefix(tokens("abc"), tokens("abd")) == 2
    assert common_prefix(tokens("abc"), tokens("ab")) == 2
    assert common_prefix(tokens("abc"), tokens("xbc")) == 0
    assert common_prefix(tokens(""), tokens("x")) == 0
