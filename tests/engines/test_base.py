import math
import pickle
import time

import numpy as np
import pytest

from turnwise.engines.base import LONGEST_STOP, MOST_STOPS, MOST_TOKENS, BusyTime, Sampling, checked_prompt

REFUSED = [
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", 10**30),
    ("max_tokens", 3.0),
    ("max_tokens", True),
    ("max_tokens", None),
    ("temperature", -0.5),
    ("temperature", -1e-320),
    ("temperature", 1e-40),
    ("temperature", 1e-320),
    ("temperature", 9e-7),
    ("temperature", 1e38),
    ("temperature", 10**400),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 1j),
    ("top_p", 0),
    ("top_p", -0.1),
    ("top_p", 2),
    ("top_p", 1e-40),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_k", 2**63),
    ("top_k", 10**30),
    ("top_k", 10**5000),
    ("top_k", 2.5),
    ("stop", ("",)),
    ("stop", ("a", "\ud800")),
    ("stop", "a string"),
    ("stop", (b"bytes",)),
    ("stop", ("x" * (LONGEST_STOP + 1),)),
    ("stop", tuple(map(str, range(MOST_STOPS + 1)))),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda part: ascii(part)[:20] if part != 10**5000 else "huge")
def test_what_cannot_be_computed_is_no_sampling(name, value):
    with pytest.raises(ValueError, match="stop" if name == "stop" else name) as caught:
        Sampling(**{"max_tokens": 8, name: value})
    said = str(caught.value)
    assert type(caught.value) is ValueError
    assert "\n" not in said
    assert len(said) < 150
    said.encode()


def test_what_can_be_computed_is_kept_as_plain_numbers():
    made = Sampling(np.int64(0), np.float32(0.5), np.float64(1), np.int32(7), ["a", "\ufffd"])
    assert made == Sampling(0, 0.5, 1.0, 7, ("a", "\ufffd"))
    assert [type(value) for value in (made.max_tokens, made.temperature, made.top_p, made.top_k)] == [
        int,
        float,
        float,
        int,
    ]
    assert pickle.loads(pickle.dumps(made)) == made
    for temperature in (0, -0.0, 1e-6, 1, 1e6):
        assert Sampling(1, temperature).temperature == temperature
    assert Sampling(MOST_TOKENS, top_k=MOST_TOKENS).top_k == MOST_TOKENS


PROMPTS = [
    ([], "at least one"),
    ([[1, 2]], "dimensions"),
    (7, "dimensions"),
    (np.ones(20, np.int32), "no room"),
    ([1.0, 2.0], "float64"),
    ([True, False], "bool"),
    (["a"], "whole numbers"),
    ([None], "whole numbers"),
    ([10**30], "whole numbers"),
    ([-1, 3], "the token -1"),
    ([1, 50], "0 to 49"),
    (np.array([1, 2**40]), "the token 1099511627776"),
    (np.array([2**63], np.uint64), "the token"),
]


@pytest.mark.parametrize(("prompt", "said"), PROMPTS, ids=[said for _, said in PROMPTS])
def test_a_prompt_that_no_engine_can_read_is_refused(prompt, said):
    with pytest.raises(ValueError, match=said):
        checked_prompt(prompt, 0, context=20, vocabulary=50)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, 1.5, None, "7"])
def test_a_seed_is_64_bits(seed):
    with pytest.raises(ValueError, match="64 bits"):
        checked_prompt([1], seed, context=20)


def test_a_prompt_is_read_as_tokens_of_32_bits():
    for given in ([0, 49], np.array([0, 49], np.uint8), np.array([0, 49], np.int64)):
        found = checked_prompt(given, np.uint64(3), context=20, vocabulary=50)
        assert found.dtype == np.int32
        assert found.tolist() == [0, 49]


def test_calls_that_overlap_are_timed_once(monkeypatch):
    times = iter([10.0, 13.0, 20.0, 21.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    busy = BusyTime()
    with busy, busy:  # from 10 to 13
        pass
    assert busy.seconds == 3.0
    with busy:  # from 20 on
        assert busy.seconds == 4.5
        monkeypatch.setattr(time, "perf_counter", lambda: 22.0)
    assert busy.seconds == 5.0
