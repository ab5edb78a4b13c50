"""Charts: their scales, what they draw and what they leave out."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from support.reported import check_page
from turnwise.inspect.report.line_chart import ChartLine, LineChart, Point, Scale, nice_ticks, number, thinned
from turnwise.inspect.report.markup import document


def chart(*lines, **how):
    return LineChart("a title", "what it is", [ChartLine(f"line {n}", line, n) for n, line in enumerate(lines)], **how)


def test_ticks_are_round():
    assert nice_ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0, 50, 10) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    assert nice_ticks(-3.0, 4.0, 4) == [-2.0, 0.0, 2.0, 4.0]


def test_a_scale_goes_from_end_to_end():
    up = Scale(0.0, 2.0, 100, 0)
    assert [up(value) for value in (0.0, 1.0, 2.0)] == [100, 50, 0]
    log = Scale(1e-6, 1e-2, 0, 100, logarithmic=True)
    assert [log(value) for value in (1e-6, 1e-4, 1e-2)] == [0, 50, 100]
    assert log.ticks(4) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert Scale(3e-7, 4e-6, 0, 100, logarithmic=True).ticks(4) == pytest.approx([5e-7, 1e-6, 2e-6])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.01234, "0.01234"), (1234.0, "1,234"), (1e-7, "1e-07"), (1.25e9, "1.2e+09"), (-0.5, "-0.5")],
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


values = st.floats(-1e9, 1e9).filter(lambda value: value == 0.0 or abs(value) > 1e-9)


@few
@given(st.lists(st.tuples(st.integers(0, 10**6), values), max_size=20), st.booleans())
def test_any_values_are_drawn_within_the_picture(series, logarithmic):
    points = [Point(step, value, value - 1.0, value + 1.0) for step, value in sorted(series)]
    found = chart(points, logarithmic=logarithmic)
    figure = found.figure()
    if figure is None:
        assert not points or found.constant is not None
        return
    check_page(document("page", figure))
    for name, largest in (("x[12]|cx|x", 520), ("y[12]|cy|y", 215)):
        places = [float(place) for place in re.findall(rf' (?:{name})="([^"]+)"', figure)]
        assert all(0 <= place <= largest for place in places)
    assert "nan" not in figure


def test_an_interval_is_a_band_or_bars():
    points = [Point(1, 0.5, 0.25, 0.75), Point(2, 0.75, 0.5, 1.0), Point(3, 0.75)]
    assert chart(points, share=True).figure().count("<polygon") == 1
    marked = LineChart("t", "a", [ChartLine("x", points, marked=True)], share=True).figure()
    assert marked is not None
    assert marked.count('class="bar"') == 2
    assert marked.count("<circle") == 3
    assert "<title>step 2: 0.75 (0.5 to 1)</title>" in marked


def test_what_never_changes_is_words_and_not_a_picture():
    flat = chart([Point(1, 1.0), Point(2, 1.0 + 1e-9)])
    assert flat.constant == 1.0
    assert flat.figure() is None
    assert chart([]).constant is None
    assert chart([]).figure() is None
    assert chart([Point(1, 0.5), Point(2, 0.5)], share=True).figure() is not None


def test_a_legend_is_there_where_lines_have_to_be_told_apart():
    assert 'class="key s' not in chart([Point(1, 1.0), Point(2, 2.0)]).figure()
    assert chart([Point(1, 1.0)], [Point(2, 2.0)]).figure().count('class="key s') == 2


def test_a_long_line_has_the_means_of_neighbours():
    line = ChartLine("x", [Point(step, float(step % 2)) for step in range(10_000)])
    short = thinned(line)
    assert len(short.points) == 400
    assert {point.value for point in short.points} <= {0.48, 0.5, 0.52}
    assert short.points[0].step == 12.0
    assert math.isnan(short.points[0].low)
