"""Outputs and expected calls of the tests of Rust projects (dynamo's parsers, smg, mistral.rs), for tool_formats.py.

The tests of dynamo's parsers and its fixtures stand at the commit before the parsers left that repository. Where a
test streams, the pieces of one loop are joined, and the whole is judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tool_format_fixtures import FAMILIES
from tool_format_rust import Source
from tool_format_rust_values import CONTENT, NOTHING, Answer, Calls, Content, JsonText, NotKnown, Panic, Unknown

from turnwise.messages import ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

PARSERS = {
    "CohereParser": "cohere", "DeepSeek31Parser": "deepseek", "DeepSeekParser": "deepseek",
    "DeepSeekDsmlParser": "dsml",
    "Glm4MoeParser": "glm", "KimiK2Parser": "kimi_k2", "KimiK3Parser": "kimi_k3", "LlamaParser": "llama",
    "MinimaxM2Parser": "minimax", "MistralParser": "mistral", "PythonicParser": "pythonic", "QwenParser": "hermes",
    "QwenXmlParser": "qwen_xml", "Gemma4Parser": "gemma", "LiquidParser": "lfm2", "MistralNemoParser": "mistral",
    "QwenCoderParser": "qwen_xml",
}  # fmt: skip
"""Parsers by the name of their type."""
FUNCTIONS = {
    "try_tool_call_parse_kimi_k2": "kimi_k2", "try_tool_call_parse_dsml": "dsml", "try_tool_call_parse_glm47": "glm",
    "parse_tool_calls_harmony_complete": "harmony", "try_tool_call_parse_gemma4": "gemma",
    "parse_tool_calls_deepseek_v3": "deepseek", "parse_tool_calls_deepseek_v3_1": "deepseek",
    "try_tool_call_parse_pythonic": "pythonic", "try_tool_call_parse_xml": "", "try_tool_call_parse": "",
    "try_tool_call_parse_json": "", "detect_and_parse_tool_call": "", "detect_and_parse_tool_call_with_recovery": "",
}  # fmt: skip
"""dynamo's functions; where nothing is named the configuration says which format it is."""
UNTYPED = ("glm", "qwen_xml", "minimax", "seed_oss")
"""Formats whose values have no types of their own."""
AT_ONCE = ("pythonic", "kimi_k3")
"""Formats whose calls are streamed whole; of the others the name comes first."""
PLACES = {
    "dynamo-crate": "lib/parsers/src/tool_calling/**/*.rs",
    "smg": "crates/tool_parser/**/*.rs",
    "mistral-rs": "mistralrs-core/src/tools/parsers/*.rs",
}


@dataclass
class Reading:
    """An output that a test gave to a parser, and what came of the test's assertions."""

    name: str
    text: str
    key: tuple[str, ...]
    calls: list[tuple[str, Any]]
    refused: bool
    faults: str
    held: int = 0
    failed: int = 0
    unknown: list[str] = field(default_factory=list)


class Session:
    """What a test calls: parsers, which are our readers, and assertions."""

    def __init__(self, dropped: bool, inferred: bool) -> None:
        self.dropped, self.inferred = dropped, inferred
        self.readings: list[Reading] = []
        self.tried = 0
        self.current: Reading | None = None

    def read(self, name: str, text: Any, tools: Any) -> list[dict[str, Any]]:
        """The calls of an output, as the tests of these projects see them."""
        self.current = None
        self.tried += 1
        if not isinstance(text, str) or name not in FORMATS:
            raise NotKnown(f"output {name}")
        specs = given_specs(tools)
        how = FORMATS[name]
        assert how is not None
        message = how.parse(str(text), specs)
        declared = {spec.name: set(spec.parameters.get("properties") or {}) for spec in specs}
        calls = []
        for call in message.calls:
            if not (self.dropped and call.fault):
                known = declared.get(call.name, set())
                given = dict(call.arguments)
                if self.inferred and name in UNTYPED:
                    given = {key: value if key in known else as_json(value) for key, value in given.items()}
                calls.append((call.name, given))
        refused = any(call.fault for call in message.calls)
        key = (name, str(text), *(spec.text for spec in specs))
        self.current = Reading(name, str(text), key, calls, refused, "; ".join(message.faults))
        self.readings.append(self.current)
        return [
            {
                "function": {"name": called, "arguments": as_text(given)}, "name": called, "parameters": given,
                "arguments": given, "id": CONTENT, "tp": CONTENT, "call_type": CONTENT, "tool_type": CONTENT,
                "tool_index": CONTENT,
            }
            for called, given in calls
        ]  # fmt: skip

    def __call__(self, name: str, given: list[Any], names: dict[str, Any]) -> Any:
        """What a call of this name gives; None if it is not about parsers."""
        last = name.split("::")[-1]
        if name == "assert":
            self.judge(given[0])
            return NOTHING
        if name.split("::")[0] in PARSERS and not name.startswith("."):
            return {"": "parser", "format": PARSERS[name.split("::")[0]], "text": "", "done": False}
        if name.startswith("ToolCallConfig::"):
            return {"": "config", "format": FAMILIES.get(last, "")}
        if name == "Default::default":
            return {"": "Default"}
        if last == "default" and name.endswith("Config::default"):
            return {"": name.split("::")[0], "format": "qwen_xml" if name.startswith("Xml") else ""}
        if last in FUNCTIONS and len(given) in (2, 3):
            tools = NOTHING if last == "try_tool_call_parse_dsml" else given[-1]
            return self.read(FUNCTIONS[last] or configured(given[1]), given[0], tools), CONTENT
        if last == "Function" and name != last:
            return CONTENT
        if last == "create_realistic_chunks":
            return [given[0]]
        if last == "process_model_specific_message":
            return self.answer("gemma", given[0])
        if last == "parse_qwen_tool_calls":
            return self.answer("qwen_xml" if "<function" in given[0] else "hermes", given[0])
        if name.startswith(".") and given:
            return self.method(name[1:], given, names)
        return None

    def method(self, name: str, given: list[Any], names: dict[str, Any]) -> Any:
        one = given[0]
        if name == "is_err" and isinstance(one, tuple):
            return self.current is not None and not self.current.calls
        if name == "is_ok" and isinstance(one, tuple):
            return CONTENT
        if not (isinstance(one, dict) and one.get("") == "parser"):
            return None
        if name in ("parse_complete", "parse_complete_with_tools"):
            return CONTENT, self.read(one["format"], given[1], given[2] if len(given) > 2 else [])
        if name == "parse_incremental":
            return self.streamed(one, given[1], given[2], names.get(" last"))
        if name == "parse" and len(given) == 2:
            return self.answer(one["format"], given[1])
        if name == "reset":
            one.update(text="", done=False)
            return NOTHING
        return CONTENT if name == "has_tool_markers" else None

    def answer(self, name: str, text: str) -> Answer:
        if name == "hermes" and "<function" in text:
            name = "qwen_xml"
        made = Answer(text)
        made.calls = Calls(self.read(name, text, []))
        return made

    def streamed(self, parser: dict[str, Any], text: Any, tools: Any, last: bool | None) -> dict[str, Any]:
        """Nothing until the last piece of the loop, then the calls of the whole, each as a name and its arguments."""
        self.current = None
        if last is None or parser["done"] or not isinstance(text, str):
            parser["done"] = True
            raise NotKnown("pieces that are not one loop")
        parser["text"] += text
        items: list[dict[str, Any]] = []
        if last:
            parser["done"] = True
            for place, call in enumerate(self.read(parser["format"], parser["text"], tools)):
                arguments = call["function"]["arguments"]
                if parser["format"] in AT_ONCE:
                    items.append({"name": call["name"], "parameters": arguments, "tool_index": place})
                    continue
                items += [
                    {"name": call["name"], "parameters": "", "tool_index": place},
                    {"name": NOTHING, "parameters": arguments, "tool_index": place},
                ]
        return {"calls": items, "normal_text": CONTENT}

    def judge(self, held: Any) -> None:
        if self.current is None or isinstance(held, Content):
            return
        if isinstance(held, Unknown):
            self.current.unknown.append(held.why)
        elif held:
            self.current.held += 1
        else:
            self.current.failed += 1


def configured(config: Any) -> str:
    """The format that a configuration of dynamo names."""
    if isinstance(config, str):
        return FAMILIES.get(config, "")
    if isinstance(config, dict) and config.get("format"):
        return str(config["format"])
    for mark, name in (("minimax:tool_call", "minimax"), ("<TOOLCALL>", "nemotron")):
        if mark in str(config):
            return name
    raise NotKnown("configuration")


def given_specs(tools: Any) -> list[ToolSpec]:
    if isinstance(tools, Unknown):
        raise NotKnown("tools")
    found = []
    for tool in [] if tools is NOTHING else tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        if not isinstance(function["name"], str) or not (schema is NOTHING or isinstance(schema, dict)):
            raise NotKnown("tools")
        found.append(ToolSpec(function["name"], "", {"type": "object"} | (schema if isinstance(schema, dict) else {})))
    return found


def as_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def as_text(arguments: dict[str, Any]) -> JsonText:
    return JsonText(json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))


def run_test(source: Source, session: Session, name: str, given: list[Any]) -> None:
    """Run a test; what cannot be interpreted makes the output that was read last unknown."""
    source.called = session
    try:
        source.call(name, [one({}) for one in given], {})
    except Panic:
        session.judge(False)
    except (NotKnown, TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError) as why:
        session.judge(Unknown(f"{type(why).__name__} {why}"))


def file_readings(text: str, library: list[Source]) -> Iterator[tuple[str, int, list[list[Reading]], int]]:
    """(test, line, readings for each way of counting names and types, outputs that were not extracted) of the tests of
    a file."""
    source = Source(text, Session(False, False))
    source.read_file()
    for other in library:
        source.functions = other.functions | source.functions
    for name, place, cases in source.tests:
        for given in cases or [[]]:
            ways = []
            for dropped, inferred in ((False, False), (True, False), (False, True), (True, True)):
                session = Session(dropped, inferred)
                run_test(source, session, name, given)
                ways.append(session.readings)
            yield name, text.count("\n", 0, place) + 1, ways, session.tried - len(session.readings)


def crate_outcomes(project: str, folder: Path) -> tuple[list[dict[str, str]], int]:
    """The outcome of every output whose expectation could be extracted, and how many could not."""
    found, left_out = [], 0
    library = []
    for path in folder.glob(PLACES[project]):
        if path.parent.name == "common":
            library.append(Source(path.read_text(encoding="utf-8"), Session(False, False)))
            library[-1].read_file()
    for path in sorted(folder.glob(PLACES[project])):
        for test, line, ways, lost in file_readings(path.read_text(encoding="utf-8"), library):
            left_out += lost
            for place, first in enumerate(ways[0]):
                same_place = [way[place] for way in ways if place < len(way)]
                good = [not one.failed and not one.unknown for one in same_place]
                if first.unknown or not first.held + first.failed:
                    left_out += 1
                    continue
                right = any(good[:2])
                found.append(
                    {
                        "format": first.name,
                        "test": f"{path.name}:{line} {test}",
                        "outcome": "right" if right else "wrong",
                        "refused": "yes" if first.refused else "",
                        "contested": "" if right or not any(good[2:]) else "yes",
                        "key": "\0".join(first.key),
                        "why": f"{first.calls} | fault: {first.faults} | {first.text!r}",
                    }
                )
    return found, left_out
