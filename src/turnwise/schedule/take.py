"""Take the groups of one step from the stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.schedule.shared_failure import MIN_ATTEMPTS, attempts_of, shared_failure, shared_failure_message
from turnwise.schedule.stopping import NothingKept, RunStopped
from turnwise.schedule.stream import GroupStream
from turnwise.types import Group, Status

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of one step."""

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]

    @property
    def count(self) -> int:
        return len(self.kept) + len(self.dropped)


async def take(stream: GroupStream, count: int, keep: Callable[[Group], bool], limit: int) -> Taken:
    """The next `count` groups worth keeping; a dropped one frees its slot at once and is replaced.

    Raises RunStopped when `limit` groups in a row are dropped, and earlier if `count` in a row have failed for one
    reason.
    """
    kept: list[Group] = []
    dropped: list[Group] = []
    failed: list[Group] = []
    """The last dropped groups in a row that have no attempt that counts."""
    in_a_row = 0
    while len(kept) < count:
        group = await stream.next(count - len(kept))
        if keep(group):
            kept.append(group)
            in_a_row = 0
            failed.clear()
            continue
        dropped.append(group)
        failed = [] if group.trajectories else [*failed, group]
        num_failed = len(attempts_of(failed))
        if len(failed) >= count and num_failed >= MIN_ATTEMPTS and (failure := raised_by_all(failed)):
            raise RunStopped(shared_failure_message(num_failed, f"of {len(failed)} groups in a row", failure))
        stream.replace_dropped()
        in_a_row += 1
        if in_a_row == limit // 4:
            log.warning("%d groups in a row were dropped; last: %s", in_a_row, why_dropped(group))
        if in_a_row >= limit:
            message = f"{in_a_row} groups in a row were dropped; last: {why_dropped(group)}"
            raise NothingKept(message, dropped)
    return Taken(tuple(kept), tuple(dropped))


def raised_by_all(groups: Sequence[Group]) -> str:
    """What all attempts raised; empty if one did not raise, or raised something else."""
    return shared_failure(groups, among=(Status.failed,))


def why_dropped(group: Group) -> str:
    """A phrase for logs: the statuses of attempts that do not count, or the totals that are all equal."""
    if group.failed:
        statuses = sorted({str(trajectory.status) for trajectory in group.failed})
        why = next((f" ({trajectory.failure})" for trajectory in group.failed if trajectory.failure), "")
        return (
            f"task {group.task.id} had {len(group.trajectories)} attempts that count and {len(group.failed)} that "
            f"ended as {', '.join(statuses)}{why}; see events.log in the run folder"
        )
    totals = sorted({trajectory.total for trajectory in group.trajectories})
    return f"the attempts at task {group.task.id} were paid {', '.join(f'{total:g}' for total in totals) or 'nothing'}"
