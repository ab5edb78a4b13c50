import sys

import pytest

from turnwise.data.sources import code_of, code_of_ours, spec_of

FILES = {
    "mine.py": "import json, numpy\nimport helper\ndef f():\n    from package.inner import deep\n",
    "helper.py": "X = 1\n",
    "package/__init__.py": "raise AssertionError('nothing is executed')\n",
    "package/inner/__init__.py": "from . import deep\nfrom .. import other\n",
    "package/inner/deep.py": "from .beside import Y\n",
    "package/inner/beside.py": "Y = 1\n",
    "package/other.py": "import mine\n",
    "stranger.py": "import helper\n",
    "broken.py": "def (\n",
}
REACHED = ["helper", "mine", "package", "package.inner", "package.inner.beside", "package.inner.deep", "package.other"]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_all_that_a_module_imports_is_found_and_nothing_is_executed(modules):
    found = code_of(["mine"])
    assert sorted(found) == sorted([*REACHED, "numpy"])
    assert found["numpy"] == sys.modules["numpy"].__version__
    assert "package" not in sys.modules


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("stranger.py", "broken.py")])
def test_a_change_in_any_of_them_is_seen(modules, name):
    before = code_of(["mine"])
    (modules / name).write_text(FILES[name] + "# fixed\n")
    changed = {module for module, digest in code_of(["mine"]).items() if before[module] != digest}
    assert changed == {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")}


def test_only_imported_files_count_and_an_unreadable_file_is_no_error(modules):
    before = code_of(["mine", "no_such_module", "helper.no_such"])
    (modules / "stranger.py").write_text("X = 2\n")
    assert code_of(["mine"]) == before
    assert list(code_of(["broken"])) == ["broken"]


def test_our_own_modules_are_followed_and_counted_as_a_whole():
    assert "numpy" in code_of(["turnwise.types"])
    assert not any(name.startswith("turnwise") for name in code_of(["turnwise.types"]))
    assert "torch" not in code_of(["turnwise.types"])  # which the package imports for type checkers only
    assert {"types.py", "learn/policy.py", "envs/hops.py"} <= code_of_ours().keys()


def test_where_a_module_comes_from(modules):
    assert spec_of("package.inner.deep").origin == str(modules / "package" / "inner" / "deep.py")
    assert spec_of("package.none") is None
    assert spec_of("helper.none") is None
