"""The public names: all of them lead somewhere, type checkers see the same ones, and the reference has each."""

import ast
from pathlib import Path

import pytest

import turnwise
from support.paths import DOCS

SOURCE = Path(turnwise.__file__)


def names_for_type_checkers():
    """(public name, module, name inside) of the imports that only a type checker makes."""
    [guarded] = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            yield alias.asname or alias.name, node.module.removeprefix("turnwise."), alias.name


def test_type_checkers_see_what_is_imported():
    assert {public: (module, inside) for public, module, inside in names_for_type_checkers()} == turnwise.PLACES
    assert {*turnwise.__all__} == {*turnwise.PLACES, "__version__"}


def test_every_name_leads_somewhere_and_is_in_the_reference():
    page = (DOCS / "reference" / "python.md").read_text()
    for name in turnwise.PLACES:
        assert getattr(turnwise, name) is not None
        assert f"### {name}\n" in page
        assert name in dir(turnwise)


def test_other_names_are_errors_and_modules_are_found():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = turnwise.trian
    from turnwise import disk

    assert disk.EXIT_CODE == 3
