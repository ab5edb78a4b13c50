"""The policy: a transformers causal language model that computes plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from turnwise.data.catalogue import model_folder
from turnwise.learn.alignment import align
from turnwise.learn.attention import attend_with_plans, attention_of, states_of
from turnwise.learn.blocks import Relay
from turnwise.learn.casting import Casting
from turnwise.learn.contents import check_contents
from turnwise.learn.head import Mask, token_logprobs
from turnwise.learn.lora import add_adapters, base_of
from turnwise.learn.masters import read_masters
from turnwise.learn.model_checks import Layout, Reach, check_layout, check_longest, check_model, check_plan, reaches
from turnwise.learn.router_checks import known_routers, routers_by_config
from turnwise.learn.routers import ReplayedRoutes
from turnwise.learn.row_states import attend_in_rows, row_states
from turnwise.learn.softmax import VocabularyShard
from turnwise.learn.ulysses import Alone, Context
from turnwise.plan.blocks import Index
from turnwise.plan.cut import cut
from turnwise.plan.plan import Plan, Stretch
from turnwise.plan.rows import in_rows
from turnwise.plan.target_sets import UNGUIDED
from turnwise.pretrained import CausalLM, ChatTokenizer, import_models

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Policy:
    """A model with float32 master weights, its compute dtype and its temperature.

    One that would not compute turns of up to `longest` tokens exactly, laid out by `layout`, is refused. With
    checkpointing a pass that is differentiated keeps the inputs of layers only, and computes each layer once more in
    its backward pass. With replay, the routers of a mixture take the experts that a plan names.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        layout: Layout = cut,
        longest: float = math.inf,
        checkpointing: bool = False,
        replay: bool = False,
        reach: Sequence[Reach] | None = None,
        enter: Callable[..., Any] | None = None,
        shard: VocabularyShard | None = None,
        sync: Callable[[bool], None] | None = None,
        context: Context | None = None,
        device: str | None = None,
    ) -> None:
        """`reach` is what `check_by_config` found of a model that is not whole here. `enter` calls what computes a pass
        where the weights are spread over ranks, with those gathered that are not gathered layer by layer. `sync` tells
        a backward pass whether it is the last of an update, where gradients are added up over ranks in that one
        only. `device` is where passes compute, if the weights are elsewhere in between."""
        if reach is None:
            check_model(model, layout)
            check_layout(model, layout)
            reach = reaches(model, layout)
        self.in_rows = layout is in_rows
        """Whether plans are computed as rows, by the model's own attention."""
        (attend_in_rows if self.in_rows else attend_with_plans)(model)
        model.train()
        self.model = model
        self.dtype = dtype
        self.temperature = temperature
        self.device = device or next(model.parameters()).device.type
        self.reach = reach
        """How long a turn may be for what the model computes to be exact, and why."""
        check_longest(self.reach, longest)
        self.routers = (known_routers if enter is None else routers_by_config)(model) if replay else None
        self.enter = enter or plainly
        self.context = context or Alone()
        """Who computes the nodes of a pass: this process, or the ranks of a group together."""
        self.sync = sync
        self.shard = shard
        """Which rows of the output layer are here, where the other processes of a group have the rest."""
        # A model that is spread is cast by those who spread it.
        self.casting = Casting(model, dtype) if dtype == torch.bfloat16 and enter is None else None
        self.recomputed = recomputable(model, self.casting) if checkpointing else []

    def passes(self, plan: Plan) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """(which of the plan's action tokens, their logprobs, their entropies), pass by pass."""
        return self.walk(plan, partial(self.predict, plan))

    def walk(self, plan: Plan, look: Callable[[Stretch, Tensor], T]) -> Iterator[T]:
        """What `look` makes of each stretch and the hidden states before its action tokens, pass by pass.

        What is made of one pass must be differentiated before the next is asked for. A plan of several stretches hands
        keys and values on from one to the next and their gradients back, so that activations are those of one stretch:
        each is computed once for its keys and values, and again, from the last to the first, for its gradient.
        """
        check_plan(self.reach, plan)
        if len(plan.stretches) == 1:
            yield self.enter(self.compute, look, plan, plan.stretches[0], None)
            return
        relay = Relay(plan.num_tokens)
        if not torch.is_grad_enabled():
            yield from (self.enter(self.compute, look, plan, stretch, relay) for stretch in plan.stretches)
            return
        with torch.no_grad():
            for stretch in plan.stretches[:-1]:
                self.enter(self.hidden, plan, stretch, self.context.part(plan, stretch), relay)
        for stretch in reversed(plan.stretches):
            yield self.enter(self.compute, look, plan, stretch, relay)

    def compute(self, look: Callable[[Stretch, Tensor], T], plan: Plan, stretch: Stretch, relay: Relay | None) -> T:
        """What `look` makes of a stretch and the states that predict its nodes: each that of the token before."""
        part = self.context.part(plan, stretch)
        hidden = self.hidden(plan, stretch, part, relay)
        return look(part, hidden.index_select(0, self.tensor(plan.parent[part.nodes] - part.start).long()))

    def hidden(self, plan: Plan, stretch: Stretch, part: Stretch, relay: Relay | None) -> Tensor:
        """[n, width] the last hidden states of the part of a stretch that this process computes."""
        recomputed = self.recomputed if torch.is_grad_enabled() else []
        with nullcontext() if self.casting is None else self.casting.on(), checkpointing(recomputed):
            if self.in_rows:
                assert part is stretch, "rows are not spread over ranks"
                return row_states(self.model, plan)
            attend = self.context.attention(attention_of(plan, stretch, self.device, relay), stretch)
            return states_of(self.model, plan, part, attend, self.routes_of(plan, part))

    def routes_of(self, plan: Plan, part: Stretch) -> ReplayedRoutes | None:
        """What the routers take in the part of a stretch that is computed here; None where they choose themselves."""
        if self.routers is None or plan.routes is None:
            return None
        return self.routers.replayed(plan.routes, part.start, part.end, self.device)

    def predict(self, plan: Plan, stretch: Stretch, states: Tensor) -> tuple[Index, Tensor, Tensor]:
        """(which action tokens, logprobs, entropies) of a stretch, given the states before its nodes."""
        targets = self.tensor(plan.tokens[stretch.nodes]).long()
        mask = self.mask_of(plan, stretch)
        states, weight = states.to(self.dtype), self.output
        logprobs, entropies = token_logprobs(states, weight, targets, self.temperature, mask, self.shard)
        place = self.tensor(stretch.inverse)
        return stretch.picked, logprobs[place], entropies[place]

    def backward(self, total: Tensor, is_last: bool) -> None:
        """Differentiate what was made of a pass, the last of an update or one before."""
        if self.sync is not None:
            self.sync(is_last)
        total.backward()

    def mask_of(self, plan: Plan, stretch: Stretch) -> Mask | None:
        """The tokens that grammars allowed at the nodes of a stretch; None where they allowed all."""
        if plan.allowed is None or stretch.places is None or not (stretch.places != UNGUIDED).any():
            return None
        bits, rows = plan.allowed.rows(stretch.places, plan.tokens[stretch.nodes], self.vocabulary)
        return Mask(self.tensor(bits), self.tensor(rows))

    @property
    def output(self) -> Tensor:
        """[vocabulary, width] the weights of the output layer, as many as there are here."""
        weight: Any = self.model.get_output_embeddings().weight
        return weight if self.shard is None else weight.to_local()  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Rows of the output layer, here and elsewhere."""
        return len(self.output) if self.shard is None else self.shard.size

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An array on the policy's device, converted before it goes there: not every device has every dtype."""
        return torch.as_tensor(array).to(dtype).to(self.device)


class Inspection:
    """A policy whose scores are [tokens, 2]: logprobs and entropies."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def passes(self, plan: Plan) -> Iterator[tuple[Index, Tensor]]:
        for picked, logprobs, entropies in self.policy.passes(plan):
            yield picked, torch.stack([logprobs, entropies], dim=-1)


def plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def recomputable(model: CausalLM, casting: Casting | None) -> list[Any]:
    """The modules that can keep their inputs only, made ready for `checkpointing` and left as they were."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} cannot recompute its layers; set model.gradient_checkpointing = false"
        )
    # No random state is kept for the second computation: nothing in a layer is random, or it would have been refused.
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    model.gradient_checkpointing_enable(how if casting is None else {**how, "context_fn": casting.contexts})
    model.disable_input_require_grads()  # which transformers adds for adapters
    found: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in found:
        module.gradient_checkpointing = False  # transformers' own way to say so would forget how they are recomputed
    return found


@contextmanager
def checkpointing(modules: Sequence[Any]) -> Iterator[None]:
    """Have modules keep their inputs only, in this pass: an engine on the same ones never pays for it."""
    for module in modules:
        module.gradient_checkpointing = True
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = False


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over a run's own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(path: str | Path) -> CausalLM:
    """A causal language model from a folder or of the catalogue, in float32; where the folder holds adapters, these
    are added to it, and where it holds master weights, the model has these. No code of the folder runs, and no pickle
    of it is read."""
    folder = model_folder(path)
    if (base := base_of(folder)) is not None:
        return add_adapters(load_model(base), folder)
    check_contents(folder)
    import_models()
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    model = align(model)
    read_masters(folder, model)
    return model


def load_tokenizer(path: str | Path) -> ChatTokenizer:
    from transformers import AutoTokenizer

    tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(model_folder(path), trust_remote_code=False)
    return tokenizer


def pick_device(name: str) -> str:
    """The device a recipe asks for; auto takes cuda where there is one, else cpu: mps cannot compute trees."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return "cuda" if available["cuda"] else "cpu"
    if not available[name]:
        raise ValueError(f'model.device = "{name}" is not available here; set model.device = "auto"')
    return name
