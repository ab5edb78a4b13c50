"""A matrix of faults: what breaks, when, how it is noticed, and what was lost or trained twice.

    python benchmarks/faults.py [--only WORD ...] [--quick] [--json FILE]

Each cell is a small training run in a process of its own to which something is done. It is then finished, and audited:
every step is in metrics and archive, no group was trained on twice, no traceback of turnwise's own was printed, no
process is left, and, where the schedule is synchronous, all metrics are those of a run that nothing happened to, bit
for bit. Exit code 1 where a cell does not hold. As root, or where a user may not mount, see the cells of the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
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
    parser.add_argument("--json", metavar="FILE", type=Path)
    chosen = parser.parse_args()
    words = chosen.only or (QUICK if chosen.quick else None)
    among = CLUSTER_CELLS if chosen.cluster else CELLS if chosen.quick else (*CELLS, *CLUSTER_CELLS)
    cells = [cell for cell in among if not words or any(word in f"{cell.what}, {cell.when}" for word in words)]
    folder = Path(chosen.keep or tempfile.mkdtemp(prefix="turnwise-faults-"))
    began, rows = time.monotonic(), []
    try:
        undisturbed = []
        if any(cell.same for cell in cells):
            reference = Trial(folder / "undisturbed")
            assert reference.start().wait(600) == 0, reference.said
            undisturbed = reference.metrics
        for place, cell in enumerate(cells):
            row = play(cell, folder / f"{place:02d}", undisturbed)
            rows.append(row)
            state = f"WRONG: {row['wrong']}" if row["wrong"] else "ok"
            print(f"{place + 1}/{len(cells)} {cell.what}, {cell.when}: {state}", file=sys.stderr, flush=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("| injected | when | noticed | outcome | lost | trained twice | as undisturbed | holds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        mark = f"**wrong: {row['wrong']}**" if row["wrong"] else "ok"
        print(f"| {' | '.join(row[name] for name in ('what', 'when', *COLUMNS))} | {mark} |")
    wrong = sum(bool(row["wrong"]) for row in rows)
    print(f"\n{len(rows)} cells, {wrong} wrong, {(time.monotonic() - began) / 60:.1f} minutes")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
