from typing import Any

import numpy as np
import pytest

from turnwise.seeds import seed_of, uniforms


def test_seeds_are_these():
    """A change here changes every run: old runs could not be resumed or repeated."""
    assert seed_of(0, "train", "hops", "hops-1", 0, 0, 0, 0) == 15180391645009983754
    assert seed_of("") == 13020603013274838756


def test_noise_is_this():
    seeds = np.array([0, 1, 2**64 - 1, seed_of("a")], np.uint64)
    expected = [0.8833108082136426, 0.762894391911761, 0.4093054053323023, 0.22725595922969832]
    assert uniforms(seeds, np.array([0, 5, 2**40, 0])).tolist() == expected
    assert expected[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53  # the published first output of splitmix64


def test_a_seed_depends_on_every_part_and_its_place():
    base: tuple[Any, ...] = (0, "train", "hops", "task", 0, 0, 0, 0)
    seeds = {seed_of(*base)}
    for place, part in enumerate(base):
        other = part + "x" if isinstance(part, str) else part + 1
        seeds.add(seed_of(*base[:place], other, *base[place + 1 :]))
    assert len(seeds) == len(base) + 1
    assert seed_of(1, 23) != seed_of(12, 3)
    assert all(0 <= seed < 2**64 for seed in seeds)


def grid(num_seeds, num_positions):
    """Noise [seeds, positions] of the seeds of consecutive attempts."""
    seeds = np.array([seed_of("grid", number) for number in range(num_seeds)], np.uint64)
    return uniforms(np.repeat(seeds, num_positions), np.tile(np.arange(num_positions), num_seeds)).reshape(
        num_seeds, num_positions
    )


def test_noise_does_not_depend_on_what_else_is_asked():
    seeds = np.array([7, 8, 9], np.uint64)
    together = uniforms(seeds, np.array([3, 4, 5]))
    alone = [uniforms(seeds[i : i + 1], np.array([p]))[0] for i, p in enumerate((3, 4, 5))]
    assert together.tolist() == alone
    assert uniforms(seeds, np.array([3, 4, 5], np.int32)).tolist() == alone


def test_noise_is_uniform_in_zero_to_one():
    values = grid(400, 250).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, 100, (0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: mean 99, std 14
    assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_noise_is_independent_over_positions_and_over_seeds(lag):
    values = grid(300, 300)
    raw = uniforms(np.repeat(np.arange(300, dtype=np.uint64), 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    for noise in (values, raw):  # attempts whose seeds are neighbours too
        for first, second in ((noise[:-lag], noise[lag:]), (noise[:, :-lag], noise[:, lag:])):
            assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.015  # std is 0.0033
    quarters = np.histogram2d(values[:, :-lag].ravel(), values[:, lag:].ravel(), 4, [[0, 1], [0, 1]])[0]
    expected = quarters.sum() / 16
    assert ((quarters - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom


def test_an_attempt_does_not_meet_the_noise_of_another_shifted():
    """Splitmix adds a constant per position: seeds that differ by it would repeat each other, moved by one token."""
    values = grid(200, 50)
    assert len(np.unique(values)) == values.size
