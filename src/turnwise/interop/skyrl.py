"""SkyRL's step-wise `GeneratorOutput`, read as groups and written from them.

The format is a dict of parallel lists, one entry per row: `prompt_token_ids`, `response_ids`, `rewards`, `loss_masks`,
`stop_reasons`, `rollout_logprobs`, `trajectory_ids`, `is_last_step`. A row is one turn, or several turns with the
observations between them at loss mask 0; the rows of an attempt are neighbours.

What the format cannot hold, and reading therefore fills in:

* the dataset and data of a task ("skyrl", nothing), status (finished), marks, versions (0), texts, timing, routes;
* the outcome: it is part of the last turn's reward, and what is read has outcome 0. Totals stay;
* failed attempts, groups without an attempt that counts, and turns without an action in an attempt that sampled
  something elsewhere. The reward of such a turn is paid with the action before, or else with the first action;
* `stop_string`, which SkyRL calls "stop" too; and in a row of several turns, the stop reasons of all but the last;
* the logprobs of a whole output in which any is unknown (NaN).

What writing gives back of an output that was read, beside the choice of one row per turn or merged rows:

* masked tokens at the end of a row are gone; a later prompt holds those that the model saw. Masked tokens at the start
  of a response are prompt, and a row without a trained token is gone unless its attempt has no other;
* a reward is on the last trained token of its turn, never one number for a row; logprobs are rounded to 32 bits;
* repetitions are numbered from 0 and the attempts at an instance are neighbours, in the order of their first rows;
* a stop reason that is not "stop", "length" or "abort" becomes "abort".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.interop.unguided import unguided
from turnwise.messages import Message
from turnwise.tokens import Tokens, extends
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn, turns_of

KEYS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "trajectory_ids", "is_last_step")
"""Every step-wise output has them; `stop_reasons` and `rollout_logprobs` may be absent or None."""
UNREADABLE = ("rollout_expert_indices", "process_rewards", "pixel_values", "image_grid_thw")
"""Parts of a sample that are not read: refused, because what is left would be another sample."""
READ_STOP = {"stop": StopReason.end_token, "length": StopReason.length}
"""Any other word is an abort: SkyRL, too, treats all but "stop" as cut short."""
WRITE_STOP = {StopReason.length: "length", StopReason.abort: "abort"}
REAL = (bool, int, float, np.bool_, np.integer, np.floating)
IMPOSTORS = (bool, np.timedelta64)
"""Subclasses of whole numbers."""
LARGEST_TOKEN = np.iinfo(np.int32).max
LARGEST_LOGPROB = 1e-4
"""Rounding of an engine, as `Turn` allows it."""
ID_TEXT = re.compile(r"(.+)_([0-9]{1,18})", re.DOTALL)


class TrajectoryID(NamedTuple):
    """Which attempt a row belongs to: the fields and the method that SkyRL's trainer uses.

    Example:
        TrajectoryID("hops-5f2c01", 3).to_string() == "hops-5f2c01_3"
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def from_generator_output(output: Mapping[str, Any]) -> list[Group]:
    """The groups in a step-wise `GeneratorOutput`; a ValueError names the row and the key that are wrong.

    Each maximal run of trained tokens is a turn, and all that the row holds before it is its prompt. Rewards count from
    a turn's first token to the next turn's first; what is paid before an attempt's first action goes with that. A row
    without a trained token (SkyRL masks whole rows that were cut short) is a turn with an empty action: its reward
    counts and nothing in it trains. Without `stop_reasons` every turn ended by itself, without `rollout_logprobs` they
    are NaN.

    Lists, tuples, arrays and CPU tensors will do; masks and flags may be bools or 0 and 1 of any type. Tokens are of an
    integer type: a float32 cannot tell large ids apart.

    Example:
        from_generator_output({"prompt_token_ids": [[1, 17]], "response_ids": [[9, 2]], "rewards": [[0.0, 1.0]],
                               "loss_masks": [[1, 1]], "stop_reasons": ["stop"], "rollout_logprobs": None,
                               "trajectory_ids": [("hops-5f2c01", 0)], "is_last_step": [True]})
    """
    attempts: dict[str, list[Trajectory]] = {}
    rows: list[SkyRLRow] = []
    for row in read_rows(output):
        rows.append(row)
        if row.is_last:
            attempts.setdefault(row.id.instance_id, []).append(join_rows(rows))
            rows = []
    return [Group(Task(instance, "skyrl"), tuple(made)) for instance, made in attempts.items()]


def to_generator_output(groups: Sequence[Group], merge: bool = False) -> dict[str, Any]:
    """A step-wise `GeneratorOutput` of the attempts that count: one row per turn, or per chain of turns with `merge`.

    With `merge`, a turn joins the row of the turn before if its prompt begins with that turn's whole prompt and action;
    the observation in between gets mask, reward and logprob 0. A turn whose prompt adds nothing at all to the turn
    before stays apart, where SkyRL would merge it: in one row the two could not be told apart.

    An attempt that sampled nothing is one row with the last token of its first prompt repeated at loss mask 0, because
    its total must stay in the statistics of its group and a reward needs a token to sit on.

    Example:
        to_generator_output([group])["response_ids"] == [turn.action.tolist() for turn in turns_of([group])]
    """
    rows: list[dict[str, Any]] = []
    tasks: set[str] = set()
    for group in groups:
        if group.task.id in tasks:
            raise ValueError(f"task {group.task.id!r} has two groups, but SkyRL makes one of each instance: join them")
        tasks.add(group.task.id)
        for repetition, attempt in enumerate(group.trajectories):
            rows.extend(write_attempt(unguided(attempt, "SkyRL"), TrajectoryID(group.task.id, repetition), merge))
    if not rows:
        raise ValueError("no attempt that counts in these groups, and SkyRL refuses an empty GeneratorOutput")
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    if any(np.isnan(turn.logprobs).any() for turn in turns_of(groups)):
        columns["rollout_logprobs"] = None
    return {**columns, "rollout_metrics": None, "rollout_expert_indices": None}


@dataclass(frozen=True, slots=True, eq=False)
class SkyRLRow:
    """One checked row. R: its response tokens."""

    index: int
    id: TrajectoryID
    is_last: bool
    tokens: Tokens
    """[P + R]"""
    num_prompt: int
    mask: NDArray[np.bool_]
    """[R]"""
    rewards: NDArray[np.float64] | float
    """[R], or paid for the row."""
    logprobs: NDArray[np.float64] | None
    """[R]"""
    stop: StopReason

    def turns(self) -> tuple[float, list[Turn]]:
        """What was paid before the first trained token, and the turns; at least one, if only with an empty action."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False))
        starts, ends = edges[::2].tolist(), edges[1::2].tolist()
        if not starts:
            return 0.0, [self.turn(0, 0, float(np.sum(self.rewards)), self.stop)]
        if isinstance(self.rewards, float):
            early, paid = 0.0, [0.0] * (len(starts) - 1) + [self.rewards]
        else:
            early = float(self.rewards[: starts[0]].sum())
            paid = np.add.reduceat(self.rewards, starts).tolist()
        stops = [StopReason.end_token] * (len(starts) - 1) + [self.stop]
        return early, [self.turn(*given) for given in zip(starts, ends, paid, stops, strict=True)]

    def turn(self, start: int, end: int, reward: float, stop: StopReason) -> Turn:
        """Response tokens [start, end) as an action."""
        first, last = self.num_prompt + start, self.num_prompt + end
        logprobs: Any = np.full(end - start, np.nan) if self.logprobs is None else self.logprobs[start:end]
        versions = np.zeros(end - start, np.int32)
        said = Message("assistant", "")
        return Turn(self.tokens[:first], self.tokens[first:last], logprobs, versions, stop, reward, said)


def join_rows(rows: Sequence[SkyRLRow]) -> Trajectory:
    """The attempt whose rows these are."""
    turns: list[Turn] = []
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            for row in rows:
                early, made = row.turns()
                earner = max(len(turns) - 1, 0)
                turns.extend(made)
                if early:
                    turns[earner] = replace(turns[earner], reward=turns[earner].reward + early)
        return Trajectory(tuple(turns), Status.finished)
    except ValueError as error:  # all else was checked before: the rewards are finite, but do not add up to such
        raise ValueError(f"row {row.index}: rewards: {error}") from None


def read_rows(output: Mapping[str, Any]) -> Iterator[SkyRLRow]:
    """The rows of an output, in order, each checked by itself and against its neighbours."""
    columns = read_columns(output)
    per_token = [not isinstance(reward, REAL) for reward in columns["rewards"]]
    ended: dict[TrajectoryID, int] = {}
    current: TrajectoryID | None = None
    for index, token_level in enumerate(per_token):
        if token_level != per_token[0]:
            raise ValueError(f"row {index}: rewards: either every row has one number or every row one per token")
        row = read_row(index, {key: column[index] for key, column in columns.items()})
        if row.id in ended:
            raise ValueError(f"row {index}: trajectory_ids: {row.id} has ended at row {ended[row.id]}, by is_last_step")
        if current not in (None, row.id):
            raise ValueError(
                f"row {index}: trajectory_ids: {row.id} begins before {current} has a row with is_last_step"
            )
        current = None if row.is_last else row.id
        if row.is_last:
            ended[row.id] = index
        yield row
    if current is not None:
        raise ValueError(f"row {index}: is_last_step: the output ends before {current} does")


def read_columns(output: Mapping[str, Any]) -> dict[str, list[Any]]:
    """One list per key, all of one length; without the optional keys that are absent."""
    if not isinstance(output, Mapping):
        raise ValueError(f"a GeneratorOutput is a mapping, got a {type(output).__name__}")
    for key in UNREADABLE:
        if output.get(key) is not None:
            raise ValueError(f"{key} has no place in a Turn: remove it if the rest means the same without it")
    columns: dict[str, list[Any]] = {}
    for key in (*KEYS, "stop_reasons", "rollout_logprobs"):
        column = as_array(output.get(key))
        if column is None and key in KEYS:
            raise ValueError(f"{key} is missing; only a step-wise GeneratorOutput can be read")
        if column is None:
            continue
        if not isinstance(column, list | tuple) and not (isinstance(column, np.ndarray) and column.ndim):
            raise ValueError(f"{key} must be a list with one entry per row, got a {type(column).__name__}")
        columns[key] = list(column)
        if len(columns[key]) != len(columns[KEYS[0]]):
            raise ValueError(f"{key} has {len(columns[key])} rows, {KEYS[0]} has {len(columns[KEYS[0]])}")
    if not columns[KEYS[0]]:
        raise ValueError(f"{KEYS[0]} has no rows: the output is empty")
    return columns


def read_row(index: int, cells: Mapping[str, Any]) -> SkyRLRow:
    """One row, checked by itself."""
    where = f"row {index}: "
    prompt = read_tokens(cells["prompt_token_ids"], where + "prompt_token_ids")
    response = read_tokens(cells["response_ids"], where + "response_ids")
    if not len(prompt):
        raise ValueError(where + "prompt_token_ids is empty")
    paid_once = isinstance(cells["rewards"], REAL)
    per_token = {"loss_masks": cells["loss_masks"], "rewards": [cells["rewards"]] if paid_once else cells["rewards"]}
    if "rollout_logprobs" in cells:
        per_token["rollout_logprobs"] = cells["rollout_logprobs"]
    numbers = {key: read_numbers(values, where + key) for key, values in per_token.items()}
    for key, array in numbers.items():
        if len(array) != len(response) and not (paid_once and key == "rewards"):
            raise ValueError(f"{where}{key} has {len(array)} entries, response_ids has {len(response)}")
    if not np.isin(numbers["loss_masks"], (0.0, 1.0)).all():
        raise ValueError(where + "loss_masks must hold 0 and 1 only")
    if not np.isfinite(numbers["rewards"]).all():
        raise ValueError(where + "rewards must be finite")
    mask, logprobs = numbers["loss_masks"] == 1.0, numbers.get("rollout_logprobs")
    rewards = float(numbers["rewards"][0]) if paid_once else numbers["rewards"]
    if logprobs is not None and not (logprobs[mask] <= LARGEST_LOGPROB).all():
        raise ValueError(where + "rollout_logprobs of trained tokens must be numbers up to 0; None if they are unknown")
    reason = cells.get("stop_reasons", "stop")
    if not isinstance(reason, str):
        raise ValueError(f"{where}stop_reasons must be a string, got a {type(reason).__name__}")
    is_last = cells["is_last_step"]
    if not isinstance(is_last, REAL) or is_last not in (0, 1):
        raise ValueError(f"{where}is_last_step must be true or false, got a {type(is_last).__name__}")
    tokens = np.concatenate([prompt, response])
    tokens.flags.writeable = False
    stop = READ_STOP.get(reason, StopReason.abort)
    id = read_id(cells["trajectory_ids"], where + "trajectory_ids")
    return SkyRLRow(index, id, bool(is_last), tokens, len(prompt), mask, rewards, logprobs, stop)


def read_id(value: Any, where: str) -> TrajectoryID:
    """An object with both attributes, a pair, or a string "instance_repetition"."""
    pair: Any = (None, None)
    if isinstance(value, str) and (found := ID_TEXT.fullmatch(value)):
        pair = found[1], int(found[2])
    elif hasattr(value, "instance_id") and hasattr(value, "repetition_id"):
        pair = value.instance_id, value.repetition_id
    elif isinstance(value, list | tuple) and len(value) == 2:
        pair = value
    instance, repetition = pair
    if not (is_whole(instance) or (isinstance(instance, str) and instance)) or not is_whole(repetition):
        raise ValueError(
            f"{where} must be an object with instance_id and repetition_id, such a pair or a string "
            f'"instance_repetition", got a {type(value).__name__}'
        )
    return TrajectoryID(str(instance), int(repetition))


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and type(value) not in IMPOSTORS and 0 <= int(value) < 2**63


def read_tokens(values: Any, where: str) -> Tokens:
    array = flat_array(values, where, (int, np.integer), "iu")
    if len(array) and (array.min() < 0 or array.max() > LARGEST_TOKEN):
        raise ValueError(f"{where} must hold token ids from 0 to {LARGEST_TOKEN}")
    return array.astype(np.int32)


def read_numbers(values: Any, where: str) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return flat_array(values, where, REAL, "biuf").astype(np.float64)


def flat_array(values: Any, where: str, types: tuple[type, ...], kinds: str) -> NDArray[Any]:
    """[n] a row's numbers, if they are of these Python types or of a dtype of these kinds."""
    values = as_array(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds + "O":
        if values.dtype.kind != "O":
            return np.asarray(values)
        values = values.tolist()
    expected = "whole number" if kinds == "iu" else "number"
    if not isinstance(values, list | tuple):
        raise ValueError(f"{where} must be a list of {expected}s, got a {type(values).__name__}")
    wrong = {t for t in set(map(type, values)) if not issubclass(t, types) or (t in IMPOSTORS and t not in types)}
    for place, value in enumerate(values if wrong else ()):
        if type(value) in wrong:
            raise ValueError(f"{where}, entry {place}, must be a {expected}, got a {type(value).__name__}")
    try:
        return np.array(values, np.int64 if kinds == "iu" else np.float64)
    except OverflowError:
        raise ValueError(f"{where} holds a number that is too large") from None


def as_array(values: Any) -> Any:
    """Tensors and the like as numpy arrays, anything else as it is."""
    if isinstance(values, np.ndarray | np.generic) or not hasattr(values, "__array__"):
        return values
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # on another device, of a dtype numpy lacks, or part of a graph
        return values


# ---------------------------------------------------------------- writing


def write_attempt(attempt: Trajectory, id: TrajectoryID, merge: bool) -> list[dict[str, Any]]:
    """The rows of one attempt."""
    acted = [turn for turn in attempt.turns if len(turn.action)]
    if not acted:
        first = attempt.turns[0]
        zero = np.zeros(1, np.int32)
        filler = replace(first, action=first.prompt[-1:], logprobs=zero.astype(np.float32), versions=zero)
        rows = [write_chain([filler], [attempt.total])]
        rows[0]["loss_masks"] = [0]
    else:
        paid = payments(attempt)
        if not all(map(math.isfinite, paid)):
            raise ValueError(f"{id}: its rewards and its outcome do not add up to finite numbers")
        rows, start = [], 0
        for end in range(1, len(acted) + 1):
            if end == len(acted) or not (merge and continues(acted[end], acted[end - 1])):
                rows.append(write_chain(acted[start:end], paid[start:end]))
                start = end
    for place, row in enumerate(rows):
        row.update(trajectory_ids=id, is_last_step=place == len(rows) - 1)
    return rows


def payments(attempt: Trajectory) -> list[float]:
    """What each turn with an action is paid: its own reward, those of turns without action next to it, the outcome."""
    paid: list[float] = []
    early = 0.0
    for turn in attempt.turns:
        if len(turn.action):
            paid.append(turn.reward + early)
            early = 0.0
        elif paid:
            paid[-1] += turn.reward
        else:
            early += turn.reward
    paid[-1] += attempt.outcome
    return paid


def continues(turn: Turn, before: Turn) -> bool:
    """Whether the two can be turns of one row: the prompt of `turn` begins with all of `before` and adds to it."""
    return len(turn.prompt) > len(before.prompt) + len(before.action) and extends(turn, before)


def write_chain(turns: Sequence[Turn], paid: Sequence[float]) -> dict[str, Any]:
    """One row of turns each of which continues the one before."""
    first, last = turns[0], turns[-1]
    size = len(first.prompt)
    response = np.concatenate([last.prompt[size:], last.action])
    mask = np.zeros(len(response), np.int64)
    rewards = np.zeros(len(response))
    logprobs = np.zeros(len(response), np.float32)
    for turn, reward in zip(turns, paid, strict=True):
        start, end = len(turn.prompt) - size, len(turn.prompt) - size + len(turn.action)
        mask[start:end] = 1
        logprobs[start:end] = turn.logprobs
        rewards[end - 1] = reward
    return {
        "prompt_token_ids": first.prompt.tolist(),
        "response_ids": response.tolist(),
        "rewards": rewards.tolist(),
        "loss_masks": mask.tolist(),
        "stop_reasons": WRITE_STOP.get(last.stop, "stop"),
        "rollout_logprobs": logprobs.tolist(),
    }
