"""What the page can ask: an address for each question, and the function that answers it with JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwise import __version__
from turnwise.inspect.attempts import AttemptKey
from turnwise.view.attempt_page import attempt_page, text_page
from turnwise.view.curves import curves, metric_list
from turnwise.view.group_page import difference_page, node_text, tree_page
from turnwise.view.recipes import recipe_table
from turnwise.view.table import attempts_table, groups_table
from turnwise.view.token_page import span_page, token_page
from turnwise.view.watched_run import WatchedRun, WatchedRuns

MOST_CURVES = 60
Question = Callable[[WatchedRuns, Mapping[str, Any], Mapping[str, str]], Any]
"""The runs, the parts of the address, and its parameters."""


def answer_runs(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return {"version": runs.version, "turnwise": __version__, "runs": [describe_run(run) for run in runs]}


def describe_run(run: WatchedRun) -> dict[str, Any]:
    """How a run stands."""
    reader = run.reader
    lines, unreadable = reader.metrics.lines, reader.attempts.unreadable
    steps = reader.config.get("steps")
    try:
        written = reader.folder.metrics.stat().st_mtime
    except OSError:
        written = 0.0
    return {
        "name": run.name,
        "where": str(reader.folder.path),
        "version": run.version,
        "step": max((line["step"] for line in lines), default=0),
        "steps": steps if isinstance(steps, int) else None,
        "finished": run.finished,
        "written": int(written),
        "attempts": len(reader.attempts),
        "waiting_files": reader.attempts.num_waiting,
        "trouble": [text for text in (run.trouble, *list(unreadable.values())[:5]) if text],
        "num_unreadable_files": len(unreadable),
        "num_unreadable_lines": reader.metrics.num_unreadable,
        "has_config": bool(reader.config),
    }


def answer_metrics(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return metric_list(runs)


def answer_curves(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    names = [name for name in parameters.get("names", "").split("\n") if name]
    return curves(runs, names[:MOST_CURVES])


def answer_recipes(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return recipe_table(runs)


def answer_attempts(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return attempts_table(runs[parts["run"]], parameters)


def answer_groups(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return groups_table(runs[parts["run"]], parameters)


def answer_attempt(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return attempt_page(runs[parts["run"]], key_of(parts))


def answer_text(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return text_page(runs[parts["run"]], key_of(parts), parameters)


def answer_tokens(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return token_page(runs[parts["run"]], key_of(parts), parameters)


def answer_span(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return span_page(runs[parts["run"]], key_of(parts), parameters)


def answer_tree(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return tree_page(runs[parts["run"]], parts["kind"], parts["step"], parts["group"])


def answer_node(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    return node_text(runs[parts["run"]], parts["kind"], parts["step"], parts["group"], parameters)


def answer_difference(runs: WatchedRuns, parts: Mapping[str, Any], parameters: Mapping[str, str]) -> Any:
    place = parts["kind"], parts["step"], parts["group"]
    return difference_page(runs[parts["run"]], *place, parts["one"], parts["other"])


def key_of(parts: Mapping[str, Any]) -> AttemptKey:
    return AttemptKey(parts["kind"], parts["step"], parts["group"], parts["attempt"])


GROUP = "{kind}/{step:int}/{group:int}"
ATTEMPT = GROUP + "/{attempt:int}"
QUESTIONS: dict[str, Question] = {
    "/api/runs": answer_runs,
    "/api/metrics": answer_metrics,
    "/api/curves": answer_curves,
    "/api/recipes": answer_recipes,
    "/api/{run}/attempts": answer_attempts,
    "/api/{run}/groups": answer_groups,
    f"/api/{{run}}/attempt/{ATTEMPT}": answer_attempt,
    f"/api/{{run}}/text/{ATTEMPT}": answer_text,
    f"/api/{{run}}/tokens/{ATTEMPT}": answer_tokens,
    f"/api/{{run}}/span/{ATTEMPT}": answer_span,
    f"/api/{{run}}/tree/{GROUP}": answer_tree,
    f"/api/{{run}}/node/{GROUP}": answer_node,
    f"/api/{{run}}/difference/{GROUP}/{{one:int}}/{{other:int}}": answer_difference,
}
