from itertools import pairwise

import numpy as np

from turnwise.engines.slots.passes import lay_out
from turnwise.engines.slots.radix import PrefixNode


def node(text, parent, filled=None):
    tokens = np.array([ord(letter) for letter in text], np.int32)
    made = PrefixNode(tokens, parent, parent.end if parent else 0)
    made.num_cached_tokens = len(tokens) if filled is None else filled
    if parent is not None:
        parent.children[int(tokens[0])] = made
    return made


def seen_by(batch):
    """What each token of a pass attends to beside the pass, as text."""
    seen = [[] for _ in range(batch.size)]
    for level in batch.levels:
        assert all(one.end <= other.start for one, other in pairwise(level))
        for read in level:
            for place in range(read.start, read.end):
                seen[place].append("".join(map(chr, read.node.tokens[: read.num_keys])))
    return ["".join(parts) for parts in seen]


def test_rows_see_all_that_they_follow():
    root = node("", None)
    system = node("system ", root)
    first, second = node("first ", system), node("second ", system)
    batch = lay_out({second: [4], first: [2, 7], system: [0], root: [5]}, {})
    found = dict(zip(batch.slots.tolist(), [seen_by(batch)[place] for place in batch.slot_index], strict=True))
    assert found == {4: "system second ", 2: "system first ", 7: "system first ", 0: "system ", 5: ""}
    assert batch.size == 5
    assert sum(len(level) for level in batch.levels) == 3  # one read per node, whoever follows it


def test_a_prefill_sees_what_comes_before_and_rows_see_it():
    root = node("", None)
    prompt = node("prompt ", root)
    growing = node("abcdef", prompt, filled=2)
    fresh = node("xyz", prompt, filled=0)
    child = node("later", growing, filled=0)
    batch = lay_out({prompt: [1]}, {growing: 4, fresh: 2, child: 5})
    seen = seen_by(batch)
    prefills = {"".join(map(chr, prefill.node.tokens)): (prefill.start, prefill.count) for prefill in batch.prefills}
    assert {name: count for name, (_, count) in prefills.items()} == {"abcdef": 4, "xyz": 2, "later": 5}
    for name, before in (("abcdef", "prompt ab"), ("xyz", "prompt "), ("later", "prompt abcdef")):
        place, count = prefills[name]
        assert seen[place : place + count] == [before] * count
    assert seen[batch.slot_index[0]] == "prompt "
    assert batch.size == 12


def test_detached_trees_are_read_too():
    old, new = node("", None), node("", None)
    batch = lay_out({node("old", old): [0], node("new", new): [1]}, {})
    assert sorted(seen_by(batch)) == ["new", "old"]


def test_long_chains():
    last = root = node("", None)
    for place in range(3000):
        last = node(chr(97 + place % 26), last)
    batch = lay_out({last: [0]}, {})
    assert len(seen_by(batch)[0]) == 3000
    assert root.end == 0


def test_nothing_to_do():
    assert lay_out({}, {}).size == 0
