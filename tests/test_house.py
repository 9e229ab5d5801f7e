"""The house: who may import whom, what is imported when, and that every public name is explained."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jitloader as jl

PACKAGE = Path(jl.__file__).parent
FLOORS = [
    ["spec", "errors", "rng", "ranks", "tables", "canvas", "meter", "bars", "cores"],
    ["jit", "buffers"],
    ["dtypes", "python", "foreign"],
    ["storage", "samples", "orders", "stages", "packing", "replay"],
    ["ragged", "windows", "residency"],
    ["frames"],
    ["compose", "kept"],
    ["passes", "blame", "batches", "pickling"],
    ["describe", "cache", "linking"],
    ["dataset"],
    ["live", "mixing", "packs", "writing"],
    ["transitions"],
    ["sharing", "filling", "check", "quality", "state", "cutting"],
    ["team"],
    ["crew"],
    ["loader"],
    ["torch", "jax", "ray", "report", "pictures"],
    ["__init__"],
    ["__main__"],  # a user of the public names
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
EXCEPTIONS = {
    ("stages", "compose"),  # a stage called on an array, inside that call only
    ("loader", "report"),  # Loader.report and progress, inside those calls only
}


def test_the_top_level_holds_little() -> None:
    """What Git has at the top: the project file, the README, three folders, and files that tools look for by a dot."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no Git checkout")
    top = {line.partition("/")[0] for line in listed.splitlines()}
    assert top - {"pyproject.toml", "README.md", "jitloader", "tests", "benchmarks"} == {
        name for name in top if name.startswith(".")
    }


def rooms() -> dict[str, list[Path]]:
    """Give the rooms of the package: a module or a folder of modules each."""
    found: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(file.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(file)
    return found


def imports(file: Path, *, top_only: bool = False) -> list[str]:
    """Give the dotted names that a file imports, those of this package as `jitloader.x`."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    if top_only:
        lazy = [n for f in nodes if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
        for block in nodes:
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
                lazy += [n for statement in block.body for n in ast.walk(statement)]
        nodes = [n for n in nodes if n not in lazy]
    here = ["jitloader", *file.relative_to(PACKAGE).parent.parts]
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" if module == "jitloader" else module for alias in node.names]
    return found


def own(name: str) -> str | None:
    """Give the room that an imported name of this package lies in."""
    parts = name.split(".")
    if parts[0] != "jitloader":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_a_floor() -> None:
    """A new room is given its floor here."""
    assert set(rooms()) <= set(FLOOR)


@pytest.mark.parametrize("room", rooms())
def test_imports_point_down(room: str) -> None:
    """A room imports rooms of lower floors only; those of one floor do not know each other."""
    for file in rooms()[room]:
        for name in imports(file):
            other = own(name)
            if other is None or other == room or (room, other) in EXCEPTIONS:
                continue
            assert FLOOR[other] < FLOOR[room], f"{file.name} imports {name}"


@pytest.mark.parametrize("room", rooms())
def test_numba_has_one_room(room: str) -> None:
    """Numba and llvmlite are imported in jit.py alone."""
    for file in rooms()[room]:
        named = {name.partition(".")[0] for name in imports(file)} & {"numba", "llvmlite"}
        assert not named or room == "jit", file.name


@pytest.mark.parametrize("room", rooms())
def test_optional_packages_are_lazy(room: str) -> None:
    """At the top level only the standard library, NumPy and this package are imported, and by a door its framework."""
    allowed = set(sys.stdlib_module_names) | {"numpy", "jitloader"} | ({room} & {"torch", "jax", "ray"})
    for file in rooms()[room]:
        named = {name.partition(".")[0] for name in imports(file, top_only=True)}
        assert named <= allowed, file.name


def test_import_brings_no_numba() -> None:
    """`import jitloader` leaves out Numba and every optional package, and changes no global setting."""
    program = (
        "import sys, os, json, warnings, threading; import numpy\n"
        "before = dict(os.environ), list(warnings.filters), threading.active_count()\n"
        "had = set(sys.modules)\n"
        "import jitloader\n"
        "same = before == (dict(os.environ), list(warnings.filters), threading.active_count())\n"
        "print(json.dumps([same, sorted({m.partition('.')[0] for m in set(sys.modules) - had})]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    same, loaded = json.loads(ended.stdout)

    assert same
    assert set(loaded) <= set(sys.stdlib_module_names) | {"jitloader", "numpy", "__mp_main__"}


def public() -> list[str]:
    """Give the names that `from jitloader import ...` is for."""
    return [name for name in dir(jl) if not name.startswith("_") and name not in ("torch", "jax", "ray")]


def test_dir_shows_the_public_names() -> None:
    """Names that are imported for users, and no room beside them."""
    init = ast.parse(PACKAGE.joinpath("__init__.py").read_text())
    named = {alias.asname for node in ast.walk(init) if isinstance(node, ast.ImportFrom) for alias in node.names}

    assert set(public()) == named | {"prioritized", "ring"}
    assert not {name for name in dir(jl) if isinstance(getattr(jl, name), type(jl))} - {"torch", "jax", "ray"}
    starred: dict[str, object] = {}
    exec("from jitloader import *", starred)
    assert set(public()) == set(starred) - {"__builtins__"}


@pytest.mark.parametrize("name", public())
def test_public_names_are_explained(name: str) -> None:
    """Every public function and class says what it is for, in a docstring of its own."""
    value = getattr(jl, name)
    if callable(value):
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), "the docstring of a NamedTuple that has none"
    else:
        assert name in Path(__file__).parents[1].joinpath("README.md").read_text()


def modules() -> list[str]:
    """Give the dotted names of all modules whose docstrings run without an optional package."""
    names = [m.name for m in pkgutil.walk_packages(jl.__path__, "jitloader.")]
    return ["jitloader", *(n for n in names if n.rpartition(".")[2] not in ("__main__", "torch", "jax", "ray"))]


@pytest.mark.parametrize("name", [*modules(), "jitloader.__main__"])
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docstrings show is what happens."""
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)

    assert result.failed == 0
