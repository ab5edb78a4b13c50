"""The scheduler of the slot engine: which requests wait, which run, where their keys and values are, and what the next
pass computes.

A waiting request is admitted when a slot is free and its prefix has memory. The tree of prefixes is asked for all of
its tokens but the last; the tokens it has not cached are prefilled, once for all requests that share them, and as many
per pass as the budget allows. Then the request decodes, one token per pass, from a row that begins with the tokens that
no other request shares. Where rows run out of memory, the youngest request is preempted.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from turnwise.engines.slots.kv_layout import KVLayout, copy_into, token_range
from turnwise.engines.slots.passes import Pass, lay_out
from turnwise.engines.slots.radix import PrefixNode, Radix, RouteRows
from turnwise.engines.slots.request import NO_SLOT, Request
from turnwise.engines.slots.row_cache import RowCache
from turnwise.engines.slots.slot_state import SlotState

WORTH_SHARING = 32
"""Nodes of at least so many tokens are attended to together; shorter ones are copied into the row of each request."""


class Scheduler:
    """Waiting and running requests, and the memory of their keys and values."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_slots: int,
        context: int,
        capacity: int,
        pass_tokens: int,
        route_rows: RouteRows | None = None,
    ) -> None:
        """`capacity` in tokens, of prefixes and rows together; with `route_rows` the routes of all tokens are kept."""
        self.layout = layout
        self.context = context
        self.pass_tokens = pass_tokens
        self.radix = Radix(layout, capacity, route_rows)
        self.rows = RowCache(layout, context)
        self.state = SlotState(num_slots, context, layout.device, route_rows)
        self.free_slots = list(range(num_slots))
        self.submitted: list[Request] = []
        """Requests that the tree of prefixes has not been asked for yet."""
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        """By slot, in the order of admission."""
        self.prefilled_tokens = 0
        """Prompt tokens computed, the last of each prompt included."""

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self.submitted)

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Drop a request whose caller has gone."""
        if request in self.submitted:
            self.submitted.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.radix.remove_user(request.node)
        elif self.is_running(request):
            self.release_slot(request)

    @torch.inference_mode()
    def cancel_session(self, session: str) -> list[Request]:
        """Drop the requests of a session; they are returned with the tokens sampled so far."""
        requests = [r for r in (*self.running.values(), *self.waiting, *self.submitted) if r.session == session]
        for request in requests:
            self.cancel(request)
        return requests

    def drop_all(self) -> list[Request]:
        """Drop every request and all prefixes, after a failed step."""
        dropped = [*self.running.values(), *self.waiting, *self.submitted]
        self.running, self.waiting, self.submitted = {}, [], []
        self.free_slots = list(range(self.state.num_slots))
        self.rows = RowCache(self.layout, self.context)
        self.radix = Radix(self.layout, self.radix.capacity, self.radix.route_rows)
        return dropped

    def is_running(self, request: Request) -> bool:
        return self.running.get(request.slot) is request

    @torch.inference_mode()
    def forget(self) -> None:
        """Drop all prefixes that no running request needs, and the order in which they were used."""
        for request in self.waiting:
            self.radix.remove_user(request.node)
        self.radix.forget()
        self.rows.spare.clear()
        self.free_slots.sort()
        for request in self.waiting:
            self.enter_tree(request)

    @torch.inference_mode()
    def preempt_prefills(self) -> None:
        """Have requests that have not sampled yet compute their prompts again. After a load of weights, a turn whose
        tokens are all of one version then has keys and values of that version too."""
        for request in reversed(list(self.running.values())):
            if self.state.length[request.slot] == self.state.prompt_length[request.slot]:
                self.preempt(request)

    # ------------------------------------------------------------ slots

    def schedule(self) -> Pass:
        """Admit what fits, give rows to requests whose prefix is cached, and lay out the next pass."""
        for request in self.submitted:
            self.enter_tree(request)
        self.waiting += self.submitted
        self.submitted = []
        self.admit()
        self.grow_rows()
        self.rows.close_gaps()
        return self.next_pass()

    def enter_tree(self, request: Request) -> None:
        # The last token is always computed by the request itself: its logits are needed.
        request.node = self.radix.add_user(request.all_tokens[:-1])

    def admit(self) -> None:
        """Give waiting requests a slot each, in order, while there are slots and memory for their keys and values."""
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            self.radix.pin(request.node)
            smallest_row = self.rows.bucket_size(1)
            needed = self.radix.num_unallocated(request.node) + smallest_row
            if not self.radix.make_room(needed):
                self.radix.unpin(request.node)
                assert self.running, "one request alone always fits: the engine refused a smaller cache"
                return
            if not request.admitted_at:
                request.cached = sum(node.num_cached_tokens for node in request.node.path())
            self.radix.allocate_path(request.node, self.radix.num_free - needed)
            self.radix.num_allocated += smallest_row
            self.waiting.pop(0)
            self.allocate_slot(request)

    def allocate_slot(self, request: Request) -> None:
        slot = self.free_slots.pop(0)
        self.state.write(slot, request)
        request.slot = slot
        request.admitted_at = request.admitted_at or time.perf_counter()
        self.running[slot] = request
        self.prefilled_tokens += 1

    def release_slot(self, request: Request) -> None:
        """Take a request's slot away; the request keeps the tokens sampled in it."""
        slot = request.slot
        self.state.read(slot, request)
        if slot in self.rows.location:
            self.read_routes(request)
            self.radix.num_allocated -= self.rows.row_size(slot)
            self.rows.release(slot)
        else:
            self.radix.num_allocated -= self.rows.bucket_size(1)
        self.radix.unpin(request.node)
        self.radix.remove_user(request.node)
        del self.running[slot]
        self.free_slots.append(slot)
        request.slot = NO_SLOT

    def read_routes(self, request: Request) -> None:
        """Give a request the routes of its tokens from where it asked for them, but for the last, which was not
        computed."""
        if request.sampling.routes is None or self.state.routes is None:
            return
        slot, start = request.slot, int(self.state.row_start[request.slot])
        path = [node for node in request.node.path() if node.routes is not None][::-1]
        parts = [node.routes[: len(node.tokens)] for node in path if node.routes is not None]
        parts.append(self.state.routes[slot, start : max(start, int(self.state.length[slot]) - 1)])
        request.routes = np.concatenate(parts)[request.sampling.routes :]

    def preempt(self, request: Request) -> None:
        """Send a request back to the front of the queue, to be computed again when there is memory."""
        self.release_slot(request)
        self.enter_tree(request)
        self.waiting.insert(0, request)

    # ------------------------------------------------------------ rows

    def grow_rows(self) -> None:
        """Give requests whose prefix is cached a row, and rows that are full a longer one."""
        self.rows.num_likely = len(self.running)
        for request in list(self.running.values()):
            slot = request.slot
            if slot == NO_SLOT:
                continue  # it was preempted for a request before it
            if slot not in self.rows.location:
                if all(node.is_cached for node in request.node.path()):
                    self.start_decoding(request)
                continue
            needed = int(self.state.length[slot] - self.state.row_start[slot])
            if needed > (size := self.rows.row_size(slot)):
                longer = self.rows.bucket_size(needed)
                while not self.radix.make_room(longer - size):
                    youngest = next(reversed(self.running.values()))
                    self.preempt(youngest)
                    if youngest is request:
                        break
                else:
                    self.radix.num_allocated += longer - size
                    self.rows.grow(slot, needed)

    def start_decoding(self, request: Request) -> None:
        """Give a request a row that begins with the nodes at the end of its path that it does not share."""
        copied: list[PrefixNode] = []
        shared = request.node
        while shared.parent is not None and not worth_sharing(shared, bool(copied)):
            copied.insert(0, shared)
            shared = shared.parent
        slot = request.slot
        length = int(self.state.length[slot])
        size, smallest = self.rows.bucket_size(length - shared.end), self.rows.bucket_size(1)
        if not self.radix.make_room(size - smallest):
            shared, copied, size = request.node, [], smallest
        self.radix.num_allocated += size - smallest
        self.rows.allocate(slot, length - shared.end, [node.own_states for node in copied])
        for node in copied:
            if node.routes is not None and self.state.routes is not None:
                self.state.routes[slot, node.start : node.end] = node.routes[: len(node.tokens)]
        self.radix.unpin(request.node, above=shared)
        self.radix.remove_user(request.node, above=shared)
        request.node = shared
        self.state.row_start[slot] = shared.end

    def cache_row(self, request: Request) -> None:
        """Copy a request's row into the tree of prefixes, as far as there is memory and it is not there."""
        slot, above = request.slot, request.node
        if above.detached:
            return  # older weights computed it, or the tree was told to forget it
        start, end = int(self.state.row_start[slot]), int(self.state.length[slot]) - 1
        last = self.radix.insert(self.state.tokens[slot, start:end], under=above)
        self.radix.pin(last)
        for node in reversed(list(last.path(above))):
            if node.is_cached:
                continue
            if not self.radix.make_room(node.num_unallocated):
                break
            self.radix.allocate(node, self.radix.num_free - node.num_unallocated)
            known, first = node.num_cached_tokens, node.start + node.num_cached_tokens
            new = token_range(node.allocated, known, len(node.tokens))
            copy_into(new, self.rows.states(slot, first - start, node.end - start))
            if node.routes is not None and self.state.routes is not None:
                node.routes[known : len(node.tokens)] = self.state.routes[slot, first : node.end]
            node.num_cached_tokens = len(node.tokens)
        self.radix.unpin(last)
        for node in list(last.path(above)):
            self.radix.prune(node)

    def erase_row(self, slot: int) -> None:
        """Overwrite a row that holds NaN: its memory becomes padding of other rows, and 0 times NaN is NaN."""
        for tensor in self.rows.states(slot, 0, self.rows.row_size(slot)):
            tensor.zero_()

    # ------------------------------------------------------------ passes

    def next_pass(self) -> Pass:
        """All rows, and as many prefix tokens as the budget has left, the oldest requests first."""
        decoding: dict[PrefixNode, list[int]] = {}
        prefill_counts: dict[PrefixNode, int] = {}
        budget = self.pass_tokens - len(self.rows.location)
        for slot, request in self.running.items():
            if slot in self.rows.location:
                decoding.setdefault(request.node, []).append(slot)
            elif budget:
                for node in reversed(list(request.node.path())):
                    if node.is_cached or node in prefill_counts:
                        if node.num_cached_tokens + prefill_counts.get(node, 0) < len(node.tokens):
                            break
                        continue
                    prefill_counts[node] = min(budget, len(node.tokens) - node.num_cached_tokens)
                    budget -= prefill_counts[node]
                    if budget == 0:
                        break
        return lay_out(decoding, prefill_counts)

    def prefilled(self, batch: Pass) -> None:
        """Note that a pass has computed the keys and values of its prefills."""
        for prefill in batch.prefills:
            prefill.node.num_cached_tokens += prefill.count
            self.prefilled_tokens += prefill.count


def worth_sharing(node: PrefixNode, has_child: bool) -> bool:
    """Whether other requests read a node too, or did before and may again. `has_child`: whether the request itself has
    a node below it."""
    is_shared = node.users > 1 or len(node.children) > has_child
    return is_shared and len(node.tokens) >= WORTH_SHARING
