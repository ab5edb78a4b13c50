"""The tree of prefixes whose keys and values are cached or will be: a node is a run of tokens after its parent's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from turnwise.engines.slots.kv_layout import KVLayout, KVStates, copy_into, token_range
from turnwise.routes import Routes
from turnwise.tokens import Tokens, common_prefix

RouteRows = Callable[[int], Routes]
"""Empty routes for so many tokens."""
SPARE_SHARE = 4
"""A conversation that has outgrown its memory gets so much of its length in addition."""
SMALLEST_HALVED = 64
"""A node with memory for at least so many tokens is evicted by halves."""


class PrefixNode:
    """A run of tokens that follows its parent's. `states` has memory for `num_allocated` tokens, which may be more than
    the node has, and holds the keys and values of its first `num_cached_tokens`; `routes` has their experts."""

    __slots__ = (
        "children",
        "detached",
        "last_used",
        "num_allocated",
        "num_cached_tokens",
        "parent",
        "pins",
        "routes",
        "start",
        "states",
        "tokens",
        "users",
    )

    def __init__(self, tokens: Tokens, parent: PrefixNode | None, start: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start = start
        self.children: dict[int, PrefixNode] = {}
        self.states: KVStates | None = None
        self.routes: Routes | None = None  # of the same tokens as the states, where the engine records them
        self.num_allocated = 0
        self.num_cached_tokens = 0
        self.pins = 0  # running requests that read it: it must not be evicted
        self.users = 0  # running and waiting requests that read it
        self.last_used = 0
        self.detached = False  # whether the tree has forgotten it, so that it lives only while it is pinned

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_cached(self) -> bool:
        return self.num_cached_tokens == len(self.tokens)

    @property
    def num_unallocated(self) -> int:
        """Tokens that have no memory yet."""
        return max(0, len(self.tokens) - self.num_allocated)

    @property
    def num_spare(self) -> int:
        """Tokens that it has memory for and does not have yet."""
        return max(0, self.num_allocated - len(self.tokens))

    @property
    def is_private(self) -> bool:
        """Whether it may grow at its end: nothing follows it in the tree, and no request reads it."""
        return not (self.parent is None or self.children or self.users or self.pins or self.detached)

    @property
    def allocated(self) -> KVStates:
        """Its keys and values, of a node that has memory for them."""
        assert self.states is not None
        return self.states

    @property
    def own_states(self) -> KVStates:
        """The keys and values of exactly its tokens."""
        return token_range(self.allocated, 0, len(self.tokens))

    def path(self, above: PrefixNode | None = None) -> Iterator[PrefixNode]:
        """This node and its ancestors, from the last to the first, up to `above` or the root, both excluded."""
        node: PrefixNode | None = self
        while node is not None and node is not above and node.parent is not None:
            yield node
            node = node.parent


NO_NODE = PrefixNode(np.zeros(0, np.int32), None, 0)
"""The node of a request that has not been looked up yet."""


class Radix:
    """Prefixes that share their beginnings, in memory for `capacity` tokens. `num_allocated` counts the tokens that
    have memory, those of requests' rows included.

    Where memory is needed, nodes that no request reads are evicted, the least recently used first.
    """

    def __init__(self, layout: KVLayout, capacity: int, route_rows: RouteRows | None = None) -> None:
        self.layout = layout
        self.capacity = capacity
        self.route_rows = route_rows
        self.num_allocated = 0
        self.clock = 0
        self.root = PrefixNode(np.zeros(0, np.int32), None, 0)

    # ------------------------------------------------------------ the tree

    def insert(self, tokens: Tokens, under: PrefixNode | None = None) -> PrefixNode:
        """The node at whose end exactly these tokens were read, from `under` or the root on.

        The last node of a conversation grows with it. A child for the action and one for the observation of every turn
        would be a chain as long as the conversation, and every pass would attend to it node by node."""
        node, start = under or self.root, 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None and node.is_private:
                node.tokens = np.concatenate([node.tokens, tokens[start:]])
                return node
            if child is None:
                child = PrefixNode(tokens[start:].copy(), node, node.end)
                node.children[int(tokens[start])] = child
                return child
            common = common_prefix(child.tokens, tokens[start:])
            node = child if common == len(child.tokens) else self.split(child, common)
            start += common
        return node

    def split(self, node: PrefixNode, count: int) -> PrefixNode:
        """A new parent of a node with the first `count` of its tokens; the node keeps the rest, so that
        whoever holds it still holds the whole path."""
        assert node.parent is not None
        upper = PrefixNode(node.tokens[:count], node.parent, node.start)
        upper.pins, upper.users, upper.last_used, upper.detached = node.pins, node.users, node.last_used, node.detached
        upper.num_cached_tokens = min(node.num_cached_tokens, count)
        self.num_allocated -= node.num_spare
        node.num_allocated -= node.num_spare
        upper.num_allocated = min(node.num_allocated, count)
        if node.states is not None:
            upper.states, upper.routes = self.part(node, 0, upper.num_allocated)
            node.states, node.routes = self.part(node, upper.num_allocated, node.num_allocated)
        upper.children[int(node.tokens[count])] = node
        node.parent.children[int(node.tokens[0])] = upper
        node.parent = upper
        node.tokens, node.start = node.tokens[count:], node.start + count
        node.num_cached_tokens -= upper.num_cached_tokens
        node.num_allocated -= upper.num_allocated
        return upper

    def part(self, node: PrefixNode, start: int, end: int) -> tuple[KVStates | None, Routes | None]:
        """A copy of the memory for some of a node's tokens; None where these are none."""
        if start == end:
            return None, None
        states = self.layout.empty(end - start)
        copy_into(states, token_range(node.allocated, start, end))
        return states, None if node.routes is None else node.routes[start:end].copy()

    def nodes(self) -> Iterator[PrefixNode]:
        stack = [self.root]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    # ------------------------------------------------------------ users

    def add_user(self, tokens: Tokens) -> PrefixNode:
        """The node of a request's tokens, which the request will read."""
        node = self.insert(tokens)
        for each in node.path():
            each.users += 1
        return node

    def remove_user(self, node: PrefixNode, above: PrefixNode | None = None) -> None:
        """Undo `add_user` for the part of the path below `above`; nodes that nobody needs go."""
        for each in list(node.path(above)):
            each.users -= 1
            self.prune(each)

    def prune(self, node: PrefixNode) -> None:
        """Drop a node that nobody needs, or the end of one that has no memory."""
        if node.users or node.children or node.parent is None:
            return
        if node.states is not None:
            node.tokens = node.tokens[: node.num_allocated]
            return
        if node.parent.children.get(int(node.tokens[0])) is node:
            del node.parent.children[int(node.tokens[0])]

    def pin(self, node: PrefixNode) -> None:
        """Protect a path from eviction until it is unpinned."""
        self.clock += 1
        for each in node.path():
            each.pins += 1
            each.last_used = self.clock

    def unpin(self, node: PrefixNode, above: PrefixNode | None = None) -> None:
        for each in list(node.path(above)):
            each.pins -= 1
            if each.detached and not each.pins:
                self.release(each)

    # ------------------------------------------------------------ memory

    @property
    def num_free(self) -> int:
        """Tokens that have memory without anything being evicted."""
        return self.capacity - self.num_allocated

    def num_unallocated(self, node: PrefixNode) -> int:
        """Tokens of a path that have no memory yet."""
        return sum(each.num_unallocated for each in node.path())

    def allocate(self, node: PrefixNode, free: int = 0) -> None:
        """Give a node memory for its keys and values; `make_room` must have found it before. What it holds already
        stays. One that has grown gets more than it needs, of `free` tokens at most: it will grow again, and then it is
        not copied."""
        if not node.num_unallocated:
            return
        size, cached = len(node.tokens), node.num_cached_tokens
        if node.states is not None:
            size += max(0, min(size // SPARE_SHARE, free))
        states = self.layout.empty(size)
        if node.states is not None:
            copy_into(token_range(states, 0, cached), token_range(node.states, 0, cached))
        if self.route_rows is not None:
            routes = self.route_rows(size)
            if node.routes is not None:
                routes[:cached] = node.routes[:cached]
            node.routes = routes
        self.num_allocated += size - node.num_allocated
        node.states, node.num_allocated = states, size

    def allocate_path(self, node: PrefixNode, free: int = 0) -> None:
        """The same for a node and all before it."""
        for each in node.path():
            self.allocate(each, free if each is node else 0)

    def release(self, node: PrefixNode) -> None:
        """Drop a node's keys and values."""
        if node.states is not None:
            self.num_allocated -= node.num_allocated
            node.states, node.routes, node.num_allocated, node.num_cached_tokens = None, None, 0, 0

    def make_room(self, count: int) -> bool:
        """Whether so many more tokens fit, after evicting as many nodes as that needs: the least recently used first,
        those that no request waits for before those that one does. Of a long node the second half may do."""
        lacking = self.num_allocated + count - self.capacity
        if lacking <= 0:
            return True
        idle = [node for node in self.nodes() if node.states is not None and not node.pins]
        if sum(node.num_allocated for node in idle) < lacking:
            return False
        # A node was used no later than its parent and has no more users, so that children go first.
        for node in sorted(idle, key=lambda node: (node.users > 0, node.last_used, -node.start)):
            lacking = self.num_allocated + count - self.capacity
            if lacking <= 0:
                break
            if node.num_allocated >= max(2 * lacking, SMALLEST_HALVED):
                self.split(node, node.num_allocated // 2)
            self.release(node)
            self.prune(node)
        return True

    def forget(self) -> None:
        """Start an empty tree, without a memory of what was used when; pinned nodes stay with those who pinned them."""
        for node in list(self.nodes()):
            node.detached = True
            if not node.pins:
                self.release(node)
        self.root.detached = True
        self.root = PrefixNode(np.zeros(0, np.int32), None, 0)
        self.clock = 0
