"""A matrix of faults: what breaks, when, how it is noticed, and what was lost or trained twice.

    python benchmarks/faults.py [--only WORD ...] [--quick] [--rows FILE]

Each cell is a small training run in a process of its own to which something is done. It is then finished, and audited:
every step is in metrics and archive, no group was trained on twice, no traceback of turnwise's own was printed, no
process is left, and, where the schedule is synchronous, all metrics are those of a run that nothing happened to, bit
for bit. Exit code 1 where a cell does not hold. As root, or where a user may not mount, see the cells of the disk.

With --rows each row is written to a file as soon as it is there. Cells whose row of the file holds are not run again,
and the table is of the whole file, so that the cells of one table may be run in several calls.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_cells import CLUSTER_CELLS
from fault_cells import CELLS, Cell, Unavailable, begun
from trial import Trial, left_running

COLUMNS = ("noticed", "outcome", "lost", "twice", "same")
QUICK = ("kill -9", "missing pointer", "two owners")


def play(cell: Cell, folder: Path, undisturbed: list[dict[str, object]]) -> dict[str, str]:
    """The row of a cell."""
    trial = Trial(folder, *cell.settings)
    row = {"what": cell.what, "when": cell.when}
    try:
        seen = cell.play(trial)
    except Unavailable as error:
        return {**row, **dict.fromkeys(COLUMNS, "-"), "outcome": f"not run: {error}", "wrong": ""}
    except (AssertionError, RuntimeError, ValueError) as error:
        return {**row, **dict.fromkeys(COLUMNS, "?"), "wrong": " ".join(str(error).split())[:300]}
    wrong = []
    if code := finished(trial):
        wrong.append(f"the run ended with {code}")
    lost, twice = trial.audit(cell.steps)
    same = trial.metrics == undisturbed
    if lost or twice:
        wrong.append(f"{lost} lost, {twice} twice")
    if cell.same and not same:
        wrong.append("other metrics than undisturbed")
    if "Traceback" in trial.said and not cell.theirs:
        wrong.append("a traceback")
    if left := left_running(folder):
        wrong.append(f"{len(left)} processes left")
    counted = {"lost": str(lost), "twice": str(twice), "same": ("yes" if same else "no") if cell.same else "-"}
    return {**row, "noticed": seen.noticed, "outcome": seen.outcome, **counted, "wrong": "; ".join(wrong)}


def finished(trial: Trial) -> int:
    """The exit code of the run once it has been brought to its end."""
    if (trial.out / "summary.json").exists():
        return 0
    return trial.finish() if begun(trial) else trial.start().wait(600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells whose fault or moment has one of these words")
    parser.add_argument("--quick", action="store_true", help="a few cells")
    parser.add_argument("--cluster", action="store_true", help="cells about other processes, servers and nodes alone")
    parser.add_argument("--keep", metavar="FOLDER", help="leave all runs in this folder")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="go on from the rows of this file, and add to them")
    chosen = parser.parse_args()
    words = chosen.only or (QUICK if chosen.quick else None)
    among = CLUSTER_CELLS if chosen.cluster else CELLS if chosen.quick else (*CELLS, *CLUSTER_CELLS)
    rows = rows_of(chosen.rows)
    cells = [
        cell
        for cell in among
        if (not words or any(word in name_of(cell) for word in words))
        and (name_of(cell) not in rows or rows[name_of(cell)]["wrong"])
    ]
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="turnwise-faults-"))
    began = time.monotonic()
    try:
        undisturbed = []
        if any(cell.same for cell in cells):
            reference = Trial(folder / "undisturbed")
            assert reference.start().wait(600) == 0, reference.said
            undisturbed = reference.metrics
        for place, cell in enumerate(cells):
            row = rows[name_of(cell)] = play(cell, folder / f"{place:02d}", undisturbed)
            if chosen.rows:
                with open(chosen.rows, "a") as file:
                    file.write(json.dumps(row) + "\n")
            state = f"WRONG: {row['wrong']}" if row["wrong"] else "ok"
            print(f"{place + 1}/{len(cells)} {name_of(cell)}: {state}", file=sys.stderr, flush=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    order = [name for name in map(name_of, among) if name in rows]
    wrong = print_table([rows[name] for name in order])
    print(f"\n{len(order)} cells, {wrong} wrong, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if wrong else 0


def name_of(cell: Cell) -> str:
    return f"{cell.what}, {cell.when}"


def rows_of(file: Path | None) -> dict[str, dict[str, str]]:
    """The last row of each cell, by its name."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {f"{row['what']}, {row['when']}": row for row in rows}


def print_table(rows: Sequence[Mapping[str, str]]) -> int:
    """How many rows do not hold."""
    print("| injected | when | noticed | outcome | lost | trained twice | as undisturbed | holds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        mark = f"**wrong: {row['wrong']}**" if row["wrong"] else "ok"
        print(f"| {' | '.join(row[name] for name in ('what', 'when', *COLUMNS))} | {mark} |")
    return sum(bool(row["wrong"]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
