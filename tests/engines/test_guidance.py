"""Grammars with a random model: whatever it says has the form that was asked for."""

import asyncio
import json
import pickle
import re

import jsonschema  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import pytest

from support.acting import run
from support.guiding import BYTES, END, PADDED, guidance, guided_engine, sampled, text_of
from turnwise.engines.base import Sampling
from turnwise.engines.grammar import ANY_OBJECT, LONGEST, Grammar, GrammarKind
from turnwise.engines.guidance import follow
from turnwise.types import StopReason

SHORT = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "record": {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "maxItems": 3,
                "items": {"type": "array", "prefixItems": [{"type": "number"}], "maxItems": 1},
            },
            "tag": {"enum": ["a", 'b"c', "ü"]},
        },
        "required": ["points", "tag"],
        "additionalProperties": False,
    },
    "choice of shapes": {"anyOf": [{"type": "null"}, {"const": 7}, {"type": "array", "items": SHORT, "maxItems": 2}]},
    "recursive": {
        "$defs": {"tree": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"}}},
        "$ref": "#/$defs/tree",
    },
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    "bounds": {"type": "integer", "minimum": -12, "maximum": 345},
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""Without it a random model writes blanks for long."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_sample_under_a_schema_parses_and_fits(name):
    schema = SCHEMAS[name]
    grammar = Grammar.of_schema(schema if name == "bounds" else {**schema, **COMPACT})
    completions = run(sampled(guided_engine(), grammar, count=12, max_tokens=100), 100)
    ended = [one for one in completions if one.stop is StopReason.end_token]
    assert len(ended) >= 3
    for one in ended:
        jsonschema.validate(json.loads(text_of(one)), schema)
    for one in completions:
        assert one.allowed.allows(one.tokens).all()
        assert not one.allowed.dense(PADDED)[:, BYTES:].any(), "padding of a vocabulary is no text"
    assert len({text_of(one) for one in ended}) > 1


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(GrammarKind.regex, "(left|right) [0-9]{1,3}"), "(left|right) [0-9]{1,3}"),
        (Grammar.of_choices(["yes", "no", "may be"]), "yes|no|may be"),
        (Grammar(GrammarKind.lark, 'start: "<" word ">"\nword: /[a-c]{1,4}/'), "<[a-c]{1,4}>"),
        (Grammar(GrammarKind.lark, 'root ::= "up" | "down" [0-9]'), "up|down[0-9]"),
    ],
)
def test_every_kind_of_grammar_is_followed_to_its_end(grammar, pattern):
    completions = run(sampled(guided_engine(), grammar, count=12), 100)
    assert {one.stop for one in completions} == {StopReason.end_token}
    assert all(re.fullmatch(pattern, text_of(one)) for one in completions)
    assert len({text_of(one) for one in completions}) > 1


def test_a_limit_leaves_a_prefix_and_the_end_is_allowed_only_where_the_grammar_may_end():
    grammar = Grammar(GrammarKind.regex, "[a-z]{3}([0-9]{2})?")
    whole, cut = (run(sampled(guided_engine(), grammar, count=8, max_tokens=limit), 100) for limit in (20, 2))
    for one, other in zip(whole, cut, strict=True):
        assert other.stop is StopReason.length
        assert other.tokens.tolist() == one.tokens[:2].tolist()
        may_end = one.allowed.dense(PADDED)[:, END].tolist()
        assert may_end == [place in (3, 5) for place in range(len(may_end))]


def test_special_and_added_tokens_are_never_text():
    """A template's marks are not allowed inside a string, whatever the tokenizer calls them."""
    grammar = Grammar(GrammarKind.regex, "(.|\n)*")
    for added_are_text in (False, True):
        own = guidance(added_are_text=added_are_text)
        [bits] = own.bits([own.guide(grammar).matcher])
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=PADDED)
        assert allowed[[0, 1]].tolist() == [0, 0]
        assert allowed[END] == 1


def test_following_recorded_tokens_gives_what_was_allowed_and_refuses_others():
    grammar = Grammar.of_schema({**SCHEMAS["record"], **COMPACT})
    [one] = run(sampled(guided_engine(), grammar), 100)
    again = follow(guidance(), grammar, one.tokens.tolist())
    assert (again.places == one.allowed.places).all()
    assert again.sets == one.allowed.sets
    with pytest.raises(ValueError, match="token 1 of the action"):
        follow(guidance(), grammar, [one.tokens[0], 1])


def test_sets_are_shared_between_calls_and_travel():
    first, second = run(sampled(guided_engine(), ANY_OBJECT, count=2, max_tokens=40), 100)
    common = set(first.allowed.sets) & set(second.allowed.sets)
    assert common
    assert {id(one) for one in first.allowed.sets if one in common} == {
        id(one) for one in second.allowed.sets if one in common
    }
    back = pickle.loads(pickle.dumps(first.allowed))
    assert (back.places == first.allowed.places).all()
    assert back.sets == first.allowed.sets
    assert not back.places.flags.writeable
    own = guidance()
    own.guide(ANY_OBJECT)
    assert pickle.loads(pickle.dumps(own)).is_compiled(ANY_OBJECT) is False


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.regex, "(a"),
        Grammar.of_schema({"type": "nosuch"}),
        Grammar.of_schema({"$ref": "http://example.com/elsewhere.json"}),
        Grammar.of_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        Grammar(GrammarKind.json_schema, "{nonsense"),
        Grammar(GrammarKind.lark, "start: start"),
        Grammar(GrammarKind.lark, "start: nosuch"),
        Grammar(GrammarKind.regex, "[^\\s\\S]"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_named_in_one_line(grammar):
    with pytest.raises(ValueError, match="cannot be followed") as error:
        guidance().guide(grammar)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def hostile():
    deep = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    product = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    for _ in range(5):
        product = {"allOf": [{"anyOf": [product, {"type": "boolean"}]}, {"anyOf": [{"type": "array"}, product]}]}
    return {
        "deep": Grammar.of_schema(deep),
        "wide": Grammar.of_schema(wide),
        "product": Grammar.of_schema(product),
        "counts": Grammar.of_schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
        "states": Grammar(GrammarKind.regex, "(a|b)*a(a|b){1000}"),
        "ambiguous": Grammar(GrammarKind.lark, 'start: a\na: a a | "x" | ""'),
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_grammar_is_followed_or_refused_and_others_go_on(name):
    """The loop turns while it is compiled, and a call beside it gets what it would get alone."""

    async def scene():
        engine = guided_engine(run=asyncio.to_thread)
        plain = lambda: engine.generate(np.array([5, 6], np.int32), Sampling(12), session="plain", seed=3)
        alone = await plain()
        bad = asyncio.gather(sampled(engine, hostile()[name], max_tokens=30), return_exceptions=True)
        beside = await plain()
        [found] = await bad
        await engine.close()
        return alone, beside, found

    alone, beside, found = run(scene(), 100)
    assert alone.tokens.tolist() == beside.tokens.tolist()
    assert type(found) is ValueError or found[0].allowed.allows(found[0].tokens).all()


def test_a_grammar_that_breaks_in_the_middle_fails_its_call_alone():
    """A matcher that reaches a limit would otherwise end the action as if it were complete."""

    async def scene():
        engine = guided_engine()
        grammar = Grammar(GrammarKind.regex, "[a-z]{30}")
        await sampled(engine, grammar, max_tokens=1)
        calls = asyncio.ensure_future(sampled(engine, grammar, count=2))
        while not engine.scheduler.running or len(next(iter(engine.scheduler.running.values())).guide.places) < 3:
            await asyncio.sleep(0)
        first, second = engine.scheduler.running.values()
        first.guide.matcher.consume_token(7)  # a token that no rule allows
        assert first.guide.problem
        done = await asyncio.gather(first.future, second.future, return_exceptions=True)
        await asyncio.gather(calls, return_exceptions=True)
        return done

    failed, fine = run(scene(), 100)
    assert type(failed) is ValueError
    assert "cannot be followed after" in str(failed)
    assert len(text_of(fine)) == 30


def test_inline_engines_wait_for_grammars_so_that_time_decides_nothing():
    """A call that arrives while a grammar is compiled shares the first step with it."""

    async def scene():
        engine = guided_engine(shares_weights=True)
        batches = []
        step = engine.model.step

        def counted():
            finished = step()
            batches.append(len(engine.scheduler.running) + len(finished))
            return finished

        engine.model.step = counted
        guided = sampled(engine, Grammar(GrammarKind.regex, "[a-z]{4}"), max_tokens=9)
        plain = engine.generate(np.array([5, 6], np.int32), Sampling(3), session="plain", seed=3)
        await asyncio.gather(plain, guided)
        return batches

    assert run(scene(), 100)[0] == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", ""),
        ("regex", "a" * (LONGEST + 1)),
        ("regex", "a\0"),
        ("regex", "\ud800"),
        ("choice", "[]"),
        ("choice", '["a", 5]'),
        ("choice", "yes"),
        ("choice", '[""]'),
        ("nosuch", "a"),
    ],
    ids=["empty", "long", "nul", "surrogate", "none", "number", "text", "blank", "kind"],
)
def test_texts_that_are_no_grammar_are_refused_early(kind, text):
    with pytest.raises(ValueError):
        Grammar(kind, text)


def test_a_tokenizer_without_its_library_and_one_without_an_end_are_refused():
    for own, reason in ((guidance(end_tokens=[]), "end token"), (guidance(), "tokenizers library")):
        if reason != "end token":
            own.tokenizer = object()
        with pytest.raises(ValueError, match=reason):
            own.guide(ANY_OBJECT)
    with pytest.raises(ValueError, match="must be a Grammar"):
        Sampling(5, grammar="[a-z]")
