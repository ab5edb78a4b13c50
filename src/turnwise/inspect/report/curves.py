"""The curves of one run: which metrics are drawn together, and with which intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from turnwise.inspect.held_out import HeldOut
from turnwise.inspect.report.line_chart import ChartLine, LineChart, Point, number
from turnwise.inspect.report.markup import Html, element, joined, note
from turnwise.inspect.run_reader import RunReader
from turnwise.inspect.training_groups import StepSpread, spreads_of
from turnwise.runs.curve import smooth
from turnwise.runs.metric_names import metric_of

PLAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("entropy", ("entropy",)),
    ("ratio of new to old probability", ("ratio",)),
    ("clipped tokens", ("clipped",)),
    ("divergence from the reference", ("kl",)),
    ("gradient norm", ("gradient_norm",)),
    ("engine against learner", ("gap/mean", "gap/max")),
    ("turns per attempt", ("trajectory/turns",)),
    ("sampled tokens per attempt", ("trajectory/action_tokens",)),
    ("lag", ("lag/mean", "lag/max")),
    ("groups that all attempts agree on", ("groups/zero_variance",)),
    ("sampled tokens per second", ("speed/tokens_per_second",)),
)
"""Title of a chart, and the metrics in it."""
STAGES = {
    "wait_for_groups": "waiting for groups",
    "forward_backward": "forward and backward",
    "score": "scoring",
    "plan_and_credit": "planning and credit",
    "optimizer": "optimizer",
    "load": "loading weights",
}
"""Parts of a step, by the end of their metric's name, in the order of their colours."""
LOGARITHMIC = ("gap/mean", "gap/max", "gradient_norm")


def curves(run: RunReader, held_out: Mapping[str, Sequence[HeldOut]]) -> Html:
    """Every chart that the run has values for."""
    spreads = {spread.step: spread for spread in spreads_of(run)}
    charts = [success_chart(run, spreads, held_out), reward_chart(run, spreads), *plain_charts(run), stage_chart(run)]
    figures = [figure for chart in charts if (figure := chart.figure()) is not None]
    if not figures:
        return note("No metrics are recorded yet.")
    flat = [f"{chart.title} {number(chart.constant)}" for chart in charts if chart.constant is not None]
    below = note(f"The same at every step: {', '.join(flat)}.") if flat else ""
    return joined([element("div", *figures, class_="charts"), below])


def success_chart(
    run: RunReader, spreads: Mapping[int, StepSpread], held_out: Mapping[str, Sequence[HeldOut]]
) -> LineChart:
    """Success while training, with its interval over groups, and on held-out tasks, with that of each evaluation."""
    training = run.metrics.series("success")
    points = [Point(step, value, *success_interval(spreads.get(step))) for step, value in training]
    lines = [ChartLine("training", points, 0, faint=True), ChartLine("training, smoothed", smoothed(training), 0)]
    lines += held_out_lines(held_out)
    about = "share of attempts; band: 95 % interval over the groups of a step; bars: 95 % interval of an evaluation"
    return LineChart("success", about, lines, share=True, wide=True)


def held_out_lines(held_out: Mapping[str, Sequence[HeldOut]]) -> Iterator[ChartLine]:
    for place, (kind, evaluations) in enumerate(held_out.items(), start=1):
        points = [Point(one.version, one.success, one.low, one.high) for one in evaluations]
        yield ChartLine(f"held out, {kind}", points, min(place, 5), marked=True)


def success_interval(spread: StepSpread | None) -> tuple[float, float]:
    return (float("nan"), float("nan")) if spread is None else (spread.success_low, spread.success_high)


def smoothed(series: Sequence[tuple[int, float]]) -> list[Point]:
    if not series:
        return []
    steps, values = np.array(series, np.float64).T
    return [Point(float(step), float(value)) for step, value in zip(steps, smooth(values), strict=True)]


def reward_chart(run: RunReader, spreads: Mapping[int, StepSpread]) -> LineChart:
    """Mean reward while training, with its interval over groups."""
    half = {step: spread.reward_half_width for step, spread in spreads.items()}
    points = [
        Point(step, value, value - half.get(step, float("nan")), value + half.get(step, float("nan")))
        for step, value in run.metrics.series("reward/mean")
    ]
    return LineChart(
        "reward", "mean of a step's attempts; band: 95 % interval over its groups", [line("reward", points)]
    )


def line(label: str, points: Iterable[Point], colour: int = 0) -> ChartLine:
    return ChartLine(label, list(points), colour)


def plain_charts(run: RunReader) -> Iterator[LineChart]:
    """The charts of metrics without an interval."""
    for title, names in PLAIN:
        lines = [line(name, points_of(run, name), place) for place, name in enumerate(names)]
        yield LineChart(title, meaning(names[0]), lines, logarithmic=names[0] in LOGARITHMIC)


def points_of(run: RunReader, name: str) -> list[Point]:
    return [Point(step, value) for step, value in run.metrics.series(name)]


def meaning(name: str) -> str:
    """What a metric is and its unit, as the reference says."""
    found = metric_of(name)
    if found is None:
        return ""
    words = found.meaning.rstrip(".").replace("`", "")
    return f"{words} ({found.unit})" if found.unit not in ("-", "") else words


def stage_chart(run: RunReader) -> LineChart:
    """Seconds of each part of a step."""
    lines = [
        line(label, points_of(run, f"seconds/{name}"), place) for place, (name, label) in enumerate(STAGES.items())
    ]
    moved = [one for one in lines if any(point.value for point in one.points)]
    return LineChart("seconds per stage of a step", "seconds of the wall clock", moved, wide=True)
