"""The routers of a mixture of experts: which experts each token of a pass took, recorded or replayed.

Every router of transformers ends its choice with one `topk` over the experts, and makes weights of what that returns:
softmax before or after, sigmoid with a bias that only chooses, a norm, a scale. To replay a route, this one call
returns the recorded experts and the router's own scores of them. The weights are then made by the router's own code,
whatever its kind, and have its gradient. To record, the call's own answer is kept.

What a pass replays or records is handed to the model as the argument `routes`, beside `attend`, and so reaches a layer
again where gradient checkpointing computes it once more. Letters: n tokens of a pass, L routers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turnwise.plan.routes import NodeRoutes
from turnwise.pretrained import CausalLM
from turnwise.routes import Routes, route_dtype

ARGUMENT = "routes"
TOPK: tuple[Any, ...] = (torch.topk, torch.Tensor.topk)
MASKS_SCORES = "group_limited_greedy"
"""A `topk_method` that gives experts outside of the best groups no weight at all: they could not be replayed."""


class PassRoutes(Protocol):
    """What the routers of one pass are told, and who hears what they chose."""

    def taken(self, layer: int, scores: Tensor, own: Callable[[], Any]) -> Any:
        """(scores, experts) that the router `layer` takes, given its scores [n, experts]; `own` is its own choice."""
        ...


class ReplayedRoutes:
    """Recorded routes. A token without one takes the router's own choice.

    Example:
        ReplayedRoutes(torch.tensor([[[3, 1]], [[0, 2]]]), known=None)
    """

    def __init__(self, experts: Tensor, known: Tensor | None) -> None:
        self.experts = experts
        """[n, L, k]"""
        self.known = known
        """[n] which tokens have a route; None where all do."""

    def taken(self, layer: int, scores: Tensor, own: Callable[[], Any]) -> Any:
        experts = self.experts[:, layer].long()
        if len(experts) * scores.shape[-1] != scores.numel():
            raise ValueError(f"a router sees {scores.shape[:-1].numel()} tokens of a pass of {len(experts)}")
        experts = experts.view(*scores.shape[:-1], -1)
        if self.known is not None:
            experts = torch.where(self.known.view(*scores.shape[:-1], 1), experts, own()[1])
        return torch.return_types.topk((scores.gather(-1, experts), experts))


class RecordedRoutes:
    """The routes of a pass, kept as it computes."""

    def __init__(self) -> None:
        self.experts: dict[int, Tensor] = {}

    def taken(self, layer: int, scores: Tensor, own: Callable[[], Any]) -> Any:
        chosen = own()
        self.experts[layer] = chosen[1].detach().reshape(-1, chosen[1].shape[-1])
        return chosen

    def array(self, num_experts: int) -> Routes:
        """[n, L, k] once the pass is over."""
        stacked = torch.stack([self.experts[layer] for layer in range(len(self.experts))], dim=1)
        found: Routes = stacked.cpu().numpy().astype(route_dtype(num_experts))
        return found


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How the call that chooses experts looks: the dimensions of its scores, and what it chooses from and how many.

    Example:
        ExpertChoice(dimensions=2, num_experts=128, k=8)
    """

    dimensions: int
    num_experts: int
    k: int


class Tap(TorchFunctionMode):
    """Stands between a router and the call that chooses its experts, in passes that were handed routes."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.choice: ExpertChoice | None = None
        """None while the tap listens to find out."""
        self.routes: Any = None
        self.heard: list[ExpertChoice] = []
        self.is_open = False

    def begin_layer(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take what the pass hands over out of the layer's arguments."""
        self.routes = kwargs.pop(ARGUMENT, None)
        return args, kwargs

    def end_layer(self, *_: Any) -> None:
        self.routes = None

    def begin_router(self, *_: Any) -> None:
        if self.routes is not None:
            self.is_open = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end_router(self, *_: Any) -> None:
        if self.is_open:
            self.is_open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        scores: Tensor = args[0] if args else kwargs["input"]
        found = ExpertChoice(scores.dim(), scores.shape[-1], int(args[1] if len(args) > 1 else kwargs["k"]))
        if self.choice is None:
            self.heard.append(found)
        if found != self.choice:
            return func(*args, **kwargs)
        return self.routes.taken(self.layer, scores, lambda: func(*args, **kwargs))


class Routers:
    """The routers of a model, each with a tap. A model that was given taps before keeps those.

    Example:
        routers = Routers(model)
        recorded = RecordedRoutes()
        states_of(model, plan, stretch, attend, recorded)
        recorded.array(routers.num_experts)
    """

    def __init__(self, model: CausalLM) -> None:
        """ValueError where the model has no routers, or some of a kind that cannot be replayed."""
        self.name = type(model).__name__
        found = list(routers_in(model))
        if not found:
            raise ValueError(
                f"{self.name} has no routers that transformers records, so there are no routes to replay; remove "
                "model.router_replay"
            )
        self.layers = [layer for _, layer, _ in found]
        """Which layers of the model have one, by their numbers."""
        self.taps = [tapped(number, router, block) for number, (router, _, block) in enumerate(found)]

    @property
    def choice(self) -> ExpertChoice:
        """That of every router; known once `learn_choice` was called, for this model or one of its kind."""
        choice = self.taps[0].choice
        assert choice is not None, "what the routers choose has not been found out"
        return choice

    @property
    def num_experts(self) -> int:
        return self.choice.num_experts

    def empty(self, num_tokens: int) -> Routes:
        """[tokens, L, k] of zeros, in the dtype of this model's routes."""
        return np.zeros((num_tokens, len(self.taps), self.choice.k), route_dtype(self.num_experts))

    def learn_choice(self, compute: Callable[[Any], Any]) -> None:
        """Find out how routers choose, from one small pass: `compute` makes it with the routes that it is given."""
        if all(tap.choice is not None for tap in self.taps):
            return
        for tap in self.taps:
            tap.heard = []
        compute(RecordedRoutes())
        lasts = {tap.heard[-1] if tap.heard else None for tap in self.taps}
        last = next(iter(lasts))
        if len(lasts) > 1 or last is None:
            raise self.unknown("not every router chooses its experts with a topk of the same size")
        if any(tap.heard.count(last) != 1 for tap in self.taps):
            raise self.unknown("a router has two topk of the same size")
        for tap in self.taps:
            tap.choice = last

    def unknown(self, why: str) -> ValueError:
        return ValueError(f"the routers of {self.name} are of no known kind ({why}); set model.router_replay = false")

    def replayed(self, routes: NodeRoutes, start: int, end: int, device: str) -> ReplayedRoutes | None:
        """The routes of the nodes from `start` to before `end`; None where none has one."""
        rows = routes.rows[start:end]
        known = rows >= 0
        if not known.any():
            return None
        wanted = (len(self.taps), self.choice.k)
        if routes.table.shape[1:] != wanted or int(routes.table.max()) >= self.num_experts:
            raise ValueError(
                f"recorded routes have {routes.table.shape[1]} layers of {routes.table.shape[2]} experts up to number "
                f"{int(routes.table.max())}, and this model has {wanted[0]} of {wanted[1]}, up to "
                f"{self.num_experts - 1}: another model sampled them"
            )
        experts: NDArray[Any] = routes.table[np.where(known, rows, 0)]
        if experts.dtype != np.uint8:
            experts = experts.astype(np.int32)  # torch computes little with 16 bits without a sign
        return ReplayedRoutes(
            torch.from_numpy(experts).to(device), None if known.all() else torch.from_numpy(known).to(device)
        )


def routers_in(model: CausalLM) -> Iterator[tuple[torch.nn.Module, int, torch.nn.Module]]:
    """(router, number of its layer, its layer) by what transformers says records router logits, in order."""
    recorders = [one for part in model.modules() for one in recorders_of(part)]
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not any(is_recorded(recorder, path, module) for recorder in recorders):
            continue
        if getattr(module, "topk_method", None) == MASKS_SCORES:
            raise ValueError(
                f"{type(module).__name__} gives experts outside of the best groups no weight ({MASKS_SCORES}), so "
                "their choice cannot be replayed; set model.router_replay = false"
            )
        above = path
        while above and not isinstance(modules[above.rpartition(".")[0]], torch.nn.ModuleList):
            above = above.rpartition(".")[0]
        if above:
            # A router that is a plain linear layer leaves the choice to the module around it.
            chooser = modules[path.rpartition(".")[0]] if type(module) is torch.nn.Linear else module
            yield chooser, int(above.rpartition(".")[2]), modules[above]


def recorders_of(module: torch.nn.Module) -> list[Any]:
    from transformers.utils.output_capturing import OutputRecorder

    found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
    several = found if isinstance(found, list) else [found]
    return [one if isinstance(one, OutputRecorder) else OutputRecorder(one) for one in several]


def is_recorded(recorder: Any, path: str, module: torch.nn.Module) -> bool:
    named = recorder.layer_name is None or recorder.layer_name in path
    return named and recorder.target_class is not None and isinstance(module, recorder.target_class)


def tapped(number: int, router: torch.nn.Module, layer: torch.nn.Module) -> Tap:
    """The tap of a router: the one that it has, or else a new one."""
    for hook in router._forward_pre_hooks.values():
        if isinstance(tap := getattr(hook, "__self__", None), Tap):
            return tap
    tap = Tap(number)
    router.register_forward_pre_hook(tap.begin_router)
    router.register_forward_hook(tap.end_router, always_call=True)
    layer.register_forward_pre_hook(tap.begin_layer, with_kwargs=True)
    layer.register_forward_hook(tap.end_layer, always_call=True)
    return tap
