"""The computing part of the slot engine: the forward pass that the scheduler has laid out, and sampling from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.base import Completion, EngineFailure, vocabulary_of
from turnwise.engines.guidance import Guidance
from turnwise.engines.slots.attention import PassAttention
from turnwise.engines.slots.fused_llama import FusedLlama, try_fuse
from turnwise.engines.slots.guided_rows import GuidedRows
from turnwise.engines.slots.head import head_of
from turnwise.engines.slots.kv_layout import read_kv_layout
from turnwise.engines.slots.passes import Pass
from turnwise.engines.slots.request import Request
from turnwise.engines.slots.sample import draw
from turnwise.engines.slots.scheduler import Scheduler
from turnwise.engines.slots.slot_state import SlotIds
from turnwise.learn.casting import Casting
from turnwise.learn.router_checks import known_routers
from turnwise.learn.routers import ARGUMENT, RecordedRoutes
from turnwise.pretrained import CausalLM
from turnwise.routes import Routes
from turnwise.types import StopReason

Finished = tuple[Request, Completion | EngineFailure | ValueError]
"""A request that is over, and its outcome."""
MIB = 1 << 20
DEFAULT_CACHE = 1024
"""MiB."""


class SlotModel:
    """A transformers module and the scheduler of its requests. One call to `step` computes one pass and samples a token
    for every request that is ready."""

    def __init__(
        self,
        model: CausalLM,
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
        guidance: Guidance | None = None,
        record_routes: bool = False,
    ) -> None:
        """`cache` in MiB, 0 for as much as `cache_tokens` says; `keep_cache` reuses prefixes that older weights
        computed; without `guidance` calls may have no grammar; with `record_routes` they may ask for routes."""
        if pass_tokens <= slots:
            raise ValueError(
                f"engine.memory.max_num_batched_tokens = {pass_tokens} must be more than engine.max_num_seqs = {slots}"
            )
        self.model = model
        self.context = context
        self.vocabulary = vocabulary_of(model)
        self.version = version
        self.dtype = dtype
        self.decode = decode
        self.keep_cache = keep_cache
        self.guidance = guidance
        self.end_tokens = np.array(sorted(set(end_tokens)), np.int64)
        self.device = next(model.parameters()).device.type
        self.casting = Casting(model, dtype)
        with torch.inference_mode(), self.computing():
            self.layout = read_kv_layout(model, dtype, self.device)
            check_window(self.layout.window, context)
            # In bfloat16 the module decides what is computed in which dtype.
            self.fused = try_fuse(model, context) if dtype == torch.float32 else None
            self.head = head_of(model, dtype)
        self.routers = known_routers(model) if record_routes else None
        self.scheduler = Scheduler(
            self.layout,
            num_slots=slots,
            context=context,
            capacity=cache_tokens(cache, context, self.layout.token_bytes),
            pass_tokens=pass_tokens,
            route_rows=None if self.routers is None else self.routers.empty,
        )
        self.model_seconds = 0.0
        self.sampled_tokens = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed, the last of each prompt included."""
        return self.scheduler.prefilled_tokens

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)

    # ------------------------------------------------------------ weights

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy weights in; none where the module is shared. Requests that have begun to sample keep their keys and
        values."""
        if weights:
            state = self.model.state_dict()
            if missing := state.keys() - weights.keys():
                raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {sorted(missing)[0]}")
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(weights[name])
        self.version = version
        if self.fused is not None:
            self.fused = FusedLlama(self.model.base_model)
        with torch.inference_mode():
            self.head = head_of(self.model, self.dtype)
        if not self.keep_cache:
            self.scheduler.preempt_prefills()
            self.scheduler.forget()

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Compute the next pass and sample one token per request that is ready; finished requests are returned."""
        batch = self.scheduler.schedule()
        if batch.size == 0:
            return []
        hidden = self.forward(batch)
        self.scheduler.prefilled(batch)
        return self.sample(batch.slots, hidden) if len(batch.slots) else []

    def forward(self, batch: Pass) -> torch.Tensor:
        """The last hidden states of the slots of a pass; keys and values of all its tokens are written."""
        state = self.scheduler.state
        tokens, positions = np.empty((2, batch.size), np.int64)
        for prefill in batch.prefills:
            node, in_node = prefill.node, prefill.in_node
            tokens[prefill.in_pass] = node.tokens[in_node]
            positions[prefill.in_pass] = node.start + np.arange(in_node.start, in_node.stop)
        last = state.length[batch.slots] - 1
        tokens[batch.slot_index] = state.tokens[batch.slots, last]
        positions[batch.slot_index] = last
        attend = PassAttention(self.layout, batch, self.scheduler.rows, state.length - 1 - state.row_start)
        before = time.perf_counter()
        recorded = None if self.routers is None else RecordedRoutes()
        hidden = self.compute(
            torch.from_numpy(tokens).to(self.device), torch.from_numpy(positions).to(self.device), attend, recorded
        )
        if recorded is not None and self.routers is not None:
            self.keep_routes(batch, recorded.array(self.routers.num_experts))
        if batch.prefills:
            hidden = hidden[torch.from_numpy(batch.slot_index).to(self.device)]
        self.model_seconds += time.perf_counter() - before
        return hidden

    def keep_routes(self, batch: Pass, routes: Routes) -> None:
        """Keep the routes of a pass where its keys and values are."""
        state = self.scheduler.state
        for prefill in batch.prefills:
            assert prefill.node.routes is not None
            prefill.node.routes[prefill.in_node] = routes[prefill.in_pass]
        if state.routes is not None:
            state.routes[batch.slots, state.length[batch.slots] - 1] = routes[batch.slot_index]

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: PassAttention,
        recorded: RecordedRoutes | None = None,
    ) -> torch.Tensor:
        """The last hidden states of tokens at positions."""
        if self.fused is not None:
            return self.fused(tokens, positions, attend)
        states: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "attend": attend,
        }
        if recorded is not None:
            states[ARGUMENT] = recorded
        with self.computing():
            return self.model.base_model(**states).last_hidden_state[0]  # type: ignore[no-any-return]

    def computing(self) -> AbstractContextManager[None]:
        """Layers compute as those of a learner do."""
        return nullcontext() if self.dtype == torch.float32 else self.casting.on()

    # ------------------------------------------------------------ sampling

    def sample(self, slots: SlotIds, hidden: torch.Tensor) -> list[Finished]:
        """Draw a token for each slot; finished requests are returned."""
        before, state = time.perf_counter(), self.scheduler.state
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.head(hidden)
        guided = GuidedRows.of(self.guidance, state.is_guided[slots], slots, self.scheduler.running)
        if guided is not None:
            logits = guided.mask(logits)
        drawn, drawn_logprobs = draw(logits, state.sampling(slots), state.noise(slots))
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        failed, lost = self.fail_lost(slots, logprobs, {} if guided is None else guided.problems)
        if guided is not None:
            guided.take(tokens, lost)
        if failed:
            slots, tokens, logprobs = slots[~lost], tokens[~lost], logprobs[~lost]
        first_token_slots = slots[state.length[slots] == state.prompt_length[slots]]
        state.append(slots, tokens, logprobs, self.version)
        self.sampled_tokens += len(slots)
        now = time.perf_counter()
        self.model_seconds += now - before
        for slot in first_token_slots:
            self.scheduler.running[slot].first_token_at = now
        return failed + self.finished(slots, tokens)

    def finished(self, slots: SlotIds, tokens: NDArray[np.int64]) -> list[Finished]:
        """The requests that the newest tokens finished."""
        state = self.scheduler.state
        is_end = np.isin(tokens, self.end_tokens)
        is_full = state.length[slots] >= state.limit[slots]
        has_stops = state.has_stops[slots]
        finished: list[Finished] = []
        for index in np.flatnonzero(is_end | is_full | has_stops):
            request = self.scheduler.running[slots[index]]
            try:
                if is_end[index]:
                    finished.append((request, self.finish(request, StopReason.end_token)))
                elif has_stops[index] and self.has_stop_string(request, int(tokens[index])):
                    finished.append((request, self.finish(request, StopReason.stop_string)))
                elif is_full[index]:
                    finished.append((request, self.finish(request, StopReason.length)))
            except Exception as error:  # of a tokenizer, for instance: it fails this request and no other
                finished.append(self.fail(request, str(error)))
        return finished

    def has_stop_string(self, request: Request, token: int) -> bool:
        """Whether the newest token completed a stop string."""
        text = request.recent_text.add(token, self.decode)
        return any(stop in text for stop in request.sampling.stop)

    def finish(self, request: Request, stop: StopReason) -> Completion:
        self.scheduler.cache_row(request)
        self.scheduler.release_slot(request)
        return request.completion(stop)

    def fail(self, request: Request, reason: str) -> Finished:
        """End a request with a failure; the others go on."""
        if self.scheduler.is_running(request):
            self.scheduler.release_slot(request)
        return request, EngineFailure(f"the engine failed: {reason}")

    def fail_lost(
        self, slots: SlotIds, logprobs: NDArray[np.float32], problems: Mapping[int, str]
    ) -> tuple[list[Finished], NDArray[np.bool_]]:
        """(requests that get no token, their rows): the logits are NaN, or the grammar cannot be followed further."""
        lost = np.isnan(logprobs)
        failed = self.fail_nan(slots[lost]) if lost.any() else []
        for row, problem in problems.items():
            if not lost[row]:
                request = self.scheduler.running[slots[row]]
                self.scheduler.release_slot(request)
                failed.append((request, ValueError(problem)))
                lost[row] = True
        return failed, lost

    def fail_nan(self, slots: SlotIds) -> list[Finished]:
        """End the requests whose logits are NaN; nothing that was computed for them is used again."""
        failed = []
        for slot in slots.tolist():
            self.scheduler.erase_row(slot)
            failed.append(self.fail(self.scheduler.running[slot], "the model's logits are not numbers"))
        self.scheduler.forget()
        return failed


def check_window(window: float, context: int) -> None:
    """Refuse a model with layers that see less than a context."""
    if window < context:
        raise ValueError(
            f"this model has layers that see {window} tokens, and the slot engine computes no windows; set "
            f'rollout.max_trajectory_tokens to {window} or less, or engine.name = "vllm"'
        )


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
            f"engine.memory.kv_cache = {cache} MiB cannot hold a prompt and a row of {context} tokens each; set it to "
            f"{least} or more, or 0"
        )
    return tokens
