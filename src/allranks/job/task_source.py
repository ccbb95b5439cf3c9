"""What can be told about a task from its source, without importing it (and torch with it)."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.tasks import BUNDLED
from allranks.tasks import __path__ as bundled_folders

# A chain of re-exports or of base classes longer than this is a circle.
MAX_HOPS = 10


class _NotFound(AllranksError):
    """No such module or class: forgiven on the way to a base class, which an import may find."""


@dataclass(frozen=True)
class TaskSource:
    """A task's class, the job keys it sets, and the names of its options (None: cannot be told)."""

    path: str  # module:Class
    defaults: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] | None = None
    num_samples: int | None = None  # to train on, if the class says


@dataclass(frozen=True)
class _Module:
    """A module that was found: its parsed source, or None where it has none (an extension)."""

    name: str
    file: str
    is_package: bool
    tree: ast.Module | None


def find_task(name: str) -> TaskSource:
    """Find a bundled task, or `package.module:Class` from the current directory or sys.path."""
    if name in BUNDLED:
        bundled = f"allranks.tasks.{name}"
        module = _read_module(bundled, _find(name, list(bundled_folders), task=name))
        return _read_class(module, name.capitalize(), MAX_HOPS)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise _wrong_name(name)
    module_name, _, class_name = name.partition(":")
    return _read_class(_find_module(module_name, task=name), class_name, MAX_HOPS)


def _wrong_name(name: str) -> AllranksError:
    close = difflib.get_close_matches(name.lower(), BUNDLED, n=1)
    fix = f"write {close[0]}" if close else "write a bundled name, or package.module:Class"
    dotted = re.sub(r"\.py(?=:|$)", "", name).replace("/", ".").replace("\\", ".").lstrip(".")
    if ":" not in dotted and "." in dotted:
        dotted = ":".join(dotted.rsplit(".", 1)) if not name.endswith(".py") else f"{dotted}:Class"
    if not close and ":" in dotted:
        fix = f"write {dotted}"
    return AllranksError(
        f'"{name}" is no bundled task ({", ".join(BUNDLED)}) and not of the form '
        "package.module:Class",
        fix=fix,
    )


def _search_path() -> list[str]:
    """Where `python` would look, run in the current directory."""
    folder = os.getcwd()
    return [folder, *(entry for entry in sys.path if entry not in ("", folder))]


def _find_module(name: str, *, task: str) -> _Module:
    importlib.machinery.PathFinder.invalidate_caches()
    folders: Sequence[str] | None = _search_path()
    spec = None
    done: list[str] = []
    for part in name.split("."):
        if folders is None:
            module, child = ".".join(done), ".".join([*done, part])
            raise _NotFound(
                f"task {task}: {module} is a file, not a package, so there is no module {child}",
                fix=f"write {module}:Class",
            )
        # The last part alone: the name of a parent that was never imported would be looked up.
        spec = _find(part, folders, task=task, parent=".".join(done))
        locations = spec.submodule_search_locations
        folders = list(locations) if locations is not None else None
        done.append(part)
    assert spec is not None
    return _read_module(name, spec)


def _find(
    part: str, folders: Sequence[str], *, task: str, parent: str = ""
) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.PathFinder.find_spec(part, folders)
    if spec is None and not parent:
        # A project installed in editable mode may be known to a finder of its own alone.
        for finder in sys.meta_path:
            if finder not in (importlib.machinery.PathFinder, importlib.machinery.BuiltinImporter):
                spec = spec or finder.find_spec(part, None)
    if spec is not None:
        return spec
    searched = [folder for folder in folders if os.path.exists(folder)]
    # Not all of sys.path: the standard library's hundreds of names are no likely misspelling.
    names = [module.name for module in pkgutil.iter_modules(searched if parent else searched[:1])]
    close = difflib.get_close_matches(part, names, n=1) or (
        names if parent and len(names) == 1 else []
    )
    missing = f"{parent}.{part}" if parent else part
    prefix = f"{parent}." if parent else ""
    if close:
        fix = f"write {task.replace(missing, prefix + close[0], 1)}"
    elif parent:
        fix = f"name a module of {parent}: {', '.join(names) or 'it has none'}"
    else:
        fix = f"run this in the folder that holds {part}, or add that folder to PYTHONPATH"
    raise _NotFound(
        f"task {task}: there is no module {missing} in {', '.join(searched) or 'any folder'}",
        fix=fix,
    )


def _read_module(name: str, spec: importlib.machinery.ModuleSpec) -> _Module:
    file = spec.origin or ""
    is_package = spec.submodule_search_locations is not None
    if spec.loader is None:
        folder = next(iter(spec.submodule_search_locations or []), name)
        raise AllranksError(
            f"{name} is the folder {folder} without __init__.py, so it holds no class",
            fix=f"name a module in it: {name}.module:Class",
        )
    if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return _Module(name, file, is_package, None)
    try:
        with warnings.catch_warnings():
            # Such as an invalid escape: for whoever imports the module, not for us.
            warnings.simplefilter("ignore")
            tree = ast.parse(Path(file).read_bytes(), filename=file)
    except SyntaxError as error:
        raise AllranksError(
            f"{file}:{error.lineno or 1}: {error.msg}",
            fix=f"correct line {error.lineno or 1} of {file}",
        ) from None
    except (OSError, ValueError) as error:
        raise AllranksError(
            f"{file} cannot be read: {error}", fix="make it a readable Python file"
        ) from None
    return _Module(name, file, is_package, tree)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top level, and those under an `if`, `try` or `with` there."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def _read_class(module: _Module, class_name: str, hops: int) -> TaskSource:
    path = f"{module.name}:{class_name}"
    if module.tree is None or hops == 0:
        return TaskSource(path)
    in_doubt = False
    found: ast.ClassDef | ast.ImportFrom | None = None
    classes: list[str] = []
    for statement in _statements(module.tree.body):
        if isinstance(statement, ast.ClassDef):
            classes.append(statement.name)
            found = statement if statement.name == class_name else found
        elif isinstance(statement, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in statement.names]
            found = statement if class_name in names else found
            in_doubt |= "*" in names
        elif isinstance(statement, ast.FunctionDef):
            in_doubt |= statement.name == "__getattr__"
        elif class_name in _assigned(statement):
            in_doubt = True
    if isinstance(found, ast.ClassDef):
        return _describe(module, found, hops)
    if found is not None:
        exported = _follow(module, found, class_name, hops)
        return replace(exported, path=path)
    if in_doubt:
        return TaskSource(path)
    close = difflib.get_close_matches(class_name, classes, n=1, cutoff=0.5) or classes[:1]
    listed = f"; its classes: {', '.join(classes)}" if classes else "; it has no class at all"
    raise _NotFound(
        f"{module.file} has no class {class_name}{listed}",
        fix=f"write {module.name}:{close[0]}"
        if close
        else f"write `class {class_name}(allranks.tasks.Task)` there",
    )


def _follow(module: _Module, statement: ast.ImportFrom, name: str, hops: int) -> TaskSource:
    """The class behind `from there import name`, as far as its source can be found."""
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    there = statement.module or ""
    if statement.level:
        parents = module.name.split(".")
        kept = len(parents) - statement.level + (1 if module.is_package else 0)
        there = ".".join([*parents[: max(kept, 0)], *([there] if there else [])])
    nothing = TaskSource(f"{there}:{original}")
    if (there, original) == ("allranks.tasks", "Task"):
        return TaskSource(nothing.path, options=())
    if not there:
        return nothing
    try:
        return _read_class(_find_module(there, task=nothing.path), original, hops - 1)
    except _NotFound:
        return nothing  # importing it will tell more


def _describe(module: _Module, node: ast.ClassDef, hops: int) -> TaskSource:
    path = f"{module.name}:{node.name}"
    base = _base(module, node, hops)
    defaults = dict(base.defaults)
    num_samples = base.num_samples
    for statement in node.body:
        names = list(_assigned(statement))
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if "defaults" in names and value is not None:
            defaults = _literal_defaults(module, node, value)
        if "num_samples" in names and isinstance(value, ast.Constant):
            num_samples = value.value if isinstance(value.value, int) else None
    methods = {
        statement.name: statement.lineno
        for statement in node.body
        if isinstance(statement, ast.FunctionDef)
    }
    if "stages" in methods:
        raise AllranksError(
            f"{module.file}:{methods['stages']}: `stages` of {node.name} is now called `blocks`",
            fix="write `def blocks(self, model)`",
        )
    options = base.options
    if "__init__" in methods:
        options = None
    elif any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list):
        options = None if options is None else tuple(dict.fromkeys([*options, *_fields(node)]))
    elif not _is_derived(node):
        options = None
    return TaskSource(path, defaults, options, num_samples)


def _is_derived(node: ast.ClassDef) -> bool:
    """Whether it has a base that may give it options: any but Task."""
    return any(_last_name(base) not in ("Task", "object") for base in node.bases)


def _base(module: _Module, node: ast.ClassDef, hops: int) -> TaskSource:
    """What the class inherits: nothing from Task alone; unknown where the base cannot be read."""
    if not _is_derived(node):
        return TaskSource("", options=())
    only = node.bases[0]
    if len(node.bases) > 1 or not isinstance(only, ast.Name) or only.id == node.name:
        return TaskSource("")
    try:
        return _read_class(module, only.id, hops - 1)
    except _NotFound:
        return TaskSource("")


def _last_name(node: ast.expr | None) -> str:
    """`dataclass` of `dataclass`, `dataclasses.dataclass` and `dataclass(frozen=True)`."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"[\[(]", node.value)[0].rpartition(".")[2].strip()
    return node.id if isinstance(node, ast.Name) else ""


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Names that the class's dataclass `__init__` takes."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if _last_name(statement.annotation) in ("ClassVar", "KW_ONLY"):
            continue
        value = statement.value
        arguments = value.keywords if isinstance(value, ast.Call) else []
        if _last_name(value) == "field" and any(
            argument.arg == "init"
            and isinstance(argument.value, ast.Constant)
            and argument.value.value is False
            for argument in arguments
        ):
            continue
        yield statement.target.id


def _literal_defaults(module: _Module, node: ast.ClassDef, value: ast.expr) -> dict[str, Any]:
    try:
        defaults = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        defaults = None
    if not isinstance(defaults, dict) or not all(isinstance(key, str) for key in defaults):
        raise AllranksError(
            f"{module.file}:{value.lineno}: `defaults` of {node.name} is not a literal dict of job "
            "keys; it is read without importing the module",
            fix='write the values out, as in defaults = {"batch_size": 32, "epochs": 50}',
        )
    return defaults
