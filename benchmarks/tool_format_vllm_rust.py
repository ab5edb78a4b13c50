"""Outputs and expected calls of the tests of vLLM's parsers in Rust, by running the tests' own source.

A test runs statement by statement in the interpreter of tool_format_rust.py. Its parser only remembers what it is fed,
and what the test then asserts of the calls is what it expects. Pieces of a stream are joined:

* A statement counts if it is about all pieces of an output, and no piece follows it.
* A test that states that the parser fails expects no call (vLLM's helpers discard what came before the failure).
* Without a stated number, as many calls are expected as the test names. "No call yet", of an output that the test does
  not end, says nothing of the whole. A test that starts within a prompt, or says nothing of calls, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tool_format_fixtures import parsed
from tool_format_output import Output, Wanted, offered, tool_of
from tool_format_rust import Source, text_of
from tool_format_rust_values import CONTENT, NOTHING, Content, Nothing, NotKnown, Panic, Run, Unknown

FOLDER = Path("rust/src/parser/src")
PARSERS = {
    "DeepSeekV3ToolParser": "deepseek", "DeepSeekV31ToolParser": "deepseek", "DeepSeekV32ToolParser": "dsml",
    "DeepSeekV4ToolParser": "dsml", "Gemma4UnifiedParser": "gemma", "Glm45MoeToolParser": "glm",
    "Glm47MoeToolParser": "glm", "Granite4ToolParser": "hermes", "HermesToolParser": "hermes",
    "Internlm2ToolParser": "internlm", "KimiK2ToolParser": "kimi_k2", "KimiK3UnifiedParser": "kimi_k3",
    "Llama3JsonToolParser": "llama", "MinimaxM2ToolParser": "minimax", "MistralToolParser": "mistral",
    "Phi4MiniJsonToolParser": "phi4", "Qwen3CoderToolParser": "qwen_xml", "Qwen3XmlToolParser": "hermes",
    "SeedOssToolParser": "seed_oss",
}  # fmt: skip
"""Not among our formats: Hunyuan V3, Inkling, MiniMax-M3."""
MOST = 16
"""More calls than any test names."""
DELTA = re.compile(
    r'ToolCallDelta \{\s*tool_index: \d+,\s*name: Some\(\s*("(?:[^"\\]|\\.)*"),\s*\),\s*arguments: ("(?:[^"\\]|\\.)*")'
)


@dataclass
class Fed:
    """An output that a parser was fed, and what the test states of its calls."""

    parser: str
    tools: list[dict[str, Any]]
    pieces: list[str] = field(default_factory=list)
    ended: bool = False
    refused: bool = False
    number: int | None = None
    wanted: dict[int, Wanted] = field(default_factory=dict)
    unknown: bool = False

    def feed(self, piece: Any) -> None:
        """Take one more piece, which makes earlier statements ones about a part."""
        if not isinstance(piece, str):
            raise NotKnown("a piece that is no text")
        self.pieces.append(piece)
        self.number, self.wanted, self.unknown = None, {}, False

    def calls(self) -> list[Wanted] | None:
        """The calls that the test expects; None if it does not say."""
        if self.refused:
            return []
        named = max(self.wanted, default=-1) + 1
        number = named if self.number is None else self.number
        if self.unknown or number < named or (self.number is None and not named) or (not number and not self.ended):
            return None
        return [self.wanted.get(place, Wanted()) for place in range(number)]


@dataclass
class Parser:
    """A parser of a test."""

    name: str
    tools: list[dict[str, Any]]
    fed: list[Fed] = field(default_factory=list)

    def current(self) -> Fed:
        if not self.fed or self.fed[-1].ended or self.fed[-1].refused:
            self.fed.append(Fed(self.name, self.tools))
        return self.fed[-1]


class Stream(dict[str, Any]):
    """What a parser has given for some pieces of an output."""

    def __init__(self, fed: Fed | None = None, *pieces: int) -> None:
        super().__init__(events=CONTENT)
        self.fed, self.pieces = fed, set(pieces)

    def append(self, other: Stream) -> None:
        self.fed = other.fed or self.fed
        self.pieces |= other.pieces

    @property
    def whole(self) -> bool:
        return self.fed is not None and len(self.pieces) == len(self.fed.pieces)


@dataclass(frozen=True)
class Said:
    """Something of the calls of a stream, which an assertion compares: "number", "none", "name", "arguments", or "some"
    for the argument of a key."""

    stream: Stream
    what: str
    place: int = 0
    key: str = ""


class SaidJson(dict[str, Any]):
    """The arguments of a call as JSON, from which a test may take one."""

    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said

    def get(self, key: str, default: Any = None) -> Said:
        return Said(self.said.stream, "some", self.said.place, key)


class SaidCalls(list[dict[str, Any]]):
    """The calls of a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(
            {"name": Said(stream, "name", place), "arguments": Said(stream, "arguments", place), "tool_index": CONTENT}
            for place in range(MOST)
        )
        self.stream = stream


class Session:
    """What a test calls: parsers that remember, and what they give."""

    def __init__(self) -> None:
        self.parsers: list[Parser] = []

    def __call__(self, name: str, given: list[Any], names: dict[str, Any]) -> Any:
        """What a call of this name gives; None if it is not about parsers."""
        kind, _, last = name.rpartition("::")
        if last == "new" and kind in PARSERS:
            self.parsers.append(Parser(kind, given_tools(given[0])))
            return self.parsers[-1]
        if name in ("ToolParserOutput::default", "UnifiedParserOutput::default"):
            return Stream()
        if name in ("tokenizer", "TestTokenizer::new", "Arc::new"):
            return CONTENT
        if name in ("split_by_chars", "char_chunks"):
            return [given[0]]
        if name == "String::as_str":
            return str
        if last == "from_str" and isinstance(given[0], Said):
            return SaidJson(given[0])
        if not name.startswith(".") or not given:
            return None
        one, method = given[0], name[1:]
        if isinstance(one, Parser):
            return self.fed(one, method, given[1:])
        if isinstance(one, Stream):
            return self.streamed(one, method, given[1:])
        if isinstance(one, SaidCalls) and method in ("len", "is_empty", "first"):
            return one[0] if method == "first" else Said(one.stream, "number" if method == "len" else "none")
        if isinstance(one, Said):
            return CONTENT if method in ("contains", "matches", "is_none", "is_some") else one
        if isinstance(one, SaidJson):
            return one
        if isinstance(one, str):
            return texts(one, method, given[1:])
        return None

    def fed(self, parser: Parser, method: str, given: list[Any]) -> Any:
        if method in ("unwrap", "as_mut"):
            return parser
        if method in ("parse_chunk", "parse_complete", "parse_into"):
            if method == "parse_complete" and parser.fed:
                parser.fed[-1].ended = True
            fed = parser.current()
            fed.feed(given[0])
            fed.ended = method == "parse_complete"
            found = Stream(fed, len(fed.pieces) - 1)
            if method == "parse_into":
                given[1].append(found)
            return found
        if method == "finish":
            fed = parser.current()
            fed.ended = True
            return Stream(fed)
        if method == "initialize":
            raise NotKnown("an output that starts within a prompt")
        return CONTENT

    def streamed(self, stream: Stream, method: str, given: list[Any]) -> Any:
        if method == "append":
            stream.append(given[0])
            return NOTHING
        if method in ("unwrap_err", "is_err"):
            if stream.fed is not None:
                stream.fed.refused = True
            return CONTENT
        if method == "calls":
            return SaidCalls(stream)
        return CONTENT if method in ("normal_text", "reasoning_text") else stream

    def state(self, said: Said, value: Any) -> None:
        """Take one statement of the test."""
        if not said.stream.whole:
            return
        fed = said.stream.fed
        assert fed is not None
        if said.what in ("number", "none"):
            fed.number = 0 if said.what == "none" else value
        elif said.what == "name" and isinstance(value, str):
            fed.wanted.setdefault(said.place, Wanted()).name = value
        elif said.what == "arguments" and isinstance(value, (str, dict)):
            fed.wanted.setdefault(said.place, Wanted()).arguments = parsed(value)
        elif said.what == "some" and not isinstance(value, (Unknown, Content, Nothing)):
            fed.wanted.setdefault(said.place, Wanted()).some[said.key] = value
        else:
            fed.unknown = True


def texts(one: str, method: str, given: list[Any]) -> Any:
    """Methods of texts that only these tests use."""
    if method == "assert_debug_eq" and isinstance(given[0], Stream):
        stream = given[0]
        if stream.whole and stream.fed is not None:
            found = [[text_of("text", part) for part in delta.groups()] for delta in DELTA.finditer(one)]
            stream.fed.number = len(found)
            stream.fed.wanted = {at: Wanted(name, parsed(arguments)) for at, (name, arguments) in enumerate(found)}
            stream.fed.unknown = len(found) != one.count("ToolCallDelta")
        return NOTHING
    if method in ("assert_debug_eq", "assert_eq"):
        return NOTHING
    if method == "split_at":
        return tuple(part.decode() for part in (one.encode()[: given[0]], one.encode()[given[0] :]))
    if method == "trim_end_matches":
        return one.removesuffix(given[0])
    return one if method == "as_str" else None


def given_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise NotKnown("tools")
    return [tool_of(tool["name"], tool["parameters"]) for tool in tools]


class Tests(Source):
    """The tests of a file, whose assertions are remembered."""

    def __init__(self, text: str) -> None:
        self.session = Session()
        # The interpreter does not tell by its type that a collected list is a text.
        super().__init__(text.replace(".collect::<String>()", ".concat()"), self.session)

    def macro(self, name: str) -> Run:
        if name != "expect":
            return super().macro(name)
        self.take("[")
        given = self.listed("]")

        def text(names: dict[str, Any]) -> Any:
            value = given[0](names)
            return value[0] if isinstance(value, list) else value

        return text

    def asserted(self, name: str, given: list[Run], names: dict[str, Any]) -> Any:
        values = [one(names) for one in given[: 1 if name == "assert" else 2]]
        values = [value.said if isinstance(value, SaidJson) else value for value in values]
        said = [value for value in values if isinstance(value, Said)]
        if len(said) == 1 and name != "assert_ne":
            self.session.state(said[0], next((value for value in values if not isinstance(value, Said)), None))
        elif said or any(isinstance(value, SaidCalls) for value in values):
            for value in values:
                stream = value.stream if isinstance(value, (Said, SaidCalls)) else Stream()
                if stream.fed is not None:
                    stream.fed.unknown = True
        return NOTHING

    def run(self, test: str) -> tuple[list[Fed], str]:
        """The outputs that a test feeds, and why it stopped, if it did not come to its end."""
        self.session = Session()
        self.called = self.session
        why = ""
        try:
            self.call(test, [], {})
        except (NotKnown, Panic, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            why = f"{type(error).__name__} {error}"
        return [fed for parser in self.session.parsers for fed in parser.fed], why


def file_outputs(path: Path, library: Tests) -> Iterator[tuple[str, list[Output], str]]:
    """(test, outputs, why there are none) of the tests of a file."""
    text = path.read_text(encoding="utf-8")
    source = Tests(text)
    source.read_file()
    source.functions = library.functions | source.functions
    above = path.with_name("mod.rs")
    if above.exists() and above != path:
        shared = Tests(above.read_text(encoding="utf-8"))
        shared.read_file()
        source.constants = shared.constants | source.constants
    for test, _, _ in source.tests:
        if not re.search(rf"#\[test\]\s+fn {test}\(\)", text):
            continue
        fed, why = source.run(test)
        found = []
        for one in fed:
            wanted = one.calls()
            if wanted is None or why:
                continue
            tools, kind = offered(one.tools, wanted), PARSERS[one.parser]
            found.append(
                Output("vllm-rust", f"{path.name} {test}", one.parser, kind, "".join(one.pieces), tools, wanted)
            )
        yield test, found, "" if found else why or ("says nothing of calls" if fed else "feeds no parser")


def vllm_rust_outputs(folder: Path) -> tuple[list[Output], int]:
    """The outputs of the tests of all parsers whose format is ours, and how many of these tests gave none."""
    library = Tests((folder / FOLDER / "tool" / "test_utils.rs").read_text(encoding="utf-8"))
    library.read_file()
    found: list[Output] = []
    empty = 0
    for path in sorted([*(folder / FOLDER / "tool").rglob("*.rs"), *(folder / FOLDER / "unified").rglob("*.rs")]):
        if not any(f"{parser}::new" in path.read_text(encoding="utf-8") for parser in PARSERS):
            continue
        for _, outputs, _ in file_outputs(path, library):
            found += outputs
            empty += not outputs
    return found, empty
