"""The attempts of a run as a table: filtered, sorted and paged without reading their tokens.

A row is one attempt, of a training step or of an evaluation. Only what a table shows is read of each file, once. One
thread may refresh the table while others select from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.runs.archive import archived_steps, read_columns, step_path
from turnwise.runs.columns import texts_of
from turnwise.runs.evaluations import evaluated, evaluation_path
from turnwise.runs.folder import RunFolder
from turnwise.types import Break, Status

TRAINING = "train"
"""The kind of the attempts that training made; those of evaluations have the evaluation's kind."""
PER_TURN = ("start", "prompt_end", "end", "reward", "broke", "queued", "prefill", "decode", "environment")
COLUMNS = (
    *("step", "group", "kept", "task", "dataset", "attempt", "status", "outcome", "failure"),
    *(f"turns.list.element.{name}" for name in PER_TURN),
)
FAILURE_LENGTH = 300
NOT_COUNTED = tuple(str(status) for status in Status if not status.counts)
"""Statuses of attempts that enter no statistics: they failed, timed out, or had too long a prompt."""
ORDERS = ("step", "reward", "turns", "action_tokens", "context_tokens", "seconds", "breaks", "task", "status")
"""The columns that a table can be sorted by."""


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Which attempt of a run.

    Example:
        AttemptKey("train", step=12, group=3, attempt=0)
        AttemptKey.parse("greedy/50/7/0")
    """

    kind: str
    step: int
    group: int
    attempt: int

    @classmethod
    def parse(cls, text: str) -> AttemptKey:
        kind, *numbers = text.split("/")
        if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError(f'{text!r} names no attempt; write KIND/STEP/GROUP/ATTEMPT, for instance "train/12/3/0"')
        return cls(kind, *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.kind}/{self.step}/{self.group}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """What a table shows of an attempt."""

    key: AttemptKey
    task: str
    dataset: str
    status: str
    reward: float
    """All that it was paid."""
    trained: bool
    """Whether its group was trained on."""
    turns: int
    action_tokens: int
    """Sampled tokens."""
    context_tokens: int
    """Tokens of its longest turn, prompt and action."""
    breaks: int
    """Turns that do not begin with the turn before."""
    seconds: float
    """In the engine, its queue and the environment."""
    failure: str


@dataclass(frozen=True, slots=True)
class Query:
    """Which attempts, in which order.

    Example:
        Query(kind="train", first_step=10, statuses=("failed",), order="reward", descending=False)
    """

    kind: str = ""
    """`train`, or a kind of evaluation; all where it is empty."""
    first_step: int | None = None
    last_step: int | None = None
    task: str = ""
    """All or a part of the task's id."""
    dataset: str = ""
    statuses: tuple[str, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    min_tokens: int | None = None
    """Sampled tokens."""
    max_tokens: int | None = None
    trained: bool | None = None
    order: str = "step"
    descending: bool = True

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"attempts are sorted by {', '.join(ORDERS)}, not by {self.order!r}")


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the attempts that a query selects."""

    total: int
    """Attempts that the query selects."""
    rows: tuple[AttemptRow, ...]


class Attempts:
    """All attempts in the folder of a run, which may still be written to.

    Example:
        attempts = Attempts(RunFolder.open("runs/quickstart"))
        attempts.refresh()
        attempts.select(Query(order="reward"), limit=10).rows[0].key
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.parts: dict[Path, tuple[tuple[int, int], Any]] = {}
        """Per file: its time and size, and the rows it has."""
        self.unreadable: dict[Path, str] = {}
        """Why the attempts of a file are not in the table."""
        self.num_waiting = 0
        """Files that the last refresh left for the next."""
        self.table: Any = None

    def refresh(self, limit: int | None = None) -> bool:
        """Read the files that are new or changed, the newest steps first and at most `limit` of them. Whether anything
        was read or is gone; `num_waiting` says how many files are left."""
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

        present = dict(files_of(self.folder))
        gone = self.parts.keys() - present.keys()
        for path in gone:
            del self.parts[path]
        unreadable = {path: why for path, why in self.unreadable.items() if path in present}
        changed = [path for path in present if self.stamp(path) != self.parts.get(path, (None,))[0]]
        changed.sort(key=lambda path: path.name, reverse=True)
        for path in changed[:limit]:
            stamp = self.stamp(path)
            if stamp is None:  # the run has removed it meanwhile
                self.parts.pop(path, None)
                continue
            unreadable.pop(path, None)
            try:
                self.parts[path] = stamp, rows_of(path, present[path])
            except (ValueError, LookupError) as error:
                unreadable[path] = str(error)
                self.parts[path] = stamp, None
        self.unreadable, self.num_waiting = unreadable, len(changed[limit:]) if limit is not None else 0
        if changed or gone or self.table is None:
            parts = [part for _, part in self.parts.values() if part is not None]
            self.table = pa.concat_tables(parts).combine_chunks() if parts else None
        return bool(changed or gone)

    @staticmethod
    def stamp(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def __len__(self) -> int:
        table = self.table
        return 0 if table is None else table.num_rows

    def select(self, query: Query, offset: int = 0, limit: int = 50) -> Page:
        """The attempts of a query from `offset` on."""
        chosen = self.chosen(query)
        if chosen is None or not chosen.num_rows:
            return Page(0, ())
        direction = "descending" if query.descending else "ascending"
        ties = [("step", "descending"), ("kind", "ascending"), ("group", "ascending"), ("attempt", "ascending")]
        keys = [(query.order, direction), *(tie for tie in ties if tie[0] != query.order)]
        import pyarrow.compute as pc  # type: ignore[import-untyped,unused-ignore]

        place = pc.sort_indices(chosen, keys).slice(offset, limit)
        return Page(chosen.num_rows, tuple(map(attempt_row, chosen.take(place).to_pylist())))

    def counts(self, query: Query) -> dict[str, dict[str, int]]:
        """How many of a query's attempts have each kind, status and dataset."""
        chosen = self.chosen(query)
        if chosen is None:
            return {"kind": {}, "status": {}, "dataset": {}}
        return {
            name: {one["values"]: one["counts"] for one in chosen[name].value_counts().to_pylist()}
            for name in ("kind", "status", "dataset")
        }

    def groups(self, query: Query, offset: int = 0, limit: int = 50) -> tuple[int, list[dict[str, Any]]]:
        """(how many groups a query's attempts belong to, some of them with the mean and the spread of their
        rewards), sorted by the query's order, which is of a column that a group has."""
        chosen = self.chosen(query)
        if chosen is None or not chosen.num_rows:
            return 0, []
        import pyarrow.compute as pc

        sums = [("reward", "mean"), ("reward", "stddev"), ("reward", "min"), ("reward", "max"), ("turns", "mean")]
        sums += [("attempt", "count"), ("action_tokens", "sum"), ("trained", "max"), ("seconds", "max")]
        groups = chosen.group_by(["kind", "step", "group", "task", "dataset"], use_threads=False).aggregate(sums)
        order = {"reward": "reward_mean", "turns": "turns_mean", "action_tokens": "action_tokens_sum"}
        name = order.get(query.order, query.order if query.order in ("step", "task") else "step")
        direction = "descending" if query.descending else "ascending"
        keys = [(name, direction), *((tie, "ascending") for tie in ("step", "kind", "group") if tie != name)]
        return groups.num_rows, groups.take(pc.sort_indices(groups, keys).slice(offset, limit)).to_pylist()

    def chosen(self, query: Query) -> Any:
        """The rows that a query selects, unsorted."""
        table = self.table
        if table is None:
            return None
        import pyarrow.compute as pc

        field, conditions = pc.field, []
        for name, value in (("kind", query.kind), ("dataset", query.dataset), ("trained", query.trained)):
            if value not in ("", None):
                conditions.append(field(name) == value)
        if query.task:
            conditions.append(pc.match_substring(field("task"), query.task))
        if query.statuses:
            conditions.append(field("status").isin(list(query.statuses)))
        for name, low, high in (
            ("step", query.first_step, query.last_step),
            ("reward", query.min_reward, query.max_reward),
            ("turns", query.min_turns, query.max_turns),
            ("action_tokens", query.min_tokens, query.max_tokens),
        ):
            conditions += [field(name) >= low] if low is not None else []
            conditions += [field(name) <= high] if high is not None else []
        for condition in conditions:
            table = table.filter(condition)
        return table


def files_of(folder: RunFolder) -> Iterator[tuple[Path, str]]:
    """(file, kind of its attempts) for each file of attempts that a run has."""
    for step in archived_steps(folder.archive):
        yield step_path(folder.archive, step), TRAINING
    for version, kind in evaluated(folder.evaluations):
        yield evaluation_path(folder.evaluations, version, kind), kind


def file_of(folder: RunFolder, kind: str, step: int) -> Path:
    """The file with the attempts of a step; ValueError where the run has none."""
    if kind == TRAINING:
        path = step_path(folder.archive, step)
    elif (step, kind) in evaluated(folder.evaluations):
        path = evaluation_path(folder.evaluations, step, kind)
    else:
        raise ValueError(f"{folder.path} has no evaluation {kind!r} of step {step}")
    if not path.is_file():
        raise ValueError(f"{folder.path} has no attempts of step {step} (the recipe says how many steps it keeps)")
    return path


def rows_of(path: Path, kind: str) -> Any:
    """The rows of a file of attempts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = read_columns(path, COLUMNS)
    table = table.filter(pc.field("status").is_valid())  # a group without attempts has a row without one
    turns = table["turns"].combine_chunks()
    per_turn = {name: turns.flatten().field(name) for name in PER_TURN}
    sizes = turns.value_lengths().to_numpy(zero_copy_only=False)
    start, prompt_end, end = (per_turn[name].to_numpy().astype(np.int64) for name in ("start", "prompt_end", "end"))
    times = sum(per_turn[name].to_numpy() for name in ("queued", "prefill", "decode", "environment"))
    broke = np.array([cause != Break.none for cause in texts_of(per_turn["broke"])], np.int64)
    columns: Mapping[str, Any] = {
        "kind": pa.array([kind] * table.num_rows, pa.string()),
        **{name: shown_text(table[name]) for name in ("task", "dataset", "status")},
        **{name: table[name] for name in ("step", "group", "attempt")},
        "trained": table["kept"],
        "reward": table["outcome"].to_numpy() + summed(per_turn["reward"].to_numpy(), sizes),
        "turns": sizes.astype(np.int32),
        "action_tokens": summed(end - prompt_end, sizes),
        "context_tokens": longest(end - start, sizes),
        "breaks": summed(broke, sizes),
        "seconds": summed(times, sizes),
        "failure": shown_text(table["failure"], FAILURE_LENGTH),
    }
    return pa.table(columns)


def shown_text(column: Any, length: int | None = None) -> Any:
    """A column of texts that can be sent to a page: what has no UTF-8 becomes a question mark."""
    import pyarrow as pa

    texts = texts_of(column.combine_chunks())
    return pa.array([text[:length].encode("utf-8", "replace").decode() for text in texts], pa.string())


def summed(values: Any, sizes: Any) -> Any:
    """The sum over the turns of each attempt. No attempt's numbers touch another's."""
    return by_attempt(np.add, values, sizes)


def longest(values: Any, sizes: Any) -> Any:
    """The largest value among the turns of each attempt, 0 for one without turns."""
    return by_attempt(np.maximum, values, sizes)


def by_attempt(reduce: np.ufunc, values: Any, sizes: Any) -> Any:
    result, some = np.zeros(len(sizes), values.dtype), sizes > 0
    if some.any():
        result[some] = reduce.reduceat(values, (np.cumsum(sizes) - sizes)[some])
    return result


def attempt_row(row: Mapping[str, Any]) -> AttemptRow:
    key = AttemptKey(row["kind"], row["step"], row["group"], row["attempt"])
    rest = {name: row[name] for name in AttemptRow.__slots__ if name != "key"}
    return AttemptRow(key, **rest)
