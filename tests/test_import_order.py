"""Imports point one way, and the command line is light. Read from the source, not from what happens to be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise

SOURCE = Path(turnwise.__file__).parent
HEAVY = ("torch", "transformers", "pydantic", "numpy", "pyarrow", "rich", "matplotlib")

LAYERS = (
    {"types", "allowed", "messages", "routes", "tokens", "pretrained", "seeds", "frames", "disk", "atomic"},
    {"recipe"},
    {"credit", "plan", "runs", "data", "interop", "envs", "weights", "engines", "learn"},
    {"rollout"},
    {"schedule"},
    {"training", "evaluation"},
    {"serve", "cluster"},
    {"assemble"},
    {"inspect", "view", "testing", "preflight", "simulate"},
    {"cli"},
    {"api"},
)
"""Each package may import those of the layers before it, and its neighbours where that makes no circle."""
ANYONE = {"__init__"}
"""The version, and the public names, each of which is imported when it is asked for."""


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
    return next((index for index, names in enumerate(LAYERS) if package in names), None)


def allowed(module, target):
    one, other = package_of(module), package_of(target)
    if one == other or other in ANYONE or one in ANYONE:
        return True
    below, above = layer_of(other), layer_of(one)
    return below is not None and above is not None and below <= above


def test_every_module_has_its_place():
    placed = set().union(*LAYERS) | ANYONE
    assert {package_of(name) for name in NAMES} <= placed


def test_imports_point_one_way():
    assert len(EDGES) > 50
    assert [f"{module} -> {target}" for module, target in EDGES if not allowed(module, target)] == []


def in_circles(edges):
    """What reaches itself."""
    ahead = {}
    for one, other in edges:
        ahead.setdefault(one, set()).add(other)

    def reached(start):
        seen, front = set(), set(ahead.get(start, ()))
        while front:
            seen |= front
            front = {after for one in front for after in ahead.get(one, ())} - seen
        return seen

    return sorted(one for one in ahead if one in reached(one))


def test_packages_do_not_import_in_circles():
    edges = {(package_of(module), package_of(target)) for module, target in EDGES}
    assert in_circles({(one, other) for one, other in edges if one != other and other not in ANYONE}) == []


def test_modules_do_not_import_in_circles():
    assert in_circles(edge for edge in EDGES if edge[1] not in ANYONE) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import turnwise.atomic", ["atomic"]),
        ("from turnwise import atomic, __version__", ["atomic", "__init__"]),
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
        ("training.loop", "learn.learner", True),
        ("learn.learner", "training.loop", False),
        ("learn.policy", "plan.plan", True),
        ("engines.slots.engine", "rollout.agent", False),
        ("types", "recipe.schema", False),
        ("cli.commands", "assemble.run", True),
        ("credit.filters", "nowhere", False),
    ],
)
def test_the_rule_itself(module, target, fine):
    assert allowed(module, target) is fine


@pytest.mark.parametrize(
    ("edges", "found"), [([("a", "b"), ("b", "c")], []), ([("a", "b"), ("b", "c"), ("c", "a")], ["a", "b", "c"])]
)
def test_circles_are_found(edges, found):
    assert in_circles(edges) == found


def heavy_after(*arguments):
    """Which heavy libraries a fresh interpreter has loaded after running some code, and what it printed."""
    report = f"lambda: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit, sys; atexit.register({report})\n{arguments[0]}"
    done = subprocess.run([sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, timeout=600)
    return ast.literal_eval(done.stderr.splitlines()[-1]), done


def test_the_command_line_is_light():
    loaded, done = heavy_after("import turnwise.cli.commands")
    assert done.returncode == 0
    assert loaded == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["sft", "--help"], ["eval", "--help"], ["--version"], ["no-such-command"]]
)
def test_help_imports_nothing_heavy(arguments):
    loaded, done = heavy_after("from turnwise.cli.commands import main; main()", *arguments)
    assert "turnwise" in done.stdout + done.stderr
    assert done.returncode == (2 if arguments == ["no-such-command"] else 0)
    assert loaded == []


def test_the_help_of_train_has_the_keys_of_a_recipe_and_imports_what_defines_them():
    loaded, done = heavy_after("from turnwise.cli.commands import main; main()", "train", "--help")
    assert "groups_per_step" in done.stdout
    assert done.returncode == 0
    assert loaded == ["pydantic"]


def test_types_need_numpy_and_nothing_else():
    loaded, _ = heavy_after("import turnwise.types, turnwise.plan.pack, turnwise.credit.estimators")
    assert loaded == ["numpy"]


def test_importing_the_package_is_light():
    loaded, done = heavy_after("import turnwise; dir(turnwise)")
    assert done.returncode == 0
    assert loaded == []


SLOW = ("torch.nn.attention.varlen", "torch._dynamo", "torch._inductor", "torchao", "peft", "ray", "vllm", "mlflow")
"""What takes seconds to import and most runs do not need."""


def imported_at_once(text):
    """What a source text imports when it is imported itself."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_what_takes_seconds_to_import_is_imported_where_it_is_needed():
    found = [
        f"{module} -> {name}"
        for module, path in modules()
        for name in imported_at_once(path.read_text())
        if any(f"{name}.".startswith(f"{slow}.") for slow in SLOW) and not module.startswith("engines.vllm.worker")
    ]
    assert found == []


def test_a_slow_import_is_seen():
    assert list(imported_at_once("import ray.util\ndef f():\n    import vllm\nfrom peft import x")) == [
        "ray.util",
        "peft",
    ]
