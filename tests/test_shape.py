"""The shape of the source: one class of a name, files of 400 lines, functions of 60."""

import ast
from collections import defaultdict
from pathlib import Path

import turnwise

SOURCE = Path(turnwise.__file__).parent
TREES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def test_no_class_name_is_defined_twice():
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) > 200
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_is_longer_than_400_lines():
    lengths = {name: len((SOURCE / name).read_text().splitlines()) for name in TREES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_is_longer_than_60_lines():
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > 60} == {}
