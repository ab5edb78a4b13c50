"""Outputs and expected calls of dynamo's parity fixtures (YAML), by value, for tool_formats.py.

A fixture says what dynamo, vLLM and SGLang make of one output. The test's expectation is dynamo's; the projects agree
where every one that has a parser for the format makes the same calls. Outputs whose source names a test of vLLM or
SGLang are left out, since those were known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from turnwise.messages import ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

FAMILIES = {
    "deepseek_v3": "deepseek", "deepseek_v3_1": "deepseek", "deepseek_v3_2": "dsml", "deepseek_v4": "dsml",
    "gemma4": "gemma", "glm47": "glm", "harmony": "harmony", "hermes": "hermes", "jamba": "jamba",
    "kimi_k2": "kimi_k2", "llama3_json": "llama", "minimax_m2": "minimax", "mistral": "mistral",
    "nemotron_deci": "nemotron", "nemotron_nano": "qwen_xml", "phi4": "phi4", "pythonic": "pythonic",
    "qwen25": "hermes", "qwen3_coder": "qwen_xml",
}  # fmt: skip
KNOWN = ("vllm-project/vllm", "sgl-project/sglang")
FOLDER = Path("tests/parity/toolcalling/fixtures")


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal, with 1, 1.0 and true told apart."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def given_specs(tools: Any) -> list[ToolSpec]:
    """Tools as [{name, parameters}]."""
    return [ToolSpec(tool["name"], "", tool.get("parameters") or {"type": "object"}) for tool in tools or []]


def calls_of(expected: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """The calls that a project makes; None if it has no parser or fails."""
    if "calls" not in expected:
        return None
    return [(call["name"], parsed(call["arguments"])) for call in expected["calls"] or []]


def parsed(arguments: Any) -> Any:
    """Arguments as an object, if they are one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def fixtures(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(format, case, fixture) of every fixture that has an output and expectations and is not of a known list."""
    for path in sorted((folder / FOLDER).glob("*/TOOLCALLING.*.yaml")):
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
        for case, fixture in listed["cases"].items():
            known = any(project in str(fixture.get("ref")) for project in KNOWN)
            if "expected" in fixture and not known and listed["family"] in FAMILIES:
                yield FAMILIES[listed["family"]], f"{path.parent.name} {case}", fixture


def fixture_outcomes(folder: Path) -> list[dict[str, str]]:
    """The outcome of every output."""
    found = []
    for name, case, fixture in fixtures(folder):
        text = fixture.get("model_text")
        text = "".join(chunk["delta_text"] for chunk in fixture["chunks"]) if text is None else text
        specs = given_specs(fixture.get("tools"))
        wanted = calls_of(fixture["expected"]["dynamo"])
        if wanted is None:
            continue
        others = [one for one in fixture["expected"].values() if "unavailable" not in one]
        agree = all(calls is not None and same(calls, wanted) for calls in map(calls_of, others))
        how = FORMATS[name]
        assert how is not None
        read = how.parse(text, specs)
        calls = [(call.name, dict(call.arguments)) for call in read.calls]
        offered = [pair for pair, call in zip(calls, read.calls, strict=True) if not call.fault]
        broken = any(not isinstance(arguments, dict) for _, arguments in wanted)
        right = bool(read.faults) if broken else same(wanted, calls) or same(wanted, offered)
        found.append(
            {
                "format": name,
                "test": f"{case}: {fixture.get('description', '')}",
                "outcome": "right" if right else "wrong",
                "refused": "yes" if offered != calls else "",
                "contested": "" if agree else "yes",
                "key": "\0".join([name, text, *(spec.text for spec in specs)]),
                "why": f"{calls} != {wanted} | fault: {'; '.join(read.faults)} | {text!r}",
            }
        )
    return found
