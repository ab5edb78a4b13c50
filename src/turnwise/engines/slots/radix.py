"""The tree of prefixes whose keys and values are known or about to be: a node is a run of tokens after its parent's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turnwise.engines.slots.kv_layout import Shapes, States, copy_into, part
from turnwise.types import Tokens


class Node:
    """A run of tokens that follows its parent's. Its first `filled` tokens have their keys and values in `states`."""

    __slots__ = ("children", "filled", "left", "parent", "pins", "start", "states", "tokens", "used", "users")

    def __init__(self, tokens: Tokens, parent: Node | None, start: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start = start
        self.children: dict[int, Node] = {}
        self.states: States | None = None
        self.filled = 0
        self.pins = 0  # requests that are being computed with it: it stays
        self.users = 0  # these, and the requests that wait for it
        self.used = 0
        self.left = False  # whether its tree is gone, and it stays only as long as it is pinned

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def full(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def held(self) -> States:
        """Its keys and values, where they have room."""
        assert self.states is not None
        return self.states

    def path(self, above: Node | None = None) -> Iterator[Node]:
        """This node and those before it, from the last to the first, without the root and from `above` on."""
        node: Node | None = self
        while node is not None and node is not above and node.parent is not None:
            yield node
            node = node.parent


NOWHERE = Node(np.zeros(0, np.int32), None, 0)
"""Where a request is before it is looked up."""


class Radix:
    """Prefixes that share their beginnings, in room for `capacity` tokens; `spent` counts what lives elsewhere too.

    What nobody uses is dropped where room is needed, the least recently used first.
    """

    def __init__(self, shapes: Shapes, capacity: int) -> None:
        self.shapes = shapes
        self.capacity = capacity
        self.spent = 0
        self.clock = 0
        self.root = Node(np.zeros(0, np.int32), None, 0)

    # ------------------------------------------------------------ shape

    def insert(self, tokens: Tokens, under: Node | None = None) -> Node:
        """The node at whose end exactly these tokens were read, from `under` or the root on."""
        node, place = under or self.root, 0
        while place < len(tokens):
            child = node.children.get(int(tokens[place]))
            if child is None:
                child = Node(tokens[place:].copy(), node, node.end)
                node.children[int(tokens[place])] = child
                return child
            common = common_length(child.tokens, tokens[place:])
            node = child if common == len(child.tokens) else self.split(child, common)
            place += common
        return node

    def split(self, node: Node, count: int) -> Node:
        """A new node of the first `count` tokens, before the rest. The rest stays the same object, so that whoever
        holds it still holds all of it."""
        assert node.parent is not None
        upper = Node(node.tokens[:count], node.parent, node.start)
        upper.pins, upper.users, upper.used, upper.left = node.pins, node.users, node.used, node.left
        upper.filled = min(node.filled, count)
        if node.states is not None:
            upper.states, lower = self.shapes.empty(count), self.shapes.empty(len(node.tokens) - count)
            copy_into(upper.states, part(node.states, 0, count))
            copy_into(lower, part(node.states, count, len(node.tokens)))
            node.states = lower
        upper.children[int(node.tokens[count])] = node
        node.parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.tokens, node.start, node.filled = node.tokens[count:], node.start + count, node.filled - upper.filled
        return upper

    def nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    # ------------------------------------------------------------ use

    def enter(self, tokens: Tokens) -> Node:
        """The node of a request's tokens, which will be wanted."""
        node = self.insert(tokens)
        for each in node.path():
            each.users += 1
        return node

    def leave(self, node: Node, above: Node | None = None) -> None:
        """Take back `enter` for the part of the path below `above`; what then has no purpose goes."""
        for each in list(node.path(above)):
            each.users -= 1
            self.prune(each)

    def prune(self, node: Node) -> None:
        if node.users or node.children or node.states is not None or node.parent is None:
            return
        if node.parent.children.get(int(node.tokens[0])) is node:
            del node.parent.children[int(node.tokens[0])]

    def pin(self, node: Node) -> None:
        """Keep a path until it is unpinned."""
        self.clock += 1
        for each in node.path():
            each.pins += 1
            each.used = self.clock

    def unpin(self, node: Node, above: Node | None = None) -> None:
        for each in list(node.path(above)):
            each.pins -= 1
            if each.left and not each.pins:
                self.empty(each)

    # ------------------------------------------------------------ room

    def missing(self, node: Node) -> int:
        """Tokens of a path that have no room yet."""
        return sum(len(each.tokens) for each in node.path() if each.states is None)

    def fill_in(self, node: Node) -> None:
        """Give every node of a path its room, which `make_room` has made before."""
        for each in node.path():
            if each.states is None:
                each.states = self.shapes.empty(len(each.tokens))
                self.spent += len(each.tokens)

    def make_room(self, count: int) -> bool:
        """Whether there is room for so many more tokens, once the least recently used of what nobody is computing with
        was dropped: first what nobody wants, then what somebody waits for."""
        lacking = self.spent + count - self.capacity
        if lacking <= 0:
            return True
        idle = [node for node in self.nodes() if node.states is not None and not node.pins]
        if sum(len(node.tokens) for node in idle) < lacking:
            return False
        # A node was used no later than its parent and is wanted by no more, so that children go first.
        for node in sorted(idle, key=lambda node: (node.users > 0, node.used, -node.start)):
            if self.spent + count <= self.capacity:
                break
            self.empty(node)
            self.prune(node)
        return True

    def empty(self, node: Node) -> None:
        """Drop a node's keys and values."""
        if node.states is not None:
            self.spent -= len(node.tokens)
            node.states, node.filled = None, 0

    def forget(self) -> None:
        """Begin anew, without a memory of what was used when; what is pinned stays with whoever pinned it."""
        for node in list(self.nodes()):
            node.left = True
            if not node.pins:
                self.empty(node)
        self.root.left = True
        self.root = Node(np.zeros(0, np.int32), None, 0)
        self.clock = 0


def common_length(one: Tokens, other: Tokens) -> int:
    """How many first tokens two runs have in common."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
