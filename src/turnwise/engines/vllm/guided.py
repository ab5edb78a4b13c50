"""Grammars in vLLM: how a call carries one, and what it allowed.

vLLM does not say which tokens were allowed. Its backend "guidance" is llguidance, so the sets are computed here once
more, from the grammar and the sampled tokens, with the tokenizer read as vLLM reads it. That is exact as long as both
sides have the same release of llguidance, which one environment does; a token that does not fit fails the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnwise.engines.base import Completion, EngineFailure
from turnwise.engines.grammar import Grammar, GrammarKind
from turnwise.engines.guidance import Guidance, follow

BACKEND = "guidance"
"""vLLM's name for llguidance."""
FIELDS = {
    GrammarKind.json_schema: "json",
    GrammarKind.regex: "regex",
    GrammarKind.choice: "choice",
    GrammarKind.lark: "grammar",
}
"""The fields of vLLM's StructuredOutputsParams."""
OTHERS = ("disable_any_whitespace", "disable_additional_properties", "reasoning_parser", "reasoning_parser_plugin")
"""Settings of a server that change what a grammar allows, or from which token on."""


def structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """A grammar as vLLM's StructuredOutputsParams call it."""
    value = json.loads(grammar.text) if grammar.kind is GrammarKind.choice else grammar.text
    return {FIELDS[grammar.kind]: value}


def config_problem(config: Mapping[str, Any] | None) -> str:
    """Why the masks of a server with this structured_outputs_config cannot be computed again; empty where they can."""
    if config is None or config.get("backend") != BACKEND:
        option = f"--structured-outputs-config.backend {BACKEND}"
        return f"this vLLM follows grammars with another library than llguidance; start it with {option}"
    if others := [name for name in OTHERS if config.get(name)]:
        return f"this vLLM has structured_outputs_config.{others[0]}, which changes what a grammar allows; leave it out"
    return ""


def with_allowed(completion: Completion, guidance: Guidance, grammar: Grammar) -> Completion:
    """The completion with what the grammar allowed for each of its tokens."""
    try:
        return replace(completion, allowed=follow(guidance, grammar, completion.tokens.tolist()))
    except ValueError as error:
        reason = "vLLM and turnwise need the same release of llguidance"
        raise EngineFailure(f"vLLM's answer does not fit its grammar ({error}): {reason}") from None
