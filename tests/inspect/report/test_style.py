"""The style has both grounds, and colours for every series."""

import re

from turnwise.inspect.report.style import DARK, LIGHT, STYLE


def names(text):
    return re.findall(r"(--[\w-]+):", text)


def test_dark_has_every_colour_that_light_has():
    assert names(DARK) == names(LIGHT)
    assert set(re.findall(r"var\((--[\w-]+)\)", STYLE)) <= set(names(LIGHT))


def test_braces_are_closed():
    assert STYLE.count("{") == STYLE.count("}")
    assert "prefers-color-scheme: dark" in STYLE
    assert "@media print" in STYLE
