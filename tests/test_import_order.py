"""Imports point one way, and the command line is light. Read from the source, not from what happens to be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise

SOURCE = Path(turnwise.__file__).parent
HEAVY = ("torch", "transformers", "pydantic", "numpy", "pyarrow", "rich", "matplotlib")

ORDER = (
    {"types"},
    {"config"},
    {"arguments"},
    {"recipes"},
    {"envs", "engines", "credit", "data", "plan", "learn", "sync", "runs", "interop"},
    {"rollout"},
    {"schedule"},
    {"evaluate", "given"},
    {"loop"},
    {"serve", "cluster", "view"},
    {"choices", "mixture"},
    {"learners"},
    {"build", "provenance"},
    {"examiner", "warm_start"},
    {"run"},
    {"past", "subject"},
    {"audit"},
    {"play", "verify", "cost", "appraisal", "host"},
    {"cli", "commands"},
)
"""Each layer may import those before it."""
SIBLINGS = {
    ("data", "runs"),
    ("envs", "data"),
    ("learn", "data"),
    ("learn", "plan"),
    ("engines", "sync"),
    ("sync", "engines"),
    ("sync", "learn"),
    ("sync", "plan"),
    ("cli", "commands"),
    ("commands", "cli"),
}
"""Within a layer only these: what is fetched is written as whole as what runs leave, a model may be one that was
fetched, the learner computes plans, engines of other processes read what is published, the check
of weights has an engine and a learner say the same, and the two halves of the command line know each other."""
ANYONE = {"__init__"}
"""The version."""
SCREEN = "screen"
"""What a person sees: imports nothing of ours, and only a run and what comes after may speak to it."""
SPEAKERS = {"warm_start", "run", "play", "verify", "cost", "appraisal", "host", "cli", "commands"}


def modules():
    """(dotted name within the package, path) of every module."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1]), path


NAMES = {name for name, _ in modules()}


def package_of(module):
    return module.partition(".")[0]


def imports_of(text, module="x"):
    """Modules of ours that a source text imports anywhere, in functions too; "__init__" is the package itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "turnwise":
                    yield alias.name.partition(".")[2] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports of ours in full"
            if node.module and node.module.partition(".")[0] == "turnwise":
                inside = node.module.partition(".")[2]
                for alias in node.names:
                    whole = f"{inside}.{alias.name}" if inside else alias.name
                    yield whole if whole in NAMES else inside or "__init__"


EDGES = [(module, target) for module, path in modules() for target in imports_of(path.read_text(), module)]


def layer_of(package):
    return next((place for place, names in enumerate(ORDER) if package in names), None)


def allowed(module, target):
    one, other = package_of(module), package_of(target)
    if one == other or other in ANYONE:
        return True
    if one == SCREEN or other == SCREEN:
        return one in SPEAKERS
    here, there = layer_of(one), layer_of(other)
    if here is None or there is None:
        return False
    return there < here or (here == there and (one, other) in SIBLINGS)


def test_every_module_has_its_place():
    placed = set().union(*ORDER) | ANYONE | {SCREEN}
    assert {package_of(name) for name in NAMES} <= placed


def test_imports_point_one_way():
    assert len(EDGES) > 50
    assert [f"{module} -> {target}" for module, target in EDGES if not allowed(module, target)] == []


def test_no_sibling_edge_is_allowed_for_nothing():
    assert {(package_of(a), package_of(b)) for a, b in EDGES} >= SIBLINGS


def test_modules_within_a_package_do_not_import_in_circles():
    ahead = {}
    for module, target in EDGES:
        if (package_of(module), package_of(target)) not in {("cli", "commands"), ("commands", "cli")}:
            ahead.setdefault(module, set()).add(target)

    def reaches(module, seen):
        for target in ahead.get(module, ()):
            if target not in seen:
                seen.add(target)
                reaches(target, seen)
        return seen

    assert [module for module in ahead if module in reaches(module, set())] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import turnwise.build", ["build"]),
        ("from turnwise import build, __version__", ["build", "__init__"]),
        ("def f():\n    from turnwise.learn import head", ["learn.head"]),
        ("from turnwise.learn.head import chunks", ["learn.head"]),
        ("if TYPE_CHECKING:\n    import turnwise", ["__init__"]),
        ("import torch, turnwisely", []),
    ],
)
def test_imports_are_found_wherever_they_stand(text, found):
    assert list(imports_of(text)) == found


@pytest.mark.parametrize(
    ("module", "target", "fine"),
    [
        ("loop", "learn.learner", True),
        ("learn.learner", "loop", False),
        ("learn.policy", "plan.plan", True),
        ("plan.plan", "learn.policy", False),
        ("engines.slots", "learn.attention", False),
        ("types", "config", False),
        ("run", "screen", True),
        ("loop", "screen", False),
        ("screen", "types", False),
        ("credit.filters", "nowhere", False),
    ],
)
def test_the_rule_itself(module, target, fine):
    assert allowed(module, target) is fine


def heavy_after(*arguments):
    """Which heavy libraries a fresh interpreter has loaded after running some code, and what it printed."""
    report = f"lambda: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit, sys; atexit.register({report})\n{arguments[0]}"
    done = subprocess.run([sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, timeout=600)
    return ast.literal_eval(done.stderr.splitlines()[-1]), done


def test_the_command_line_is_light():
    loaded, done = heavy_after("import turnwise.cli")
    assert done.returncode == 0
    assert loaded == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["eval", "--help"], ["--version"], ["no-such-command"]]
)
def test_help_imports_nothing_heavy(arguments):
    loaded, done = heavy_after("from turnwise.cli import main; main()", *arguments)
    assert "turnwise" in done.stdout + done.stderr
    assert done.returncode == (2 if arguments == ["no-such-command"] else 0)
    assert loaded == []


def test_types_need_numpy_and_nothing_else():
    loaded, _ = heavy_after("import turnwise.types, turnwise.plan.pack, turnwise.credit.estimators")
    assert loaded == ["numpy"]
