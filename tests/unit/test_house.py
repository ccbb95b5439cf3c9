"""The rules of the house: where torch may be imported, and who may import whom."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from tests.lowest import lowest

PACKAGE = Path(__file__).parents[2] / "src" / "allranks"
TOUR = PACKAGE.parents[1] / "docs" / "explanation" / "tour.md"
BESIDE = {"errors", "layout"}  # the modules beside the rooms, which everything may import
# Where a rank really runs, or is started.
TORCH = (
    "train/",
    "tasks/",
    "probe/",
    "launch/agent.py",
    "doctor/preflight.py",
    "bench/comm_calls.py",
    "bench/comm_ranks.py",
)
# These import torch, or take as long.
HEAVY = {"torch", "torchvision", "torchaudio", "lightning", "accelerate", "transformers", "sklearn"}
# The rest may import these in functions only.
RANK_SIDE = {"allranks.launch.agent"}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = ("allranks", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path, *, typing: bool = False) -> list[tuple[str, int]]:
    """Every module that a file imports, in functions too, with its line.

    `if TYPE_CHECKING:` is left out unless `typing`: nothing in it is ever imported.
    """
    tree, found = tree_of(file), []
    package = (
        module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    )
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped |= {id(child) for part in node.body for child in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped and not typing:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:  # `from allranks import train` is of allranks.train
                found.append((f"{name}.{alias.name}", node.lineno))
    return found


def part_of(name: str) -> str:
    """The feature or folder that a module of ours is in, or nothing for the base."""
    words = name.split(".")
    return words[1] if words[0] == "allranks" and len(words) > 1 else ""


def test_the_walk_finds_imports_in_functions_and_skips_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "launch" / "made_up.py"
    file.parent.mkdir()
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    import torch\n"
        "def f():\n"
        "    from ..train import loop\n"
        "    import torch.nn as nn\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    names = [name for name, _ in imports(file)]
    assert names == ["typing.TYPE_CHECKING", "allranks.train.loop", "torch.nn"]


def test_torch_is_imported_only_where_a_rank_runs() -> None:
    heavy = [
        f"{path}:{line} imports {name}"
        for file in FILES
        if not (path := file.relative_to(PACKAGE).as_posix()).startswith(TORCH)
        for name, line in imports(file)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy


def allowed_imports() -> dict[str, set[str]]:
    """Which rooms each room may import, as the table of the tour has it."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", TOUR.read_text(), re.MULTILINE)
    return {room: set(words.split()) for room, words in rows if words.strip() != "every room"}


def test_rooms_import_only_what_the_tour_allows() -> None:
    allowed = allowed_imports()
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert allowed.keys() | {"cli"} == rooms
    assert {file.stem for file in PACKAGE.glob("*.py")} == BESIDE | {"__init__", "__main__"}
    foreign = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for file in FILES
        if (own := part_of(module_name(file))) in allowed
        for name, line in imports(file, typing=True)
        if part_of(name) in rooms - allowed[own] - {own}
    ]
    assert not foreign


def test_the_tour_names_files_that_exist() -> None:
    named = re.findall(r"(?<![\w/.-])(?:[a-z_]+/)+(?:[a-z_]+\.(?:py|yaml|toml))?", TOUR.read_text())
    assert len(named) > 50
    roots = (PACKAGE, TOUR.parents[2])
    assert not [path for path in named if not any((root / path).exists() for root in roots)]


def test_nobody_but_train_knows_the_bundled_tasks() -> None:
    public = {"allranks.tasks.BUNDLED", "allranks.tasks.Task", "allranks.tasks.__path__"}
    known = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for file in FILES
        if part_of(module_name(file)) not in ("train", "tasks")
        for name, line in imports(file)
        if name.startswith("allranks.tasks.") and name not in public
    ]
    assert not known


def test_whoever_loads_a_torch_module_of_ours_does_it_late() -> None:
    """Modules of other rooms that import torch are themselves imported inside functions."""
    for file in FILES:
        if module_name(file) in RANK_SIDE or part_of(module_name(file)) in ("train", "tasks"):
            continue
        top = ast.Module(tree_of(file).body, [])
        names = {
            f"{node.module}.{alias.name}"
            for node in top.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        late = {name for name in names if any(name.startswith(side) for side in RANK_SIDE)}
        assert not late, f"{module_name(file)} imports {late} at once"


def test_files_and_functions_are_short() -> None:
    """About 400 lines a file and 60 a function: the point where one stops and thinks."""
    long = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if text.count("\n") > 600:
            long.append(f"{file.name}: {text.count(chr(10))} lines")
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    long.append(f"{file.name}:{node.name}: {length} lines")
    assert not long


def test_every_dependency_declares_its_lowest_version() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    assert len([*lowest(project)]) > 10  # raises where one is missing
