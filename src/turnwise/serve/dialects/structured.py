"""Structured output: the form that a client wants an answer to have, as each dialect spells it.

A request with tools may be answered by a call, which has a form of its own. So its format is not enforced there and is
reported as overridden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnwise.engines.base import shown
from turnwise.engines.grammar import ANY_OBJECT, Grammar, GrammarKind
from turnwise.serve.dialects.ask import Fields, kind_of, unfit

Settings = dict[str, Any]
VLLM = {
    "json": lambda value: Grammar(GrammarKind.json_schema, value) if isinstance(value, str) else schema_grammar(value),
    "json_object": lambda value: ANY_OBJECT,
    "regex": lambda value: Grammar(GrammarKind.regex, text_value(value)),
    "choice": lambda value: Grammar.of_choices(choices_value(value)),
    "grammar": lambda value: Grammar(GrammarKind.lark, text_value(value)),
}
"""vLLM's names of constraints, in `structured_outputs` and, with guided_ before them, in the body itself."""
KINDS = ("text", "json_object", "json_schema")


def openai_format(fields: Fields, form: Any, where: str, has_tools: bool) -> tuple[Grammar | None, Settings]:
    """(the grammar of a request of OpenAI's dialects, settings that are not followed). `form` is the dialect's own
    field, called `where`; vLLM's fields are taken from the body."""
    found = [(where, grammar)] if (grammar := grammar_of_form(form, where)) is not None else []
    found += vllm_grammars(fields)
    return only_one(found, has_tools)


def anthropic_format(fields: Fields, config: dict[str, Any], has_tools: bool) -> tuple[Grammar | None, Settings]:
    """The same of Anthropic's: `output_config.format`, or `output_format` as its beta had it."""
    forms = {"output_config.format": config.get("format"), "output_format": fields.table("output_format") or None}
    found = [(where, grammar) for where, form in forms.items() if (grammar := grammar_of_form(form, where)) is not None]
    return only_one(found, has_tools)


def only_one(found: list[tuple[str, Grammar]], has_tools: bool) -> tuple[Grammar | None, Settings]:
    if len(found) > 1:
        raise unfit(f"{found[0][0]} and {found[1][0]} are both given; send one of them", "invalid_value")
    if not found:
        return None, {}
    [(where, grammar)] = found
    return (None, {where: str(grammar.kind)}) if has_tools else (grammar, {})


def grammar_of_form(form: Any, where: str) -> Grammar | None:
    """The grammar of {"type": "json_schema", ...}; None for text. OpenAI's chat has the schema one level deeper."""
    if form is None or form == {}:
        return None
    fields = Fields(form, where)
    kind = fields.text("type", "text")
    if kind not in KINDS:
        raise unfit(f"{where}.type must be one of {', '.join(KINDS)}, got {shown(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    table = fields.table("json_schema") if "json_schema" in fields.left else fields.left
    schema = table.get("schema")
    if schema is None:
        raise unfit(f"{where}: the schema is missing", "missing_required_parameter")
    return made(f"{where}: schema", schema_grammar, schema)


def vllm_grammars(fields: Fields) -> list[tuple[str, Grammar]]:
    """Those of vLLM's extra fields."""
    table = fields.table("structured_outputs")
    found = [(f"structured_outputs.{name}", name, table.pop(name, None)) for name in VLLM]
    found += [(f"guided_{name}", name, fields.left.pop(f"guided_{name}", None)) for name in VLLM]
    fields.ignore("guided_decoding_backend")
    fields.refuse("guided_whitespace_pattern", "structural_tag")
    Fields(table, "structured_outputs").refuse(*table, unless=(False,))
    return [
        (where, made(where, VLLM[name], value))
        for where, name, value in found
        if value is not None and value is not False
    ]


def made(where: str, make: Callable[[Any], Grammar], value: Any) -> Grammar:
    try:
        return make(value)
    except ValueError as error:
        raise unfit(f"{where}: {error}", "invalid_value") from None


def schema_grammar(value: Any) -> Grammar:
    if not isinstance(value, dict) and value is not True:
        raise ValueError(f"a JSON schema is an object, got {kind_of(value)}")
    return Grammar.of_schema(value)


def text_value(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it must be a string, got {kind_of(value)}")
    return value


def choices_value(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"choices are an array of strings, got {kind_of(value)}")
    return value
