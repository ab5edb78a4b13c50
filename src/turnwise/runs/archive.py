"""The archive: every group of every step, kept and dropped, with all its turns, its credit and its weights.

One Parquet file per step, one row per attempt, in order. The tokens of an attempt are one list and its turns point into
it, so a history that only grew is stored once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.atomic import clear_leftovers, write_atomically
from turnwise.messages import Message
from turnwise.runs.allowed_columns import allowed_columns, read_allowed
from turnwise.runs.checksums import Damaged
from turnwise.runs.columns import (
    bounds_of,
    fields_of,
    list_column,
    map_column,
    maps_of,
    number_column,
    pieces_of,
    struct_column,
    text_column,
    texts_of,
    token_column,
)
from turnwise.runs.message_columns import message_column, messages_of, texts_if_any, tools_of_json, tools_to_json
from turnwise.runs.route_columns import read_routes, route_columns
from turnwise.runs.seal import BLANK, read_intact, sealed
from turnwise.tokens import Floats, frozen_array
from turnwise.types import Break, Group, Status, Task, Trajectory, TurnTiming, rebuild_trajectory, turns_of

FORMAT_KEY, FORMAT = b"turnwise.archive", b"1"
SEAL_KEY = "turnwise.seal"
NAME = re.compile(r"step-(\d{6,})\.parquet")
NO_ATTEMPT = Trajectory((), Status.failed)
"""Fills the row of a group without attempts."""
ROW_GROUP_TOKENS = 1 << 18
"""Tokens after which a file gets a new part: what reading one attempt has to decode."""
SCORES = ("learner_logprobs", "entropies")
TRAINED = ("credit", "weights", *SCORES)
"""Per token of the groups that trained; a file may lack the scores."""
TIMES = tuple(field.name for field in fields(TurnTiming))


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One group of a step, whether it trained, and with which credit and weights.

    Example:
        Record(group, kept=True, credit=(first_turn, second_turn), weights=(first_turn, second_turn))
        Record(group, kept=False)
    """

    group: Group
    kept: bool
    credit: tuple[Floats, ...] = ()
    """[A] per turn of `turns_of([group])`; empty for a dropped group."""
    weights: tuple[Floats, ...] = ()
    """[A] per turn of `turns_of([group])`; empty for a dropped group."""
    learner_logprobs: tuple[Floats, ...] = ()
    """[A] per turn, of the learner before the step's first update; empty unless `archive.scores` asks for them."""
    entropies: tuple[Floats, ...] = ()
    """[A] per turn, of the distribution that each token was drawn from; empty unless `archive.scores` asks for them."""

    def __post_init__(self) -> None:
        sizes = [len(turn.action) for turn in turns_of([self.group])] if self.kept else []
        for name in TRAINED:
            arrays = tuple(frozen_array(values, np.float32, f"Record.{name}") for values in getattr(self, name))
            if [len(array) for array in arrays] != sizes and (arrays or name not in SCORES):
                raise ValueError(
                    f"Record.{name} of a {'kept' if self.kept else 'dropped'} group needs one array per turn that "
                    f"trains, of {sizes} tokens, got {[len(array) for array in arrays]} (task {self.group.task.id})"
                )
            object.__setattr__(self, name, arrays)


def write_step(folder: Path, step: int, records: Sequence[Record]) -> Path:
    """The file of `step`, complete, with `records` in order."""
    folder.mkdir(parents=True, exist_ok=True)
    path = step_path(folder, step)
    write_records(path, step, records)
    return path


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def write_records(path: Path, step: int, records: Sequence[Record]) -> None:
    """Put a file that `read_step` reads at `path`."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    table, sink = to_table(step, records), pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=False,  # a vocabulary is no small dictionary, and zstd finds the repeats of the other columns
        column_encoding={
            f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("logprobs", *TRAINED) if name in table.column_names
        },
        write_statistics=False,
    ) as writer:
        for start, end in row_groups(records):
            writer.write_table(table.slice(start, end - start))
        writer.add_key_value_metadata({SEAL_KEY: BLANK})
    write_atomically(path, memoryview(sealed(memoryview(sink.getvalue()))))


def row_groups(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of each part of a file that can be read by itself: whole groups, until they have
    some number of tokens."""
    start = end = tokens = 0
    for record in records:
        attempts = (*record.group.trajectories, *record.group.failed)
        end += len(attempts) or 1
        tokens += sum(len(turn.prompt) + len(turn.action) for one in attempts for turn in one.turns[-1:])
        if tokens >= ROW_GROUP_TOKENS:
            yield start, end
            start, tokens = end, 0
    if end > start or not end:
        yield start, end


def read_step(path: Path) -> list[Record]:
    """The records of a step, as they were given to `write_step`; Damaged where the file is not as it was written."""
    import pyarrow as pa

    data = read_intact(path)
    with damage_named(path):
        return from_table(open_archive(path, pa.BufferReader(data)).read())


def read_group(path: Path, group: int) -> Record:
    """One record of a step, by its place. It reads no more of the file than it needs, and so checks no checksum."""
    with damage_named(path):
        file = open_archive(path, path)
        numbers = file.read(columns=["group"])["group"].to_numpy()
        rows = np.flatnonzero(numbers == group)
        if not len(rows):
            raise ValueError(f"{path} has no group {group}; it has {numbers.max(initial=-1) + 1}")
        ends = np.cumsum([file.metadata.row_group(part).num_rows for part in range(file.num_row_groups)])
        [part] = set(np.searchsorted(ends, rows, side="right").tolist())
        table = file.read_row_group(part)
        [record] = from_table(table.filter(np.asarray(table["group"]) == group))
        return record


def read_columns(path: Path, names: Sequence[str]) -> Any:
    """The Arrow table of some columns of a step, one row per attempt. Checks no checksum.

    Example:
        read_columns(path, ["task", "outcome", "turns.list.element.reward"])
    """
    with damage_named(path):
        return open_archive(path, path).read(columns=list(names), use_threads=False)


def open_archive(path: Path, source: Any) -> Any:
    """The Parquet file of a step; ValueError where another version of turnwise wrote it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except pa.ArrowException:
        raise Damaged(f"{path} is not a Parquet file; remove it or restore it from a copy") from None
    found = (file.metadata.metadata or {}).get(FORMAT_KEY, b"none").decode()
    if found != FORMAT.decode():
        raise ValueError(
            f"{path} has archive format {found}, not {FORMAT.decode()}; read it with the turnwise that wrote it"
        )
    return file


def is_archive(path: Path) -> bool:
    """Whether a file is of the archive. A Parquet file that cannot be read is: whoever opens it says what is wrong."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return FORMAT_KEY in (pq.read_schema(path).metadata or {})
    except pa.ArrowException:
        return True


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file whose checksum was not there to say it."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is not there any more") from None
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path} is damaged: {str(error).splitlines()[0]}; restore it from a copy") from None


def archived_steps(folder: Path) -> list[int]:
    """The steps that have a file, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(name[1]) for path in paths if (name := NAME.fullmatch(path.name)))


def cut_back(folder: Path, step: int) -> None:
    """Remove the files of steps after `step`, and what a kill left half written."""
    clear_leftovers(folder)
    _remove(folder, (later for later in archived_steps(folder) if later > step))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the files of the newest `keep` steps."""
    if keep < 1:
        raise ValueError(f"at least 1 step has to stay in the archive, got keep={keep}")
    _remove(folder, archived_steps(folder)[:-keep])


def _remove(folder: Path, steps: Iterable[int]) -> None:
    for step in steps:
        step_path(folder, step).unlink()


def to_table(step: int, records: Sequence[Record]) -> Any:
    """The Arrow table of `records`: one row per attempt, in each group those that count first.

    A group without attempts has one row, whose attempt, status and outcome are null.
    """
    import pyarrow as pa

    rows = [
        (number, attempt, trajectory)
        for number, record in enumerate(records)
        for attempt, trajectory in enumerate((*record.group.trajectories, *record.group.failed) or (NO_ATTEMPT,))
    ]
    attempts = [trajectory for _, _, trajectory in rows]
    absent = np.array([trajectory is NO_ATTEMPT for trajectory in attempts], bool)
    number = number_column((number for number, _, _ in rows), np.int32)
    tasks = [record.group.task for record in records]
    columns = {
        "step": pa.array(np.full(len(rows), step, np.int32)),
        "group": number,
        "kept": number_column((record.kept for record in records), bool).take(number),
        "task": text_column([task.id for task in tasks]).take(number),
        "dataset": text_column([task.dataset for task in tasks]).take(number),
        "data": text_column([_to_json(task) for task in tasks]).take(number),
        "attempt": pa.array(np.array([attempt for _, attempt, _ in rows], np.int32), mask=absent),
        "status": pa.array([None if t is NO_ATTEMPT else str(t.status) for t in attempts], pa.string()),
        "outcome": pa.array(np.array([trajectory.outcome for trajectory in attempts], np.float64), mask=absent),
        "marks": map_column([trajectory.marks for trajectory in attempts]),
        "failure": text_column([trajectory.failure for trajectory in attempts]),
        "seat": number_column((trajectory.seat for trajectory in attempts), np.int32),
        "opening": list_column(
            [len(trajectory.opening) for trajectory in attempts],
            message_column([message for trajectory in attempts for message in trajectory.opening]),
        ),
        "tools": text_column([tools_to_json(trajectory.tools) for trajectory in attempts]),
        **_turn_columns(attempts),
    }
    trained = [t.num_action_tokens if records[n].kept and t.status.counts else 0 for n, _, t in rows]
    for name in TRAINED:
        arrays = [array for record in records for array in getattr(record, name)]
        if arrays or name not in SCORES:
            columns[name] = token_column(trained, arrays, np.float32)
    return pa.table(columns).replace_schema_metadata({FORMAT_KEY: FORMAT})


def from_table(table: Any) -> list[Record]:
    """Inverse of `to_table`."""
    column = {name: table[name].combine_chunks() for name in table.column_names}
    ids, datasets, data = (texts_of(column[name]) for name in ("task", "dataset", "data"))
    kept = column["kept"].to_pylist()
    attempts = _read_attempts(column)
    trained = [
        len(turn.action)
        for attempt, of_kept in zip(attempts, kept, strict=True)
        if of_kept and attempt is not None and attempt.status.counts
        for turn in attempt.turns
    ]
    pieces = [pieces_of(column[name], trained) if name in column else iter(()) for name in TRAINED]
    records = []
    for _, same in groupby(range(len(attempts)), column["group"].to_pylist().__getitem__):
        rows = list(same)
        row = rows[0]
        found = [attempt for attempt in attempts[row : row + len(rows)] if attempt is not None]
        group = Group(
            Task(ids[row], datasets[row], json.loads(data[row])),
            tuple(attempt for attempt in found if attempt.status.counts),
            tuple(attempt for attempt in found if not attempt.status.counts),
        )
        count = len(list(turns_of([group]))) if kept[row] else 0
        records.append(Record(group, kept[row], *(tuple(islice(values, count)) for values in pieces)))
    return records


def _turn_columns(attempts: Sequence[Trajectory]) -> dict[str, Any]:
    """What is one per turn as a list of structs, what is one per token as lists of numbers."""
    turns = [turn for trajectory in attempts for turn in trajectory.turns]
    buffers = [trajectory.buffer for trajectory in attempts]
    spans = np.concatenate([np.zeros((0, 3), np.int64), *(trajectory.spans for trajectory in attempts)])
    per_turn = {
        "start": number_column(spans[:, 0], np.int32),
        "prompt_end": number_column(spans[:, 1], np.int32),
        "end": number_column(spans[:, 2], np.int32),
        "stop": text_column([turn.stop for turn in turns]),
        "reward": number_column((turn.reward for turn in turns), np.float64),
        "said": message_column([turn.said for turn in turns]),
        "heard": list_column(
            [len(turn.heard) for turn in turns], message_column([message for turn in turns for message in turn.heard])
        ),
        **{name: number_column((getattr(turn.timing, name) for turn in turns), np.float64) for name in TIMES},
        "broke": text_column([turn.broke for turn in turns]),
    }
    actions = [trajectory.num_action_tokens for trajectory in attempts]
    return {
        "turns": list_column([len(trajectory.turns) for trajectory in attempts], struct_column(per_turn)),
        "tokens": token_column([len(buffer) for buffer in buffers], buffers, np.int32),
        "logprobs": token_column(actions, [turn.logprobs for turn in turns], np.float32),
        "versions": token_column(actions, [turn.versions for turn in turns], np.int32),
        **allowed_columns(attempts),
        **route_columns(attempts),
    }


def _read_attempts(column: Mapping[str, Any]) -> list[Trajectory | None]:
    """The attempt of each row; None for a group without attempts."""
    per_turn = fields_of(column["turns"].values)
    spans = np.stack([per_turn[name].to_numpy().astype(np.int64) for name in ("start", "prompt_end", "end")], axis=1)
    actions = spans[:, 2] - spans[:, 1]
    heard = messages_of(per_turn["heard"].values)
    count = len(spans)
    rest = list(
        zip(
            pieces_of(column["logprobs"], actions),
            pieces_of(column["versions"], actions),
            texts_of(per_turn["stop"]),
            per_turn["reward"].to_pylist(),
            messages_of(per_turn["said"]),
            (tuple(heard[start:end]) for start, end in bounds_of(per_turn["heard"])),
            map(TurnTiming, *(per_turn[name].to_pylist() for name in TIMES)),
            texts_if_any(per_turn, "broke", count, Break.none),
            read_allowed(column, actions),
            strict=True,
        )
    )
    attempts: list[Trajectory | None] = []
    num_rows = len(column["status"])
    for tokens, (start, end), status, outcome, marks, *rest_of_row in zip(
        pieces_of(column["tokens"], column["tokens"].value_lengths().to_pylist()),
        bounds_of(column["turns"]),
        column["status"].to_pylist(),
        column["outcome"].to_pylist(),
        maps_of(column["marks"]),
        texts_if_any(column, "failure", num_rows),
        column["seat"].to_pylist() if "seat" in column else [0] * num_rows,
        _openings(column),
        map(tools_of_json, texts_if_any(column, "tools", num_rows)),
        read_routes(column, num_rows),
        strict=True,
    ):
        parts = tokens, spans[start:end], rest[start:end]
        attempts.append(rebuild_trajectory(*parts, Status(status), outcome, marks, *rest_of_row) if status else None)
    return attempts


def _openings(column: Mapping[str, Any]) -> list[tuple[Message, ...]]:
    """The messages of the first prompt of each row; none where the file is from before they were recorded."""
    if "opening" not in column:
        return [()] * len(column["status"])
    messages = messages_of(column["opening"].values)
    return [tuple(messages[start:end]) for start, end in bounds_of(column["opening"])]


def _to_json(task: Task) -> str:
    try:
        return json.dumps(dict(task.data), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"the data of task {task.id} must be JSON values to be archived: {error}") from None
