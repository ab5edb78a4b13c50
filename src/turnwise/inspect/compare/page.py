"""A comparison of runs as one HTML file, with their curves over each other."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.inspect.compare.run_comparison import RunComparison, contrast_line
from turnwise.inspect.flat_recipe import toml_text
from turnwise.inspect.report.curves import LOGARITHMIC, meaning, points_of, smoothed
from turnwise.inspect.report.line_chart import ChartLine, LineChart, Point
from turnwise.inspect.report.markup import Html, document, element, note, section, table, text
from turnwise.inspect.report.page import missing
from turnwise.inspect.report.tables import RECIPE_VALUE

COLOURS = 6
METRICS = (
    *("reward/mean", "entropy", "trajectory/turns", "trajectory/action_tokens", "clipped", "gradient_norm"),
    *("gap/mean", "lag/mean", "groups/zero_variance", "seconds/step", "speed/tokens_per_second"),
)
"""What is drawn beside success, one chart each with a line for every run."""
TEST = (
    "Each run is compared with the first by its newest evaluation. Where at least half of the held-out tasks of one "
    "are tasks of the other, results are compared task by task with the sign-flip test (McNemar's exact test with one "
    "attempt per task); otherwise with the two-proportion z-test. Intervals of differences are Newcombe's. See "
    "docs/guides/report.md."
)


def comparison_page(found: RunComparison) -> bytes:
    """The whole page, in UTF-8."""
    title = " against ".join(found.names)
    first = found.names[0]
    tests = element("ul", *(element("li", contrast_line(one, first)) for one in found.against_first))
    return document(
        f"{title} · turnwise compare",
        element("h1", title),
        section("Success and cost", table(("", *found.names), list(found.numbers())), tests, note(TEST)),
        section("Curves", curves(found)),
        section("Recipes", recipes(found)),
        missing_lists(found),
    )


def recipes(found: RunComparison) -> Html:
    if not found.recipes:
        return note("The recipes do not differ.")
    rows = [(name, *(text(toml_text(one), RECIPE_VALUE) for one in values)) for name, values in found.recipes.items()]
    return table(("key", *found.names), rows, "words recipe")


def curves(found: RunComparison) -> Html:
    charts = [held_out_chart(found), training_chart(found), *metric_charts(found)]
    figures = [figure for chart in charts if (figure := chart.figure()) is not None]
    return element("div", *figures, class_="charts") if figures else note("No metrics are recorded yet.")


def held_out_chart(found: RunComparison) -> LineChart:
    lines = [
        ChartLine(
            name,
            [Point(one.version, one.success, one.low, one.high) for one in overview.held_out.get("sampled", ())],
            place % COLOURS,
            marked=True,
        )
        for place, (name, overview) in enumerate(zip(found.names, found.overviews, strict=True))
    ]
    about = "share of sampled attempts at held-out tasks; bars: 95 % interval"
    return LineChart("held-out success", about, lines, share=True, wide=True)


def training_chart(found: RunComparison) -> LineChart:
    lines = []
    for place, (name, run) in enumerate(zip(found.names, found.runs, strict=True)):
        colour, series = place % COLOURS, run.metrics.series("success")
        lines.append(ChartLine(name, [Point(step, value) for step, value in series], colour, faint=True))
        lines.append(ChartLine(name, smoothed(series), colour))
    return LineChart("success in training", "share of attempts, smoothed", lines, share=True, wide=True)


def metric_charts(found: RunComparison) -> Iterator[LineChart]:
    for metric in METRICS:
        lines = [
            ChartLine(name, points_of(run, metric), place % COLOURS)
            for place, (name, run) in enumerate(zip(found.names, found.runs, strict=True))
        ]
        yield LineChart(metric, meaning(metric), lines, logarithmic=metric in LOGARITHMIC)


def missing_lists(found: RunComparison) -> Html:
    """What is missing of each run; nothing where all is there."""
    lines = [f"{name}: {line}" for name, run in zip(found.names, found.runs, strict=True) for line in missing(run)]
    if not lines:
        return Html()
    return section("Missing or unreadable", element("ul", *(element("li", line) for line in lines)))
