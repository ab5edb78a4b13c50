"""Several messages or calls in one action: those that can be read are made, and the others are told."""

from turnwise.rollout.render.formats.registry import FORMATS

CALL = '<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"x": 1}}'


def read(name: str, text: str) -> tuple[list[str], bool]:
    """(the names of the calls, whether there is a fault)."""
    how = FORMATS[name]
    assert how is not None
    message = how.parse(text)
    return [call.name for call in message.calls], bool(message.faults)


def test_harmony_reads_calls_that_begin_with_a_start_token() -> None:
    two = "<|call|>".join(f"<|start|>assistant{CALL.format(name=name)}" for name in "ab")
    assert read("harmony", two) == (["a", "b"], False)
    assert read("harmony", f"I need both. {two}<|call|>") == (["a", "b"], False)


def test_harmony_reads_text_and_messages_after_a_call() -> None:
    first, second = CALL.format(name="a"), CALL.format(name="b")
    assert read("harmony", f"{first}<|call|> Let me know.") == (["a"], False)
    assert read("harmony", f"{first}<|call|> Then b. {second}<|call|>") == (["a", "b"], False)


def test_harmony_keeps_good_calls_beside_a_broken_one() -> None:
    first, second = CALL.format(name="a"), CALL.format(name="b")
    assert read("harmony", f"{first}<|call|><|start|>assistant{second[:-2]}") == (["a"], True)
    assert read("harmony", second[:-2]) == ([], True)


def test_llama_reads_calls_after_each_tag() -> None:
    call = '<|python_tag|>{"name": "a", "parameters": {"x": "<|python_tag|>"}}'
    assert read("llama", f"One. {call} Two. {call}") == (["a", "a"], False)
    assert read("llama", call + ';{"name": "b", "parameters": {"x": "y') == (["a"], True)
    assert read("llama", call + '; {"name": "b", "parameters": {}}') == (["a", "b"], False)


def test_cohere_reads_the_names_that_most_formats_use() -> None:
    assert read("cohere", '<|START_ACTION|>{"name": "a", "arguments": {}}<|END_ACTION|>') == (["a"], False)
