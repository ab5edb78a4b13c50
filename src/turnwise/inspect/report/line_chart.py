"""A chart of lines as inline SVG. The page's style colours it, so that it is readable in light, dark and on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.inspect.report.markup import Html, element, joined

FLAT = 1e-6
"""Spread of values, relative to the largest, below which a line is flat but for rounding."""
WIDTH, HEIGHT = 520, 210
WIDE_WIDTH, WIDE_HEIGHT = 760, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 10, 26
MOST_POINTS = 400
"""Points of a line that are drawn; a longer one has the means of neighbours."""
LOG_SPAN = 20.0
"""Ratio of the largest value to the smallest from which a scale may be logarithmic."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a step, with the ends of its interval where it has one."""

    step: float
    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    marked: bool = False
    """Whether every point has a dot and a bar for its interval; otherwise intervals are a band."""
    faint: bool = False
    """Whether it stands behind another, which has the label."""


@dataclass(frozen=True, slots=True)
class LineChart:
    """A figure with a title, a legend and lines over steps.

    Example:
        LineChart("entropy", "nats", [ChartLine("entropy", [Point(1, 2.0), Point(2, 1.5)])]).figure()
    """

    title: str
    about: str
    lines: Sequence[ChartLine]
    share: bool = False
    """Whether values are shares, drawn from 0 to 100 %."""
    wide: bool = False
    logarithmic: bool = False
    """Whether the scale may be, where values span a wide range above 0."""

    @property
    def constant(self) -> float | None:
        """The value that all lines have at every step; None where they differ, or there is none."""
        values = [point.value for line in self.lines for point in line.points]
        if self.share or not values or max(values) - min(values) > FLAT * max(map(abs, values)):
            return None
        return values[0]

    def figure(self) -> Html | None:
        """The markup; None where there is no value, or the same at every step."""
        if not any(line.points for line in self.lines) or self.constant is not None:
            return None
        lines = [thinned(line) for line in self.lines if line.points]
        named = [line for line in lines if not line.faint]
        keys = [
            element("span", element("i"), line.label, class_=f"key s{line.colour}")
            for line in (named if len(named) > 1 or self.wide else ())
        ]
        return element(
            "figure",
            element("figcaption", self.title, element("span", self.about)),
            drawing(lines, self),
            element("div", *keys, class_="keys") if keys else "",
            class_="wide" if self.wide else None,
        )


def thinned(line: ChartLine) -> ChartLine:
    """The line with the means of neighbours in place of more points than can be told apart."""
    if len(line.points) <= MOST_POINTS or line.marked:
        return line
    size = math.ceil(len(line.points) / MOST_POINTS)
    chunks = [line.points[start : start + size] for start in range(0, len(line.points), size)]

    def mean(chunk: Sequence[Point], of: Callable[[Point], float]) -> float:
        return math.fsum(map(of, chunk)) / len(chunk)

    points = [
        Point(
            mean(c, lambda p: p.step), mean(c, lambda p: p.value), mean(c, lambda p: p.low), mean(c, lambda p: p.high)
        )
        for c in chunks
    ]
    return ChartLine(line.label, points, line.colour, line.marked, line.faint)


# ---------------------------------------------------------------- drawing


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value is on the page."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.logarithmic else v for v in (self.low, self.high, max(value, self.low)))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 2)

    def ticks(self, about: int) -> list[float]:
        """Round values between its ends."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            if last - first < 2:  # too few powers of ten to read a value by
                finer = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
                return [value for value in finer if self.low <= value <= self.high]
            step = max(1, math.ceil((last - first) / about))
            return [10.0**power for power in range(first, last + 1, step)]
        return nice_ticks(self.low, self.high, about)


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values, some `about` of them.

    Example:
        nice_ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def drawing(lines: Sequence[ChartLine], chart: LineChart) -> Html:
    """The picture of lines."""
    width, height = (WIDE_WIDTH, WIDE_HEIGHT) if chart.wide else (WIDTH, HEIGHT)
    steps = [point.step for line in lines for point in line.points]
    first, last = min(steps), max(steps)
    across = Scale(first, last if last > first else first + 1, LEFT, width - RIGHT)
    up = vertical(lines, chart, height)
    parts = [*grid(across, up, chart, width, height), *(drawn(line, across, up) for line in lines)]
    label = f"{chart.title}: {chart.about}"
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def vertical(lines: Sequence[ChartLine], chart: LineChart, height: float) -> Scale:
    """The scale of values: all of 0 to 1 for shares, otherwise what the values and their intervals need."""
    if chart.share:
        return Scale(0.0, 1.0, height - BOTTOM, TOP)
    ends = [
        value
        for line in lines
        for point in line.points
        for value in (point.value, point.low, point.high)
        if math.isfinite(value)
    ]
    low, high = min(ends), max(ends)
    if chart.logarithmic and low > 0.0 and high / low >= LOG_SPAN:
        return Scale(low, high, height - BOTTOM, TOP, logarithmic=True)
    if low > 0.0 and low < 0.5 * high:
        low = 0.0
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return Scale(low, high, height - BOTTOM, TOP)


def grid(across: Scale, up: Scale, chart: LineChart, width: float, height: float) -> list[Html]:
    parts = []
    for value in up.ticks(5):
        y, label = up(value), f"{value:.0%}" if chart.share else tick_label(value, up)
        parts.append(element("line", x1=LEFT, x2=width - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", label, x=LEFT - 6, y=y + 4, text_anchor="end"))
    whole = [step for step in across.ticks(10 if chart.wide else 6) if step == round(step)]
    parts += [element("text", f"{step:.0f}", x=across(step), y=height - 8, text_anchor="middle") for step in whole]
    return parts


def tick_label(value: float, scale: Scale) -> str:
    """The value with as many digits as tell it from its neighbours."""
    if scale.logarithmic or value == 0.0 or not 1e-4 <= abs(value) < 1e3:
        return number(value)
    digits = math.ceil(math.log10(abs(value) / (scale.high - scale.low))) + 3
    return f"{value:.{min(max(digits, 3), 12)}g}"


def drawn(line: ChartLine, across: Scale, up: Scale) -> Html:
    """One line with its band or its bars."""
    spots = [(across(point.step), up(point.value)) for point in line.points]
    parts: list[Html] = []
    ranged = [point for point in line.points if point.has_interval]
    if ranged and not line.marked:
        above = [(across(point.step), up(point.high)) for point in ranged]
        below = [(across(point.step), up(point.low)) for point in reversed(ranged)]
        parts.append(element("polygon", points=coordinates([*above, *below]), class_="band"))
    if len(spots) > 1:
        parts.append(element("polyline", points=coordinates(spots), class_="line"))
    if line.marked:
        parts += [marked(point, across(point.step), up) for point in line.points]
    elif len(spots) == 1:
        parts.append(element("circle", cx=spots[0][0], cy=spots[0][1], r=3, class_="dot"))
    look = f"s{line.colour}" + (" faint" if line.faint else "") + (" dashed" if line.marked else "")
    return element("g", *parts, class_=look)


def marked(point: Point, x: float, up: Scale) -> Html:
    """A dot that says its value when it is pointed at, with a bar for its interval."""
    words, parts = f"step {point.step:.0f}: {number(point.value)}", []
    if point.has_interval:
        words += f" ({number(point.low)} to {number(point.high)})"
        parts.append(element("line", x1=x, x2=x, y1=up(point.low), y2=up(point.high), class_="bar"))
    dot = element("circle", element("title", words), cx=x, cy=up(point.value), r=4, class_="dot")
    return joined([*parts, dot])


def coordinates(spots: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in spots)


def number(value: float) -> str:
    """A value with four digits: 0.0123, 1,234 or 1.2e-07."""
    if value == 0.0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.1e}".replace(".0e", "e")
