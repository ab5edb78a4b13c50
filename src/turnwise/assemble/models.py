"""Where the models of a learner come from: this process, which has the policy's whole, or folders that ranks read."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from turnwise.cluster.spread import Placed, PutAdapters, Spread
from turnwise.learn.learner import save_policy
from turnwise.learn.model_checks import Reach
from turnwise.learn.policy import DTYPES, load_model, load_tokenizer
from turnwise.learn.stepper import Reduce, alone
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.runs.checksums import NAME as CHECKSUMS


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model with its tokenizer, and where other processes find its weights."""

    model: CausalLM
    """Whole, or on the meta device where nothing in this process computes with it."""
    tokenizer: ChatTokenizer
    folder: Path | None = None
    """None where the weights are in this process only."""

    @property
    def own_folder(self) -> Path:
        assert self.folder is not None, "written before it is handed to other processes"
        return self.folder

    @property
    def is_here(self) -> bool:
        """Whether this process has the weights."""
        return self.model.device.type != "meta"


@contextmanager
def reachable(recipe: Recipe, source: ModelSource, beside: Path) -> Iterator[ModelSource]:
    """The source as other processes can read it, where there are any: one that is in this process only is written to
    a folder beside others of the run, for as long as the block lasts."""
    if not recipe.cluster.is_spread or source.folder is not None:
        yield source
        return
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".model-", dir=beside) as folder:
        save_policy(source.model, source.tokenizer, Path(folder))
        yield replace(source, folder=Path(folder).absolute())


def copy_model(source: ModelSource, folder: Path) -> None:
    """Write a model and its tokenizer to a folder. One whose weights are not here is copied file by file."""
    if source.is_here:
        save_policy(source.model, source.tokenizer, folder)
        return
    for path in source.own_folder.iterdir():
        if path.is_file() and path.name != CHECKSUMS:
            shutil.copy2(path, folder / path.name)
    source.tokenizer.save_pretrained(folder)


class Models(Protocol):
    """The models of a learner, each where it computes."""

    @property
    def reduce(self) -> Reduce:
        """Adds up sums over all ranks that have plans of their own."""
        ...

    def policy(self, put_adapters: PutAdapters | None) -> Placed: ...

    def critic(self) -> Placed:
        """Another one like the policy's."""
        ...

    def start(self) -> Placed:
        """The one that training started from."""
        ...

    def frozen(self, path: str) -> Placed: ...


class Whole:
    """Models in this process. Others are made before `policy`, which may put adapters into it."""

    def __init__(self, model: CausalLM, tokenizer: ChatTokenizer, start: Callable[[], CausalLM] | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.make_start = start
        self.reduce: Reduce = alone

    def policy(self, put_adapters: PutAdapters | None) -> Placed:
        return Placed(self.model, adapters=None if put_adapters is None else put_adapters(self.model))

    def critic(self) -> Placed:
        return Placed(copy.deepcopy(self.model))

    def start(self) -> Placed:
        return Placed(copy.deepcopy(self.model) if self.make_start is None else self.moved(self.make_start()))

    def frozen(self, path: str) -> Placed:
        if load_tokenizer(path).get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"the model in {path} has another vocabulary than the policy, so it cannot score its tokens"
            )
        return Placed(self.moved(load_model(path)))

    def moved(self, model: CausalLM) -> CausalLM:
        return model.to(self.model.device)


@dataclass(frozen=True, slots=True)
class Folders:
    """Where ranks find the models of a learner."""

    policy: Path
    start: Path
    reaches: Mapping[str, tuple[Reach, ...]]
    """By folder: how long a turn may be for what its model computes to be exact, and why."""


class OnRanks:
    """Models of folders, spread over ranks. Frozen ones are kept in the dtype that they compute in."""

    def __init__(self, spread: Spread, folders: Folders, recipe: Recipe) -> None:
        self.spread = spread
        self.folders = folders
        self.computed_in = DTYPES[recipe.model.dtype]
        self.how: dict[str, Any] = {
            "computed_in": self.computed_in,
            "sync_each_pass": recipe.cluster.gradient_sync == "pass",
            "offload": recipe.cluster.offload,
        }
        self.reduce: Reduce = spread.reduce

    def policy(self, put_adapters: PutAdapters | None) -> Placed:
        return self.trained(put_adapters=put_adapters)

    def critic(self) -> Placed:
        return self.trained(with_head=True)

    def trained(self, **how: Any) -> Placed:
        folder = self.folders.policy
        placed = self.spread.load(folder, **self.how, **how)
        return replace(placed, reach=self.folders.reaches[str(folder)])

    def start(self) -> Placed:
        return self.frozen(str(self.folders.start))

    def frozen(self, path: str) -> Placed:
        placed = self.spread.load(path, computed_in=self.computed_in, dtype=self.computed_in)
        return replace(placed, reach=self.folders.reaches[path])
