"""The computing part of the in-process engine: slots, the requests in them, and one pass after another.

A request's tokens but the last are looked up in the tree of prefixes; what is missing is filled in, once for all that
want it, and as much per pass as its budget of tokens allows. Then the request samples, one token per pass, from a row
of its own that begins with what no other shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.base import Completion, EngineFailure, vocabulary_of
from turnwise.engines.slots.cache import PassAttention
from turnwise.engines.slots.fused_llama import Stack, stack_of
from turnwise.engines.slots.head import head_of
from turnwise.engines.slots.kv_layout import copy_into, shapes_of
from turnwise.engines.slots.passes import Pass, lay_out
from turnwise.engines.slots.radix import Node, Radix
from turnwise.engines.slots.request import Request
from turnwise.engines.slots.row_cache import Shelves
from turnwise.engines.slots.sample import draw
from turnwise.engines.slots.slot_state import Board, Slots
from turnwise.types import StopReason

Ended = tuple[Request, Completion | EngineFailure]
"""A request that is over, and how."""
MIB = 1 << 20
DEFAULT_CACHE = 1024
"""MiB."""
WORTH_SHARING = 32
"""Tokens of a node from which on it is better attended to together than copied into the row of each."""


class SlotModel:
    """Slots and the cache; one call to `step` computes one pass and samples a token for every request that is ready."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context: int,
        end_tokens: Sequence[int],
        decode: Callable[[list[int]], str],
        dtype: torch.dtype,
        version: int = 0,
        cache: int = 0,
        pass_tokens: int = 2048,
        keep_cache: bool = False,
    ) -> None:
        """`cache` in MiB, 0 for as much as `cache_tokens` says; `keep_cache` reuses prefixes that older weights
        computed."""
        if pass_tokens <= slots:
            raise ValueError(f"engine.pass_tokens = {pass_tokens} must be more than engine.slots = {slots}")
        self.model = model
        self.context = context
        self.vocabulary = vocabulary_of(model)
        self.version = version
        self.dtype = dtype
        self.decode = decode
        self.pass_tokens = pass_tokens
        self.keep_cache = keep_cache
        self.end_tokens = np.array(sorted(set(end_tokens)), np.int64)
        self.device = next(model.parameters()).device.type
        with torch.inference_mode(), self.autocast():
            self.shapes = shapes_of(model, dtype, self.device)
            # In bfloat16 the module decides what is computed in which dtype.
            self.stack = stack_of(model, context) if dtype == torch.float32 else None
            self.head = head_of(model, dtype)
        self.radix = Radix(self.shapes, cache_tokens(cache, context, self.shapes.token_bytes))
        self.shelves = Shelves(self.shapes, context)
        self.board = Board(slots, context, self.device)
        self.free = list(range(slots))
        self.requests: dict[int, Request] = {}  # by slot, in the order of admission
        self.waiting: list[Request] = []
        self.arrived: list[Request] = []
        self.model_seconds = 0.0
        self.prefilled_tokens = 0  # prompt tokens computed, the last of each prompt included
        self.sampled_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.requests or self.waiting or self.arrived)

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        self.arrived.append(request)

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Forget a request whose caller has gone."""
        if request in self.arrived:
            self.arrived.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.radix.leave(request.node)
        elif self.requests.get(request.slot) is request:
            self.vacate(request)

    @torch.inference_mode()
    def abort(self, session: str) -> list[Ended]:
        """End the calls of a session with what was sampled so far."""
        ending = [r for r in (*self.requests.values(), *self.waiting, *self.arrived) if r.session == session]
        for request in ending:
            self.cancel(request)
        return [(request, request.completion(StopReason.abort)) for request in ending]

    def drop_all(self) -> list[Request]:
        """Forget every request and all prefixes, after a failed step."""
        dropped = [*self.requests.values(), *self.waiting, *self.arrived]
        self.requests, self.waiting, self.arrived, self.free = {}, [], [], list(range(len(self.board.length)))
        self.shelves = Shelves(self.shapes, self.context)
        self.radix = Radix(self.shapes, self.radix.capacity)
        return dropped

    # ------------------------------------------------------------ weights

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy weights in, none where the module is shared. Calls that have begun to sample keep their keys
        and values."""
        if weights:
            own = self.model.state_dict()
            if missing := own.keys() - weights.keys():
                raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {sorted(missing)[0]}")
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(weights[name])
        self.version = version
        if self.stack is not None:
            self.stack = Stack(self.model.base_model)
        with torch.inference_mode():
            self.head = head_of(self.model, self.dtype)
        if not self.keep_cache:
            self.restart()
            self.forget()

    @torch.inference_mode()
    def restart(self) -> None:
        """Have requests that have not sampled yet compute their prompts anew: where all tokens of a turn are of one
        version, its keys and values are too."""
        for request in reversed(list(self.requests.values())):
            if self.board.length[request.slot] == self.board.prompt_length[request.slot]:
                self.preempt(request)

    @torch.inference_mode()
    def forget(self) -> None:
        """Drop all prefixes that no call in flight needs, and their order."""
        for request in self.waiting:
            self.radix.leave(request.node)
        self.radix.forget()
        self.free.sort()
        for request in self.waiting:
            request.node = self.radix.enter(request.known[:-1])

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """Admit what fits, compute one pass, sample one token per ready request; what has ended is returned."""
        for request in self.arrived:
            # The last token is always computed by the request itself: its logits are needed.
            request.node = self.radix.enter(request.known[:-1])
        self.waiting += self.arrived
        self.arrived = []
        self.admit()
        self.settle()
        which = self.next_pass()
        if which.size == 0:
            return []
        hidden = self.forward(which)
        for fill in which.fills:
            fill.node.filled += fill.count
            self.prefilled_tokens += fill.count
        return self.sample(which.slots, hidden) if len(which.slots) else []

    def admit(self) -> None:
        """Give waiting requests a slot each, in order, while there are slots and room for their keys and values."""
        while self.waiting and self.free:
            request = self.waiting[0]
            node = request.node
            self.radix.pin(node)
            row = self.shelves.size_for(1)
            if not self.radix.make_room(self.radix.missing(node) + row):
                self.radix.unpin(node)
                assert self.requests, "a request alone has room, or the engine was refused"
                return
            self.radix.fill_in(node)
            self.radix.spent += row
            self.waiting.pop(0)
            self.occupy(self.free.pop(0), request)

    def occupy(self, slot: int, request: Request) -> None:
        self.board.write(slot, request)
        request.slot = slot
        request.admitted = request.admitted or time.perf_counter()
        self.requests[slot] = request
        self.prefilled_tokens += 1

    def vacate(self, request: Request) -> None:
        """Take a request's slot away; what was sampled for it goes with it."""
        slot = request.slot
        self.board.read(slot, request)
        if slot in self.shelves.where:
            self.radix.spent -= self.shelves.size_of(slot)
            self.shelves.drop(slot)
        else:
            self.radix.spent -= self.shelves.size_for(1)
        self.radix.unpin(request.node)
        self.radix.leave(request.node)
        del self.requests[slot]
        self.free.append(slot)
        request.slot = -1

    def settle(self) -> None:
        """Give requests whose prefix is full a row, and rows that are full a longer one."""
        for request in list(self.requests.values()):
            slot = request.slot
            if slot < 0:
                continue  # it lost its slot to one before
            if slot not in self.shelves.where:
                if all(node.full for node in request.node.path()):
                    self.begin(request)
                continue
            needed = int(self.board.length[slot] - self.board.own[slot])
            if needed > (size := self.shelves.size_of(slot)):
                longer = self.shelves.size_for(needed)
                while not self.radix.make_room(longer - size):
                    youngest = next(reversed(self.requests.values()))
                    self.preempt(youngest)
                    if youngest is request:
                        break
                else:
                    self.radix.spent += longer - size
                    self.shelves.move(slot, needed)

    def preempt(self, request: Request) -> None:
        """Send a request back to the front of the queue, to be computed again when there is room."""
        self.vacate(request)
        request.node = self.radix.enter(request.known[:-1])
        self.waiting.insert(0, request)

    def begin(self, request: Request) -> None:
        """Give a request a row that begins with the nodes at the end of its path that it does not share."""
        pieces: list[Node] = []
        shared = request.node
        while shared.parent is not None and not worth_sharing(shared, bool(pieces)):
            pieces.insert(0, shared)
            shared = shared.parent
        slot = request.slot
        known = int(self.board.length[slot])
        size, smallest = self.shelves.size_for(known - shared.end), self.shelves.size_for(1)
        if not self.radix.make_room(size - smallest):
            shared, pieces, size = request.node, [], smallest
        self.radix.spent += size - smallest
        self.shelves.put(slot, known - shared.end, [node.held for node in pieces])
        self.radix.unpin(request.node, above=shared)
        self.radix.leave(request.node, above=shared)
        request.node = shared
        self.board.own[slot] = shared.end

    def next_pass(self) -> Pass:
        """All rows, and as many tokens of prefixes as the budget has left, the oldest requests first."""
        rows: dict[Node, list[int]] = {}
        counts: dict[Node, int] = {}
        budget = self.pass_tokens - len(self.shelves.where)
        for slot, request in self.requests.items():
            if slot in self.shelves.where:
                rows.setdefault(request.node, []).append(slot)
            elif budget:
                for node in reversed(list(request.node.path())):
                    if node.full or node in counts:
                        if node.filled + counts.get(node, 0) < len(node.tokens):
                            break
                        continue
                    counts[node] = min(budget, len(node.tokens) - node.filled)
                    budget -= counts[node]
                    if budget == 0:
                        break
        return lay_out(rows, counts)

    def forward(self, which: Pass) -> torch.Tensor:
        """The last hidden states of the rows of a pass; keys and values of all its tokens are written."""
        tokens, positions = np.empty((2, which.size), np.int64)
        for fill in which.fills:
            here, start = slice(fill.place, fill.place + fill.count), fill.node.filled
            tokens[here] = fill.node.tokens[start : start + fill.count]
            positions[here] = fill.node.start + np.arange(start, start + fill.count)
        last = self.board.length[which.slots] - 1
        tokens[which.places] = self.board.tokens[which.slots, last]
        positions[which.places] = last
        attend = PassAttention(self.shapes, which, self.shelves, self.board.length - 1 - self.board.own)
        before = time.perf_counter()
        hidden = self.compute(
            torch.from_numpy(tokens).to(self.device), torch.from_numpy(positions).to(self.device), attend
        )
        if which.fills:
            hidden = hidden[torch.from_numpy(which.places).to(self.device)]
        self.model_seconds += time.perf_counter() - before
        return hidden

    def compute(self, tokens: torch.Tensor, positions: torch.Tensor, attend: PassAttention) -> torch.Tensor:
        """The last hidden states of tokens at positions."""
        if self.stack is not None:
            return self.stack(tokens, positions, attend)
        states = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "attend": attend}
        with self.autocast():
            return self.model.base_model(**states).last_hidden_state[0]  # type: ignore[no-any-return]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)

    # ------------------------------------------------------------ sampling

    def sample(self, slots: Slots, hidden: torch.Tensor) -> list[Ended]:
        """Draw a token for each slot; the requests that have ended are returned."""
        before, board = time.perf_counter(), self.board
        with self.autocast():
            logits = self.head(hidden)
        drawn, logprobs = draw(logits, board.shape(slots), board.noise(slots))
        tokens, chances = drawn.cpu().numpy(), logprobs.cpu().numpy()
        failed: list[Ended] = []
        if (unreal := np.isnan(chances)).any():
            failed = self.fail_unreal(slots[unreal])
            slots, tokens, chances = slots[~unreal], tokens[~unreal], chances[~unreal]
        begun = slots[board.length[slots] == board.prompt_length[slots]]
        board.add(slots, tokens, chances, self.version)
        self.sampled_tokens += len(slots)
        now = time.perf_counter()
        self.model_seconds += now - before
        for slot in begun:
            self.requests[slot].first = now
        return failed + self.finished(slots, tokens)

    def finished(self, slots: Slots, tokens: NDArray[np.int64]) -> list[Ended]:
        """The requests that the newest tokens ended."""
        ended = np.isin(tokens, self.end_tokens)
        full = self.board.length[slots] >= self.board.limit[slots]
        stops = self.board.has_stops[slots]
        done: list[Ended] = []
        for index in np.flatnonzero(ended | full | stops):
            request = self.requests[slots[index]]
            try:
                if ended[index]:
                    done.append((request, self.finish(request, StopReason.end_token)))
                elif stops[index] and self.has_stop_string(request, int(tokens[index])):
                    done.append((request, self.finish(request, StopReason.stop_string)))
                elif full[index]:
                    done.append((request, self.finish(request, StopReason.length)))
            except Exception as error:  # of a tokenizer, say: it is this request's, and not the others'
                done.append(self.fail(request, str(error)))
        return done

    def has_stop_string(self, request: Request, token: int) -> bool:
        """Whether the newest token completed a stop string."""
        text = request.recent.add(token, self.decode)
        return any(stop in text for stop in request.sampling.stop)

    def fail(self, request: Request, reason: str) -> Ended:
        """End a request with a failure; the others go on."""
        if self.requests.get(request.slot) is request:
            self.vacate(request)
        return request, EngineFailure(f"the engine failed: {reason}")

    def fail_unreal(self, slots: Slots) -> list[Ended]:
        """End the requests whose logits are no numbers. What was computed for them is not to be met again: a row's
        memory becomes padding of others, and nothing times NaN is NaN."""
        failed = []
        for slot in slots.tolist():
            for own in self.shelves.states(slot, 0, self.shelves.size_of(slot)):
                own.zero_()
            failed.append(self.fail(self.requests[slot], "the model's logits are not numbers"))
        self.forget()
        return failed

    def finish(self, request: Request, stop: StopReason) -> Completion:
        self.keep(request)
        self.vacate(request)
        return request.completion(stop)

    def keep(self, request: Request) -> None:
        """Put what a request's row holds into the tree of prefixes, as far as there is room and it is not there."""
        slot, above = request.slot, request.node
        if above.left:
            return  # it was computed with weights, or at a time, that is to be forgotten
        start, end = int(self.board.own[slot]), int(self.board.length[slot]) - 1
        last = self.radix.insert(self.board.tokens[slot, start:end], under=above)
        self.radix.pin(last)
        for node in reversed(list(last.path(above))):
            if node.full:
                continue
            if node.states is None:
                if not self.radix.make_room(len(node.tokens)):
                    break
                node.states = self.shapes.empty(len(node.tokens))
                self.radix.spent += len(node.tokens)
            copy_into(node.held, self.shelves.states(slot, node.start - start, node.end - start))
            node.filled = len(node.tokens)
        self.radix.unpin(last)
        for node in list(last.path(above)):
            self.radix.prune(node)


def worth_sharing(node: Node, has_child: bool) -> bool:
    """Whether others want a node too, or came by it before and may come again."""
    others = node.users > 1 or len(node.children) > has_child
    return others and len(node.tokens) >= WORTH_SHARING


def cache_tokens(cache: int, context: int, token_bytes: int) -> int:
    """How many tokens' keys and values fit into so many MiB; 0 takes 1024, or four contexts if that is more."""
    if token_bytes == 0:
        return 1 << 40
    if not cache:
        return max(DEFAULT_CACHE * MIB // token_bytes, 4 * context)
    tokens = cache * MIB // token_bytes
    if tokens < 2 * context:
        least = -(-2 * context * token_bytes // MIB)
        raise ValueError(
            f"engine.cache = {cache} MiB cannot hold a prompt and a row of {context} tokens each; set it to {least} or "
            f"more, or 0"
        )
    return tokens
