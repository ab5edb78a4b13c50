"""The commands that write a report of a run, and compare runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPORT_EPILOG = """examples:
  turnwise report runs/quickstart                              writes runs/quickstart/report.html
  turnwise report runs/quickstart --out report.html            somewhere else
  turnwise report runs/quickstart --png curve.png              the curve of success as a picture, too
"""
COMPARE_EPILOG = """examples:
  turnwise compare runs/a runs/b                               a table: recipes, success, cost
  turnwise compare runs/a runs/b runs/c --html compare.html    with curves, too; each against the first
"""


def add_report_commands(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a report of a run: one HTML file with curves, attempts and costs",
        description="One HTML file that needs nothing beside it, of a run that is over or goes on.",
        epilog=REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("run", metavar="RUN", help="a run folder")
    report.add_argument("--out", metavar="FILE", help="where the report goes (RUN/report.html)")
    report.add_argument("--png", metavar="FILE", help="write the curve of success as a picture, too")

    compare = commands.add_parser(
        "compare",
        help="compare runs: recipes, held-out success with a test, cost",
        description="What differs between the recipes of runs, their held-out success with intervals, and a test of\n"
        "whether each differs from the first: task by task where the held-out tasks are the same.",
        epilog=COMPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("runs", metavar="RUN", nargs="+", help="run folders, two or more")
    compare.add_argument("--html", metavar="FILE", help="write the comparison with curves as one HTML file, too")


def report_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.report.page import report
    from turnwise.inspect.run_reader import RunReader

    run = RunReader.open(chosen.run)
    out = Path(chosen.out) if chosen.out else run.folder.report
    write(out, report(run))
    print(f"wrote {out}")
    if chosen.png:
        from turnwise.inspect.overview import environments_of
        from turnwise.runs.curve import draw_curve

        title = f"{', '.join(environments_of(run.config)) or run.folder.path.name}: success"
        with writable(picture := Path(chosen.png)):
            draw_curve(run.metrics.finite_lines, picture, title)
        print(f"wrote {picture}")
    return 0


def compare_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.compare.page import comparison_page
    from turnwise.inspect.compare.run_comparison import RunComparison
    from turnwise.inspect.run_reader import RunReader

    if len(chosen.runs) < 2:
        raise ValueError("compare needs two runs or more; turnwise report describes one")
    found = RunComparison.of([RunReader.open(path) for path in chosen.runs])
    for line in found.describe():
        print(line)
    if chosen.html:
        write(Path(chosen.html), comparison_page(found))
        print(f"wrote {chosen.html}")
    return 0


def write(path: Path, data: bytes) -> None:
    """Put a file in its place."""
    from turnwise.atomic import write_atomically

    with writable(path):
        write_atomically(path, data)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be written; failures of the disk have an answer of their own."""
    from turnwise import disk

    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; make it or choose another file")
    try:
        yield
    except OSError as error:
        if disk.is_failure(error):
            raise
        raise ValueError(f"cannot write {path} ({error.strerror or error}); choose another file") from None
