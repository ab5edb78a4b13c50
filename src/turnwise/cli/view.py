"""What `turnwise view` does: a page over run folders until somebody stops it, or one file of it."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.view.watched_run import WatchedRuns

PORT = 8765
EPILOG = """examples:
  turnwise view runs/quickstart                                a page for this machine, with curves and attempts
  turnwise view runs/a runs/b runs/c                           several runs beside each other
  turnwise view runs/a --html attempt.html --attempt train/12/3/0   one attempt as a file, to send to somebody
  turnwise view runs/a --html step.html --step 12              all attempts of a step; greedy/50 is an evaluation
  turnwise view runs/a --host 0.0.0.0                          for other machines, with a token in the address
"""


def add_view_command(commands: Any) -> None:
    view = commands.add_parser(
        "view",
        help="look at runs in a browser: curves, attempts, tokens, prefix trees",
        description="A web page over run folders, also of runs that go on. It needs no account and no network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    view.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    view.add_argument("--port", type=int, help=f"port ({PORT}, or a free one where that is taken)")
    view.add_argument(
        "--key-file", default="", metavar="FILE", help="the token; another --host has one anyway (made up)"
    )
    view.add_argument("--html", metavar="FILE", help="write one file instead, of an attempt or a step")
    view.add_argument("--attempt", metavar="KEY", help="with --html: KIND/STEP/GROUP/ATTEMPT, as the page names it")
    view.add_argument("--step", metavar="N", help="with --html: a training step, or KIND/N of an evaluation")


def view_command(chosen: argparse.Namespace) -> int:
    from turnwise.view.watched_run import WatchedRuns

    if chosen.html is None and (chosen.attempt or chosen.step):
        raise ValueError("--attempt and --step go with --html FILE")
    if chosen.port is not None and not 0 <= chosen.port < 1 << 16:
        raise ValueError(f"--port {chosen.port}: ports are 0 to 65535")
    runs = WatchedRuns.open(chosen.runs)
    return write_file(runs, chosen) if chosen.html is not None else serve(runs, chosen)


def write_file(runs: WatchedRuns, chosen: argparse.Namespace) -> int:
    """One attempt or step as a file."""
    from turnwise.atomic import write_atomically
    from turnwise.inspect.attempts import AttemptKey
    from turnwise.view.single_file import attempt_file, step_file, step_of

    if len(runs.runs) != 1 or bool(chosen.attempt) == bool(chosen.step):
        raise ValueError("--html takes one run, and either --attempt KEY or --step N")
    [run] = runs
    runs.read_all()
    if chosen.attempt:
        text = attempt_file(runs, run, AttemptKey.parse(chosen.attempt))
    else:
        text, whole, total = step_file(runs, run, *step_of(chosen.step))
        if whole < total:
            print(f"the file has {whole} of {total} attempts: more would make it too large", file=sys.stderr)
    path = Path(chosen.html)
    try:
        write_atomically(path, text)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"cannot write {path} ({error.strerror}); choose another file") from None
    print(f"{path}: {len(text) / 1e6:.1f} MB; open it in a browser")
    return 0


def serve(runs: WatchedRuns, chosen: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    from turnwise.serve.key import find_key
    from turnwise.view.gate import PARAMETER, is_this_machine
    from turnwise.view.server import ViewServer, check_installed

    check_installed()
    open_to_others = not is_this_machine(chosen.host)
    key = find_key("", chosen.key_file) if open_to_others or chosen.key_file else None
    token = key.text if key else ""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        stack.enter_context(runs)
        server = ViewServer(runs, chosen.host, PORT if chosen.port is None else chosen.port, token)
        try:
            stack.enter_context(server)
        except ValueError:
            if chosen.port is not None:
                raise
            server = stack.enter_context(ViewServer(runs, chosen.host, 0, token))
        made_up = key is not None and key.shown == key.text
        shown = server.url if key is None or made_up else f"{server.base}?{PARAMETER}=TOKEN   (TOKEN: {key.shown})"
        print(f"{', '.join(runs.runs)}: {shown}\nCtrl-C ends it", flush=True)
        stop.wait()
    return 0
