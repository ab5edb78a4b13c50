"""Text never becomes markup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from support.reported import check_page
from turnwise.inspect.report.markup import Html, document, element, joined, section, table, text


@few
@given(st.text(st.characters(), max_size=40))
def test_any_text_is_shown_as_text(content):
    page = document(content, element("p", content, class_=content), table((content,), [(content,)]))
    seen = check_page(page)
    assert seen.elements.count("p") == 1


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("<script>", "&lt;script&gt;"),
        ('" onload="x', "&quot; onload=&quot;x"),
        ("\x1b[2J", "␛[2J"),
        ("\ud800", "\\ud800"),
        ("\u202eabc", "\\u202eabc"),
        ("a\tb\nc", "a\tb\nc"),
    ],
)
def test_texts_are_escaped_and_made_visible(content, shown):
    assert text(content) == shown
    assert element("p", content) == f"<p>{shown}</p>"
    assert element("p", id=content) == f'<p id="{shown}"></p>'


def test_long_texts_are_cut():
    assert text("x" * 10, 4) == "xxxx… (6 characters more)"
    assert text("<" * 10, 1) == "&lt;… (9 characters more)"
    assert text("xxxx", 4) == "xxxx"


def test_markup_is_not_escaped_twice():
    inner = element("b", "<")
    assert isinstance(inner, Html)
    assert element("p", inner, "<") == "<p><b>&lt;</b>&lt;</p>"
    assert joined([inner, "&"]) == "<b>&lt;</b>&amp;"


def test_a_section_can_be_linked_to():
    assert section("How attempts ended").startswith('<section id="how-attempts-ended"><h2>How attempts ended</h2>')


def test_attributes_without_a_value_are_left_out():
    assert element("circle", r=3, class_=None, text_anchor="end") == '<circle r="3" text-anchor="end"/>'
