"""What a grammar costs: CPU time of the slot engine with and without one, and the bytes of what it allowed.

    python benchmarks/structured.py [--vocabulary 32768] [--calls 16] [--tokens 160] [--repeats 3] [--json FILE]

A byte-level BPE is trained on Python's standard library and a random model of four layers samples with it: nobody needs
a download. The same calls are made without a grammar, under a JSON schema of a small record, and under any JSON object;
one warm-up each, then the median over repeats, in CPU seconds of the process, because machines are shared. Bytes are
those per sampled token: of the turn by itself, in a pickle of all turns, which share their sets, and added to the
archive's file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.engines.base import Completion, Sampling
from turnwise.engines.grammar import ANY_OBJECT, Grammar
from turnwise.engines.guidance import Guidance
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.learn.attention import NAME, register
from turnwise.messages import Message
from turnwise.runs.archive import Record, write_step
from turnwise.schedule.workers import inline
from turnwise.types import Group, Status, Task, Trajectory, Turn

CORPUS = 2 << 20
"""Bytes of Python that the tokenizer is trained on."""
RECORD = Grammar.of_schema(
    {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "score": {"type": "number"},
            "kind": {"enum": ["question", "answer", "remark"]},
            "notes": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
        },
        "required": ["title", "tags", "score", "kind"],
        "additionalProperties": False,
    }
)
CASES = {"no grammar": None, "JSON schema": RECORD, "any JSON object": ANY_OBJECT}


def source_text() -> Iterator[str]:
    left = CORPUS
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="ignore")
        yield text
        left -= len(text)
        if left < 0:
            return


def make_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(source_text(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def make_engine(tokenizer: Any, calls: int, context: int) -> SlotEngine:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size = len(tokenizer)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    register()
    model = Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation(NAME)
    slots = SlotModel(
        model,
        slots=calls,
        context=context,
        end_tokens=[0],
        decode=tokenizer.decode,
        dtype=torch.float32,
        guidance=Guidance(tokenizer, vocabulary=size, end_tokens=[0]),
    )
    return SlotEngine(slots, run=inline, shares_weights=True)


async def sample(
    engine: SlotEngine, grammar: Grammar | None, calls: int, tokens: int
) -> tuple[float, list[Completion]]:
    """(CPU seconds, completions) of calls that are made together."""
    await engine.forget()
    sampling = Sampling(tokens, grammar=grammar)
    prompt = np.arange(1, 33, dtype=np.int32)
    began = time.process_time()
    made = [engine.generate(prompt, sampling, session=str(seed), seed=seed) for seed in range(calls)]
    completions = await asyncio.gather(*made)
    return time.process_time() - began, list(completions)


def turns_of(completions: Sequence[Completion]) -> list[Trajectory]:
    prompt = np.arange(1, 33, dtype=np.int32)
    said = Message("assistant", "")
    turns = [Turn(prompt, c.tokens, c.logprobs, c.versions, c.stop, 0.0, said, allowed=c.allowed) for c in completions]
    return [Trajectory((turn,), Status.finished) for turn in turns]


def archived(attempts: Sequence[Trajectory]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        group = Group(Task("t", "d"), tuple(attempts))
        return write_step(Path(folder), 1, [Record(group, kept=False)]).stat().st_size


def sizes_of(completions: Sequence[Completion]) -> dict[str, float]:
    """Bytes per token of what was allowed."""
    tokens = sum(len(one.tokens) for one in completions)
    attempts = turns_of(completions)
    bare = [Trajectory((replace_allowed(attempt.turns[0]),), Status.finished) for attempt in attempts]
    alone = sum(one.allowed.num_bytes for one in completions if one.allowed is not None)
    return {
        "alone": alone / tokens,
        "pickle": (len(pickle.dumps(attempts)) - len(pickle.dumps(bare))) / tokens,
        "archive": (archived(attempts) - archived(bare)) / tokens,
        "sets": statistics.mean(len(one.allowed.sets) for one in completions if one.allowed is not None),
    }


def replace_allowed(turn: Turn) -> Turn:
    from dataclasses import replace

    return replace(turn, allowed=None)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(arguments.vocabulary)
    engine = make_engine(tokenizer, arguments.calls, arguments.tokens + 64)
    speeds: dict[str, list[float]] = {name: [] for name in CASES}
    results: dict[str, Any] = {"vocabulary": len(tokenizer)}
    for repeat in range(arguments.repeats + 1):
        for name, grammar in CASES.items():
            seconds, completions = await sample(engine, grammar, arguments.calls, arguments.tokens)
            if repeat:
                speeds[name].append(sum(len(one.tokens) for one in completions) / seconds)
            if grammar is not None and repeat == arguments.repeats:
                results[name] = sizes_of(completions)
    await engine.close()
    for name, found in speeds.items():
        results.setdefault(name, {})["tokens per CPU second"] = statistics.median(found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    print(f"vocabulary {results['vocabulary']}, {arguments.calls} calls of up to {arguments.tokens} tokens")
    for name in CASES:
        found = results[name]
        line = f"{name:16} {found['tokens per CPU second']:8.0f} tokens per CPU second"
        if "alone" in found:
            line += f"   bytes/token: alone {found['alone']:.1f}, pickle {found['pickle']:.1f}"
            line += f", archive {found['archive']:.1f}; {found['sets']:.0f} sets a turn"
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
