"""The protocols of models and tokenizers: those of transformers have all of it, and turnwise uses all of it."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

import turnwise
from support.acting import byte_tokenizer
from support.making import make_model
from support.paths import TESTS
from turnwise.learn.lora import Adapters, LoraSettings
from turnwise.pretrained import CausalLM, ChatTokenizer

OPERATORS = {"__call__", "__len__"}


class Nothing(Protocol):
    """What every protocol has."""


def members(protocol):
    """name -> the function that a protocol declares, or None for an attribute."""
    declared = {**dict.fromkeys(protocol.__annotations__), **vars(protocol)}
    names = {name for name in declared.keys() - vars(Nothing).keys() if not name.startswith("__") or name in OPERATORS}
    return {name: declared[name] for name in sorted(names)}


def adapted_model():
    model = make_model()
    Adapters(model, LoraSettings(2, 4.0), base="", seed=0)
    return model


def calls_of(function):
    """(positional, by name) arguments of a call with all that a protocol's function takes, but the object itself."""
    taken = list(inspect.signature(function).parameters.values())[1:]
    by_position = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    return by_position, {each.name: None for each in taken if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("make", "protocol"),
    [(make_model, CausalLM), (adapted_model, CausalLM), (byte_tokenizer, ChatTokenizer)],
)
def test_transformers_has_all_members(make, protocol):
    made = make()
    assert [name for name in members(protocol) if not hasattr(made, name)] == []
    functions = {name: value for name, value in members(protocol).items() if inspect.isfunction(value)}
    assert len(functions) > 5
    for name, function in functions.items():
        by_position, by_name = calls_of(function)
        inspect.signature(getattr(made, name)).bind(*by_position, **by_name)


@pytest.mark.parametrize("protocol", [CausalLM, ChatTokenizer])
def test_turnwise_uses_all_members(protocol):
    source = Path(turnwise.__file__).parent
    trees = [ast.parse(path.read_text()) for path in source.rglob("*.py")]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert members(protocol).keys() - OPERATORS - used == set()


RUN = """
import sys; from pathlib import Path; sys.path.insert(0, {tests!r})
from support.running import micro_recipe, train
train(micro_recipe(Path({folder!r}), "steps=1", "sft.updates=0", "evaluation.every=0", "evaluation.final_tasks=2"))
print("torch" in sys.modules, "torchao" in sys.modules)
"""


@pytest.mark.slow
def test_an_ordinary_run_does_without_torchao(tmp_path):
    """Where it is installed transformers imports it by itself, which takes seconds and prints lines of no concern."""
    pytest.importorskip("torchao")
    script = RUN.format(tests=str(TESTS), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True False"
    assert "torchao" not in ended.stderr
