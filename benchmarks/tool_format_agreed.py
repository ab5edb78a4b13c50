"""How many outputs that two independent serving parsers read alike our readers read as they do.

    python benchmarks/tool_format_agreed.py --vllm-python PYTHON --sglang CHECKOUT [--vllm-mlx PATH] [--rapid-mlx PATH]
        [--ovms PATH] [--mlx-swift-lm PATH] [--localai PATH] [--mlx-openai-server PATH] [--vllm-rust PATH]
        [--xllm PATH] [--xinference PATH] [--unsloth PATH] [--mlx-omni-server PATH] [--third PATH] [--failures]

PYTHON is the interpreter of an environment with vLLM (`make test-vllm` builds one). The protocol stands in
docs/reference/tools.md, under "Outputs that two serving parsers read alike". Nothing is copied by hand: outputs and
expectations come from the projects' test files, and the second parsers are executed on the same text and tools.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tool_format_fixtures import parsed, same
from tool_format_output import Calls, Output

from turnwise.messages import ToolSpec
from turnwise.rollout.render.formats.registry import FORMATS

FRESH = ("xllm", "xinference", "unsloth", "mlx-omni-server")
PROJECTS = ("vllm-mlx", "rapid-mlx", "ovms", "mlx-swift-lm", "localai", "mlx-openai-server", "vllm-rust", *FRESH)
BY_FORMAT: dict[str, tuple[str, str]] = {
    "apertus": ("apertus", "apertus2509"), "cohere": ("cohere_command3", "cohere_command4"),
    "deepseek": ("deepseek_v3", "deepseekv3"), "dsml": ("deepseek_v32", "deepseekv32"),
    "functiongemma": ("functiongemma", ""), "gemma": ("gemma4", "gemma4"), "gigachat": ("gigachat3", "gigachat3"),
    "glm": ("glm47", "glm47"), "granite": ("granite", ""), "granite_20b": ("granite-20b-fc", ""),
    "harmony": ("", "gpt-oss"), "hermes": ("hermes", "hermes"), "internlm": ("internlm", "interns1"),
    "jamba": ("jamba", ""), "kimi_k2": ("kimi_k2", "kimi_k2"), "kimi_k3": ("kimi_k3", "kimi_k3"),
    "lfm2": ("lfm2", "lfm2"), "llama": ("llama3_json", "llama3"), "minimax": ("minimax_m2", "minimax-m2"),
    "mistral": ("mistral", "mistral"), "nemotron": ("", ""), "olmo": ("olmo3", ""), "phi4": ("phi4_mini_json", ""),
    "pythonic": ("pythonic", "pythonic"), "qwen_xml": ("qwen3_coder", "qwen3_coder"), "seed_oss": ("seed_oss", ""),
    "xlam": ("xlam", ""),
}  # fmt: skip
"""vLLM's and SGLang's parser of each format. vLLM reads harmony from tokens only, with a vocabulary of gpt-oss."""
BY_PARSER: dict[str, tuple[str, str]] = {
    "QwenToolParser": ("hermes", "qwen25"), "qwen3": ("hermes", "qwen25"),
    "DeepSeekV31ToolParser": ("deepseek_v31", "deepseekv31"), "DeepSeekV40731ToolParser": ("deepseek_v4", "deepseekv4"),
    "PoolsideV1ToolParser": ("poolside_v1", "poolside_v1"), "Qwen3XMLToolParser": ("qwen3_xml", "qwen3_coder"),
    "Step3p5ToolParser": ("step3p5", "step3p5"), "GLM4ToolCallParser": ("glm45", "glm45"), ".glm4": ("glm45", "glm45"),
    "Glm45MoeToolParser": ("glm45", "glm45"), "DeepSeekV4ToolParser": ("deepseek_v4", "deepseekv4"),
    "Qwen3XmlToolParser": ("hermes", "qwen25"), "Granite4ToolParser": ("granite4", ""), "qwen25": ("hermes", "qwen25"),
    "DeepseekV3_1ToolParser": ("deepseek_v31", "deepseekv31"), "deepseekv31": ("deepseek_v31", "deepseekv31"),
    "DeepseekV42ToolParser": ("deepseek_v4", "deepseekv4"), "deepseekv4": ("deepseek_v4", "deepseekv4"),
    "glm45": ("glm45", "glm45"),
}  # fmt: skip
"""Where the project's parser is for a model that vLLM or SGLang serves with another parser than the format's first."""
THIRD = {
    "harmony": "HarmonyToolParser", "mistral": "MistralToolParser", "hermes": "HermesToolParser",
    "llama": "LlamaToolParser", "gemma": "Gemma4ToolParser", "kimi_k2": "KimiToolParser", "glm": "Glm47ToolParser",
    "deepseek": "DeepSeekToolParser", "xlam": "xLAMToolParser",
}  # fmt: skip
"""vllm-mlx's parsers, as a third one for outputs of other projects; the protocol does not have it."""
COPIES = {
    ("vllm-mlx", "vllm"): ("Glm47", "Qwen3XML", "Step3p5", "Granite"),
    ("rapid-mlx", "vllm"): ("Glm47", "Qwen3XML", "Step3p5", "Granite", "Qwen3Coder", "SeedOss", "DeepSeekV31"),
    ("mlx-openai-server", "vllm"): ("GLM4MoE", "MiniMaxM2"),
    ("mlx-openai-server", "sglang"): ("MiniMaxM2",),
    ("vllm-rust", "vllm"): ("",),
    ("xllm", "sglang"): ("",),
}
"""Parsers that are not independent of a server's: they are the server's own, say so, or share 10 % or more of their
runs of twelve tokens."""


@dataclass
class Judged:
    """An output, what everyone makes of it, and what that says."""

    output: Output
    ours: Calls
    offered: Calls
    faults: str
    readings: dict[str, Calls | str]
    """By second parser; a text is its error."""
    independent: tuple[str, ...]
    """The second parsers that count."""

    @property
    def meeting(self) -> list[Calls]:
        """The readings of independent parsers that meet the test."""
        found = [self.readings[one] for one in self.independent]
        return [calls for calls in found if isinstance(calls, list) and self.output.met_by(calls)]

    @property
    def disputed(self) -> bool:
        """Whether one of the second parsers reads it otherwise than the test."""
        found = [calls for calls in self.readings.values() if isinstance(calls, list)]
        return not all(self.output.met_by(calls) for calls in found)

    @property
    def kind(self) -> str:
        return "agreed" if self.meeting else "contested" if self.independent else "alone"

    def reads_as(self, calls: Calls) -> bool:
        broken = any(not isinstance(arguments, dict) for _, arguments in calls)
        return bool(self.faults) if broken else same(calls, self.ours) or same(calls, self.offered)

    @property
    def right(self) -> bool:
        return any(self.reads_as(calls) for calls in self.meeting)

    @property
    def as_stated(self) -> bool:
        """Whether our reading meets the test, whatever others make of it."""
        if any(isinstance(one.arguments, str) for one in self.output.wanted):
            return bool(self.faults)
        return self.output.met_by(self.ours) or self.output.met_by(self.offered)

    @property
    def against(self) -> Calls | None:
        """What vLLM and SGLang read alike, where that does not meet the test."""
        one, other = self.readings.get("vllm"), self.readings.get("sglang")
        alike = isinstance(one, list) and isinstance(other, list) and same(one, other)
        return one if alike and isinstance(one, list) and not self.output.met_by(one) else None

    def told(self) -> str:
        """All readings, for a person."""
        fault = f" fault: {self.faults}" if self.faults else ""
        return "\n    ".join(
            [
                f"{self.output.format}: {self.output.project} {self.output.test} ({self.output.parser})",
                f"output: {self.output.text!r}",
                f"tools:  {json.dumps(self.output.tools, ensure_ascii=False)[:400]}",
                f"test:   {self.output.stated()}",
                f"ours:   {self.ours}{fault}",
                *(f"{name}: {calls}" for name, calls in self.readings.items()),
            ]
        )


def second_of(output: Output) -> dict[str, str]:
    """The second parsers of an output by server."""
    tagged = output.format == "qwen_xml" and output.parser in ("QwenToolParser", "HermesToolParser", "LlamaToolParser")
    default = BY_FORMAT[output.format]
    vllm, sglang = default if tagged else BY_PARSER.get(output.parser, default)
    third = "" if output.project in ("vllm-mlx", "rapid-mlx") else THIRD.get(output.format, "")
    return {name: parser for name, parser in (("vllm", vllm), ("sglang", sglang), ("vllm-mlx", third)) if parser}


def counts(output: Output, server: str) -> bool:
    """Whether a second parser is independent of the project's."""
    return not output.parser.startswith(COPIES.get((output.project, server), ("no parser",)))


def served(server: str, jobs: list[dict[str, Any]], python: str, checkout: Path | None) -> list[Calls | str]:
    """What the parsers of a server make of outputs."""
    script = Path(__file__).parent / "tool_format_servers.py"
    command = [python, str(script), server, *([str(checkout.resolve())] if checkout is not None else [])]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the parsers of {server} did not run: {done.stderr[-800:]}")
    return [
        one["error"] if isinstance(one, dict) else [(name, parsed(given) if given else {}) for name, given in one]
        for one in json.loads(done.stdout)
    ]


def specs_of(tools: list[dict[str, Any]]) -> list[ToolSpec]:
    """The tools that we can offer; a name that we refuse is left out."""
    found = []
    for tool in tools:
        try:
            found.append(ToolSpec(tool["name"], "", tool["parameters"]))
        except ValueError:
            continue
    return found


def judged(outputs: list[Output], servers: dict[str, tuple[str, Path | None]]) -> list[Judged]:
    """Every output once, with all readings. Of several tests with one output the first that is agreed counts. `servers`
    have a Python and, if they are not installed in it, a checkout."""
    readings: list[dict[str, Calls | str]] = [{} for _ in outputs]
    for server, (python, checkout) in servers.items():
        places = [place for place, output in enumerate(outputs) if server in second_of(output)]
        jobs = [
            {"parser": second_of(outputs[place])[server], "text": outputs[place].text, "tools": outputs[place].tools}
            for place in places
        ]
        for place, calls in zip(places, served(server, jobs, python, checkout), strict=True):
            readings[place][server] = calls
    kept: dict[str, Judged] = {}
    for output, found in zip(outputs, readings, strict=True):
        how = FORMATS[output.format]
        assert how is not None
        message = how.parse(output.text, specs_of(output.tools))
        ours = [(call.name, dict(call.arguments)) for call in message.calls]
        good = [pair for pair, call in zip(ours, message.calls, strict=True) if not call.fault]
        independent = tuple(server for server in found if counts(output, server))
        one = Judged(output, ours, good, "; ".join(message.faults), found, independent)
        if output.key not in kept or (one.kind == "agreed" and kept[output.key].kind != "agreed"):
            kept[output.key] = one
    return list(kept.values())


def wilson(right: int, total: int) -> str:
    """The 95 % interval of a share."""
    if not total:
        return ""
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return f"{100 * (middle - half):.1f} to {100 * min(1, middle + half):.1f}"


def table(found: list[Judged]) -> str:
    """Shares by format."""
    heads: tuple[str, ...] = (
        "format",
        "agreed",
        "read rightly",
        "share",
        "95 % interval",
        "with calls",
        "faults",
        "contested",
    )
    heads += ("alike against the test", "ours as they", "alone", "undisputed", "of these right")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in [*sorted({one.output.format for one in found}), "all"]:
        here = [one for one in found if name in (one.output.format, "all")]
        agreed = [one for one in here if one.kind == "agreed"]
        right = sum(one.right for one in agreed)
        calls = sum(bool(one.output.wanted) for one in agreed)
        heard = sum(bool(one.right and not one.output.wanted and one.faults) for one in agreed)
        contested = [one for one in here if one.kind == "contested"]
        against = [(one, alike) for one in contested if (alike := one.against) is not None]
        ours = sum(one.reads_as(alike) for one, alike in against)
        share = f"{100 * right / len(agreed):.1f} %" if agreed else ""
        alone = sum(one.kind == "alone" for one in here)
        undisputed = [one for one in agreed if not one.disputed]
        cells = [
            len(agreed),
            right,
            share,
            wilson(right, len(agreed)),
            calls,
            heard,
            len(contested),
            len(against),
            ours,
            alone,
            len(undisputed),
            sum(one.right for one in undisputed),
        ]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def by_project(found: list[Judged]) -> str:
    """The same counts by project, in one line."""
    parts = []
    for name in PROJECTS:
        agreed = [one for one in found if one.output.project == name and one.kind == "agreed"]
        undisputed = [one.right for one in agreed if not one.disputed]
        if agreed:
            right = sum(one.right for one in agreed)
            parts.append(f"{name} {right} of {len(agreed)} ({sum(undisputed)} of {len(undisputed)})")
    return f"agreed and read rightly (undisputed): {', '.join(parts)}"


def alone(found: list[Judged]) -> str:
    """How many outputs that no independent parser reads we read as their tests state."""
    lines = []
    for name in sorted({one.output.format for one in found if one.kind == "alone"}):
        here = [one for one in found if one.kind == "alone" and one.output.format == name]
        calls = sum(bool(one.output.wanted) for one in here)
        lines.append(f"{name} {sum(one.as_stated for one in here)} of {len(here)} ({calls} with calls)")
    return "alone, read as the test states: " + (", ".join(lines) or "none")


def collected(given: argparse.Namespace) -> list[Output]:
    """The outputs of all lists that were named."""
    from tool_format_localai import localai_outputs
    from tool_format_mlx_server import mlx_server_outputs
    from tool_format_ovms import ovms_outputs
    from tool_format_own import own_outputs
    from tool_format_peers import peer_outputs
    from tool_format_swift import swift_outputs
    from tool_format_vllm_rust import vllm_rust_outputs
    from tool_format_xllm import xllm_outputs

    readers: dict[str, Callable[[Path], tuple[list[Output], int]]] = {
        "vllm-mlx": lambda folder: peer_outputs("vllm-mlx", folder),
        "rapid-mlx": lambda folder: peer_outputs("rapid-mlx", folder),
        "ovms": ovms_outputs,
        "mlx-swift-lm": swift_outputs,
        "localai": localai_outputs,
        "mlx-openai-server": mlx_server_outputs,
        "vllm-rust": vllm_rust_outputs,
        "xllm": xllm_outputs,
        "xinference": lambda folder: own_outputs("xinference", folder),
        "unsloth": lambda folder: own_outputs("unsloth", folder),
        "mlx-omni-server": lambda folder: own_outputs("mlx-omni-server", folder),
    }
    found: list[Output] = []
    for name in PROJECTS:
        folder = getattr(given, name.replace("-", "_"))
        if folder is None:
            continue
        more, left = readers[name](folder)
        by_running = name in ("vllm-mlx", "rapid-mlx", "xinference", "unsloth", "mlx-omni-server")
        what = "outputs whose tests say nothing of calls, or without a mark" if by_running else "tests not extracted"
        print(f"{name}: {len({one.key for one in more})} outputs, {left} {what}")
        found += more
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--sglang", type=Path, required=True)
    for project in PROJECTS:
        parser.add_argument(f"--{project}", type=Path)
    parser.add_argument("--third", type=Path, help="a checkout of vllm-mlx, whose parsers then count as a third one")
    parser.add_argument(
        "--failures", action="store_true", help="print all readings of what is contested or read wrongly"
    )
    given = parser.parse_args()
    servers: dict[str, tuple[str, Path | None]] = {
        "vllm": (given.vllm_python, None),
        "sglang": (given.vllm_python, given.sglang),
    }
    if given.third is not None:
        servers["vllm-mlx"] = (sys.executable, given.third)
    found = judged(collected(given), servers)
    errors = [one for one in found if any(isinstance(calls, str) for calls in one.readings.values())]
    print(f"{len(errors)} outputs of which a second parser raised an error, which is no reading")
    print(table(found))
    print(by_project(found))
    print(alone(found))
    if given.failures:
        for title, part in (
            ("read wrongly", [one for one in found if one.kind == "agreed" and not one.right]),
            ("contested", [one for one in found if one.kind == "contested"]),
            ("alone, otherwise than the test", [one for one in found if one.kind == "alone" and not one.as_stated]),
        ):
            print(f"\n{title}: {len(part)}\n")
            print("\n\n".join(one.told() for one in part))


if __name__ == "__main__":
    sys.exit(main())
