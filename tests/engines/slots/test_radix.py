import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.slots.kv_layout import Shapes
from turnwise.engines.slots.radix import Radix, common_length

SHAPES = Shapes(((2, 3),), {0: (0, 0), 1: (0, 1)}, torch.float32, "cpu")


def radix(capacity=1000):
    return Radix(SHAPES, capacity)


def tokens(text):
    return np.array([ord(letter) for letter in text], np.int32)


def spelled(node):
    """What is read on the way to the end of a node."""
    return "".join(chr(t) for each in reversed(list(node.path())) for t in each.tokens)


def compute(tree, node):
    """Fill a path with numbers that are a function of what was read: what a model does."""
    assert tree.make_room(tree.missing(node))
    tree.fill_in(node)
    for each in node.path():
        for place in range(each.filled, len(each.tokens)):
            each.states[0][:, :, :, place] = meaning(spelled(each)[: each.start + place + 1])
        each.filled = len(each.tokens)


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
            assert node.filled == 0
            continue
        spent += len(node.tokens)
        for place in range(node.filled):
            assert (node.states[0][:, :, :, place] == meaning(spelled(node)[: node.start + place + 1])).all()
    return spent


def test_common_length():
    assert common_length(tokens("abc"), tokens("abd")) == 2
    assert common_length(tokens("abc"), tokens("ab")) == 2
    assert common_length(tokens("abc"), tokens("xbc")) == 0
    assert common_length(tokens(""), tokens("x")) == 0


def test_prefixes_are_shared_and_split_where_they_part():
    tree = radix()
    first = tree.enter(tokens("hello world"))
    compute(tree, first)
    second = tree.enter(tokens("hello there"))
    assert [node.tokens.tobytes().decode("utf-32") for node in second.path()] == ["there", "hello "]
    assert spelled(first) == "hello world"  # the same object, now the second half
    assert first.tokens.tolist() == tokens("world").tolist()
    assert first.parent is second.parent
    assert first.full
    assert first.parent.full
    assert not second.full
    assert first.parent.users == 2
    assert tree.missing(second) == 5
    assert check(tree) == tree.spent == 11


def test_a_prefix_of_what_is_there_is_a_node_of_its_own():
    tree = radix()
    compute(tree, tree.enter(tokens("abcdef")))
    node = tree.enter(tokens("abc"))
    assert spelled(node) == "abc"
    assert node.full
    assert tree.enter(tokens("abcdef")).full
    assert tree.enter(tokens("")) is tree.root


def test_a_node_that_is_half_full_is_split_on_either_side():
    for at in (2, 4):
        tree = radix()
        node = tree.enter(tokens("abcdef"))
        tree.fill_in(node)
        for place in range(3):
            node.states[0][:, :, :, place] = meaning("abcdef"[: place + 1])
        node.filled = 3
        upper = tree.enter(tokens("abcdef"[:at]))
        assert (upper.filled, node.filled) == ((2, 1) if at == 2 else (3, 0))
        check(tree)


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_follow():
    tree = radix(capacity=12)
    for text in ("aabb", "aacc", "dddd"):
        node = tree.enter(tokens(text))
        tree.pin(node)
        compute(tree, node)
        tree.unpin(node)
        tree.leave(node)
    assert tree.spent == 10
    assert tree.make_room(3)  # "bb" goes
    assert {spelled(node) for node in tree.nodes()} == {"aa", "aacc", "dddd"}
    assert tree.make_room(7)  # then "cc" and "aa" of the same age
    assert {spelled(node) for node in tree.nodes()} == {"dddd"}
    assert tree.spent == check(tree) == 4


def test_what_is_pinned_stays_and_what_is_waited_for_goes_last():
    tree = radix(capacity=9)
    pinned, wanted, idle = (tree.enter(tokens(text)) for text in ("aaa", "bbb", "ccc"))
    for node in (pinned, wanted, idle):
        tree.pin(node)
        compute(tree, node)
    tree.unpin(wanted)
    tree.unpin(idle)
    tree.leave(idle)
    assert tree.make_room(2)
    assert {spelled(node) for node in tree.nodes()} == {"aaa", "bbb"}
    assert tree.make_room(6)
    assert wanted.states is None
    assert tree.enter(tokens("bbb")) is wanted  # whoever waits still holds it
    assert not tree.make_room(7)
    assert pinned.full


def test_forgetting_leaves_what_is_pinned_to_whoever_pinned_it():
    tree = radix()
    kept, gone = tree.enter(tokens("shared and kept")), tree.enter(tokens("shared and gone"))
    tree.pin(kept)
    compute(tree, kept)
    compute(tree, gone)
    tree.forget()
    assert list(tree.nodes()) == []
    assert tree.spent == len("shared and kept")
    assert kept.full
    assert not tree.enter(tokens("shared and kept")).full
    tree.unpin(kept)
    assert tree.spent == 0


def test_nodes_without_a_purpose_are_not_kept():
    tree = radix()
    node = tree.enter(tokens("abc"))
    tree.leave(node)
    assert list(tree.nodes()) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=9), st.booleans()), max_size=30), st.integers(10, 40))
def test_any_use_leaves_the_tree_whole(asked, capacity):
    tree = radix(capacity)
    held = []
    for text, stays in asked:
        node = tree.enter(tokens(text))
        tree.pin(node)
        if not tree.make_room(tree.missing(node)):
            tree.unpin(node)
            tree.leave(node)
            while held:
                tree.unpin(held[-1])
                tree.leave(held.pop())
            continue
        compute(tree, node)
        assert spelled(node) == text
        held.append(node)
        if not stays:
            held.pop()
            tree.unpin(node)
            tree.leave(node)
        assert all(each.full for other in held for each in other.path())
        assert check(tree) == tree.spent <= capacity
    for node in held:
        tree.unpin(node)
        tree.leave(node)
    assert all(node.users == node.pins == 0 for node in tree.nodes())
    assert tree.make_room(capacity)
    assert list(tree.nodes()) == []
