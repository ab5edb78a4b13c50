"""What a person types or pastes while playing: where a message ends."""

import pytest

from turnwise.cli.typed_message import read_message


def messages(text, *, has_tools=True):
    """The messages that lines of input make, and whatever is left half said."""
    lines, found = iter(text.split("\n")), []

    def read_line():
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    try:
        while True:
            found.append(read_message(read_line, has_tools=has_tools))
    except EOFError:
        return found


JSON_CALL = (
    '<tool_call>\n{"name": "add", "arguments": {\n  "text": "a } and </tool_call>",\n  "n": [1,\n 2]}}\n</tool_call>'
)
XML_CALL = "<tool_call>\n<function=add>\n<parameter=text>\nsome\ntext\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("call", [JSON_CALL, XML_CALL, '{"name": "add",\n"arguments": {}}', "[add(a=[1,\n2])]"])
def test_a_pasted_call_is_one_message(call):
    assert messages(f"hello\n{call}\nbye") == ["hello", call, "bye"]


def test_a_line_is_a_message_where_there_are_no_tools():
    assert messages("if {\n<a>\nget amber", has_tools=False) == ["if {", "<a>", "get amber"]


def test_an_empty_line_ends_a_call_that_is_never_closed():
    assert messages('{"name": "add"\n"x"\n\nnext') == ['{"name": "add"\n"x"', "next"]


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""\na {\n\nb\n"""', "a {\n\nb"),
        ('"""a\nb"""', "a\nb"),
        ('"""one"""', "one"),
        ('"""\n"""', ""),
    ],
)
def test_what_is_between_quotes_is_one_message(typed, message, has_tools):
    assert messages(f"{typed}\nnext", has_tools=has_tools) == [message, "next"]


def test_input_that_ends_within_a_message_is_no_message():
    assert messages('"""\na') == []
