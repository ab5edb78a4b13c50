import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.slots import radix as radix_module
from turnwise.engines.slots.kv_layout import KVLayout, copy_into
from turnwise.engines.slots.radix import SPARE_SHARE, Radix

LAYOUT = KVLayout(((2, 3),), {0: (0, 0), 1: (0, 1)}, torch.float32, "cpu")


def radix(capacity=1000):
    return Radix(LAYOUT, capacity)


def tokens(text):
    return np.array([ord(letter) for letter in text], np.int32)


def spelled(node):
    """What is read on the way to the end of a node."""
    return "".join(chr(t) for each in reversed(list(node.path())) for t in each.tokens)


def compute(tree, node, spare=False):
    """Fill a path with numbers that are a function of what was read: what a model does."""
    needed = tree.num_unallocated(node)
    assert tree.make_room(needed)
    tree.allocate_path(node, tree.num_free - needed if spare else 0)
    for each in node.path():
        for place in range(each.num_cached_tokens, len(each.tokens)):
            each.states[0][:, :, :, place] = meaning(spelled(each)[: each.start + place + 1])
        each.num_cached_tokens = len(each.tokens)


def meaning(text):
    return float(hash(text) % 1000)


def check(tree):
    """Every node has at least a token, follows its parent, and holds the numbers of what is read there."""
    spent = 0
    for node in tree.nodes():
        assert len(node.tokens) > 0
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.start == node.parent.end
        if node.states is None:
            assert node.num_cached_tokens == node.num_allocated == 0
            continue
        assert node.num_cached_tokens <= node.num_allocated == node.states[0].shape[-2]
        assert node.num_allocated <= len(node.tokens) * (1 + 1 / SPARE_SHARE)
        spent += node.states[0].shape[-2]
        for place in range(node.num_cached_tokens):
            assert (node.states[0][:, :, :, place] == meaning(spelled(node)[: node.start + place + 1])).all()
    return spent


def test_prefixes_are_shared_and_split_where_they_part():
    tree = radix()
    first = tree.add_user(tokens("hello world"))
    compute(tree, first)
    second = tree.add_user(tokens("hello there"))
    assert [node.tokens.tobytes().decode("utf-32") for node in second.path()] == ["there", "hello "]
    assert spelled(first) == "hello world"  # the same object, now the second half
    assert first.tokens.tolist() == tokens("world").tolist()
    assert first.parent is second.parent
    assert first.is_cached
    assert first.parent.is_cached
    assert not second.is_cached
    assert first.parent.users == 2
    assert tree.num_unallocated(second) == 5
    assert check(tree) == tree.num_allocated == 11


def test_a_prefix_of_an_existing_node_becomes_a_node():
    tree = radix()
    compute(tree, tree.add_user(tokens("abcdef")))
    node = tree.add_user(tokens("abc"))
    assert spelled(node) == "abc"
    assert node.is_cached
    assert tree.add_user(tokens("abcdef")).is_cached
    assert tree.add_user(tokens("")) is tree.root


def test_a_node_that_is_half_full_is_split_on_either_side():
    for at in (2, 4):
        tree = radix()
        node = tree.add_user(tokens("abcdef"))
        tree.allocate_path(node)
        for place in range(3):
            node.states[0][:, :, :, place] = meaning("abcdef"[: place + 1])
        node.num_cached_tokens = 3
        upper = tree.add_user(tokens("abcdef"[:at]))
        assert (upper.num_cached_tokens, node.num_cached_tokens) == ((2, 1) if at == 2 else (3, 0))
        check(tree)


def test_the_last_node_of_a_conversation_grows_with_it():
    tree = radix()
    said = ""
    for turn in range(20):
        said += f"question {turn} answer {turn} "
        node = tree.add_user(tokens(said))
        tree.pin(node)
        assert [each.num_cached_tokens > 0 for each in node.path()] == [turn > 0]
        compute(tree, node)
        tree.unpin(node)
        tree.remove_user(node)
        assert len(list(tree.nodes())) == 1
        assert check(tree) == tree.num_allocated == len(said)


def test_a_conversation_that_grows_is_seldom_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(radix_module, "copy_into", lambda to, of: (copied.append(of[0].shape[-2]), copy_into(to, of)))
    tree = radix()
    for length in range(10, 500, 10):
        node = tree.add_user(tokens("".join(chr(100 + place) for place in range(length))))
        tree.pin(node)
        compute(tree, node, spare=True)
        tree.unpin(node)
        tree.remove_user(node)
        assert check(tree) == tree.num_allocated >= length
    assert sum(copied) < SPARE_SHARE * 500 + 500  # of 10 + 20 + ... + 480 = 11,760


def test_spare_memory_is_never_more_than_there_is_and_ends_with_a_split():
    tree = radix(capacity=100)
    for length in (80, 90):
        node = tree.add_user(tokens("".join(chr(100 + place) for place in range(length))))
        compute(tree, node, spare=True)
        tree.remove_user(node)
    assert (node.num_spare, tree.num_allocated, tree.num_free) == (10, 100, 0)
    tree.add_user(tokens("".join(chr(100 + place) for place in range(40))))
    assert check(tree) == tree.num_allocated == 90


def test_a_node_that_is_read_or_followed_does_not_grow():
    for holds in ("user", "pin", "child"):
        tree = radix()
        node = tree.add_user(tokens("abc"))
        compute(tree, node)
        if holds == "pin":
            tree.pin(node)
        if holds == "child":
            compute(tree, tree.add_user(tokens("abcx")))
        if holds != "user":
            tree.remove_user(node)
        assert tree.add_user(tokens("abcdef")).parent is node
        assert spelled(node) == "abc"
        check(tree)


def test_an_end_that_nobody_computes_any_more_is_cut_off():
    tree = radix()
    compute(tree, first := tree.add_user(tokens("abc")))
    tree.remove_user(first)
    assert tree.add_user(tokens("abcdef")) is first
    assert tree.num_unallocated(first) == 3
    tree.remove_user(first)
    assert spelled(first) == "abc"
    assert first.is_cached


def test_a_grown_node_is_split_where_its_memory_ends_or_elsewhere():
    for at in (2, 3, 4):
        tree = radix()
        compute(tree, first := tree.add_user(tokens("abc")))
        tree.remove_user(first)
        grown = tree.add_user(tokens("abcdef"))
        upper = tree.add_user(tokens("abcdef"[:at]))
        assert upper.num_allocated + grown.num_allocated == upper.num_cached_tokens + grown.num_cached_tokens == 3
        compute(tree, grown)
        assert check(tree) == tree.num_allocated == 6


def test_of_a_long_conversation_the_second_half_goes_first():
    tree = radix(capacity=250)
    text = "".join(chr(100 + place) for place in range(200))
    compute(tree, node := tree.add_user(tokens(text)))
    tree.remove_user(node)
    assert tree.make_room(80)
    assert [spelled(each) for each in tree.nodes()] == [text[:100]]
    assert check(tree) == tree.num_allocated == 100
    assert tree.make_room(250)
    assert list(tree.nodes()) == []


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_follow():
    tree = radix(capacity=12)
    for text in ("aabb", "aacc", "dddd"):
        node = tree.add_user(tokens(text))
        tree.pin(node)
        compute(tree, node)
        tree.unpin(node)
        tree.remove_user(node)
    assert tree.num_allocated == 10
    assert tree.make_room(3)  # "bb" goes
    assert {spelled(node) for node in tree.nodes()} == {"aa", "aacc", "dddd"}
    assert tree.make_room(7)  # then "cc" and "aa" of the same age
    assert {spelled(node) for node in tree.nodes()} == {"dddd"}
    assert tree.num_allocated == check(tree) == 4


def test_pinned_nodes_stay_and_awaited_nodes_are_evicted_last():
    tree = radix(capacity=9)
    pinned, wanted, idle = (tree.add_user(tokens(text)) for text in ("aaa", "bbb", "ccc"))
    for node in (pinned, wanted, idle):
        tree.pin(node)
        compute(tree, node)
    tree.unpin(wanted)
    tree.unpin(idle)
    tree.remove_user(idle)
    assert tree.make_room(2)
    assert {spelled(node) for node in tree.nodes()} == {"aaa", "bbb"}
    assert tree.make_room(6)
    assert wanted.states is None
    assert tree.add_user(tokens("bbb")) is wanted  # whoever waits still holds it
    assert not tree.make_room(7)
    assert pinned.is_cached


def test_forgetting_leaves_pinned_nodes_usable():
    tree = radix()
    kept, gone = tree.add_user(tokens("shared and kept")), tree.add_user(tokens("shared and gone"))
    tree.pin(kept)
    compute(tree, kept)
    compute(tree, gone)
    tree.forget()
    assert list(tree.nodes()) == []
    assert tree.num_allocated == len("shared and kept")
    assert kept.is_cached
    assert not tree.add_user(tokens("shared and kept")).is_cached
    tree.unpin(kept)
    assert tree.num_allocated == 0


def test_nodes_without_a_purpose_are_not_kept():
    tree = radix()
    node = tree.add_user(tokens("abc"))
    tree.remove_user(node)
    assert list(tree.nodes()) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=9), st.booleans()), max_size=30), st.integers(10, 40))
def test_any_use_leaves_the_tree_whole(asked, capacity):
    tree = radix(capacity)
    held = []
    for text, stays in asked:
        node = tree.add_user(tokens(text))
        tree.pin(node)
        if not tree.make_room(tree.num_unallocated(node)):
            tree.unpin(node)
            tree.remove_user(node)
            while held:
                tree.unpin(held[-1])
                tree.remove_user(held.pop())
            continue
        compute(tree, node, spare=True)
        assert spelled(node) == text
        held.append(node)
        if not stays:
            held.pop()
            tree.unpin(node)
            tree.remove_user(node)
        assert all(each.is_cached for other in held for each in other.path())
        assert check(tree) == tree.num_allocated <= capacity
    for node in held:
        tree.unpin(node)
        tree.remove_user(node)
    assert all(node.users == node.pins == 0 for node in tree.nodes())
    assert tree.make_room(capacity)
    assert list(tree.nodes()) == []
