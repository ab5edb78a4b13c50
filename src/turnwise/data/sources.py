"""The code that a module is made of: its own file, those it imports that are the user's, and versions of all others.

Imports are read from the source, in functions too, and nothing is executed to find them. What a module imports by a
name that it computes stays unknown.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from turnwise.data.digests import digest_of

OURS = "turnwise"
INSTALLED = {"site-packages", "dist-packages"}


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """By name of module: the digest of the user's own, or the version of an installed one.

    Modules of this package are followed and not listed, see `code_of_ours`. A name that no module has is left out.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        top, _, _ = name.partition(".")
        if name in seen or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        if (spec := spec_of(name)) is None:
            continue
        path = Path(spec.origin) if spec.origin else None
        if path is not None and INSTALLED & set(path.parts):
            found[top] = version_of(top)
            continue
        parent, _, _ = name.rpartition(".")
        waiting += [parent] if parent else []
        if path is None or not path.is_file():
            continue
        if top != OURS:
            found[name] = digest_of(path)
        if path.suffix == ".py":
            waiting += imports_of(path, name, is_package=spec.submodule_search_locations is not None)
    return dict(sorted(found.items()))


def code_of_ours() -> dict[str, str]:
    """By path: the digests of this package's own sources."""
    folder = Path(__file__).parent.parent
    return {path.relative_to(folder).as_posix(): digest_of(path) for path in sorted(folder.rglob("*.py"))}


def version_of(top: str) -> str:
    """The version of the package that brings a module."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        brought_by = importlib.metadata.packages_distributions().get(top, [])
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(brought_by)))


def spec_of(name: str) -> ModuleSpec | None:
    """Where a module comes from, without importing it or the packages that it is in."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        above = spec_of(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        if (find := getattr(finder, "find_spec", None)) is not None and (found := find(name, path)) is not None:
            assert isinstance(found, ModuleSpec)
            return found
    return None


def imports_of(path: Path, module: str, *, is_package: bool) -> Iterator[str]:
    """Names that may be modules which a source imports, except for type checkers only."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in nodes_that_run(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a source, without those that only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
