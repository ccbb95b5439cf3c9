"""What a task's source says about it, read without importing it (and torch with it).

Base classes are read where they are defined above the class in its file, or imported there from
the file that defines them. Whatever cannot be read that way is not known, and importing it decides.
"""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.tasks import BUNDLED
from allranks.tasks import __path__ as bundled_folders


class _NotFound(AllranksError):
    """No such module or class. Ignored for a base class: importing the task says more."""


@dataclass(frozen=True)
class TaskSource:
    """A task's class, the job keys that it sets, and the names of its options (None: not known)."""

    path: str  # module:Class
    defaults: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] | None = None
    num_samples: int | None = None  # to train on, if the class says


@dataclass(frozen=True)
class _Module:
    """A module and its parsed source; an extension has none."""

    name: str
    file: str
    tree: ast.Module | None = None


def find_task(name: str) -> TaskSource:
    """Find a bundled task, or `package.module:Class` in the current directory or on sys.path."""
    if name in BUNDLED:
        spec = _find(name, list(bundled_folders), task=name)
        return _read_class(_read_module(f"allranks.tasks.{name}", spec), name.capitalize())
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise _wrong_name(name)
    module_name, _, class_name = name.partition(":")
    return _read_class(_find_module(module_name, task=name), class_name)


def code_of(name: str) -> str:
    """The source of an imported task's module, if it has any: it shows that a task was edited."""
    module: Any = sys.modules.get(find_task(name).path.partition(":")[0])
    with suppress(OSError, TypeError):
        return inspect.getsource(module)
    return ""


def _wrong_name(name: str) -> AllranksError:
    close = difflib.get_close_matches(name.lower(), BUNDLED, n=1)
    fix = f"write {close[0]}" if close else "write a bundled name, or package.module:Class"
    dotted = re.sub(r"\.py(?=:|$)", "", name).replace("/", ".").replace("\\", ".").lstrip(".")
    if ":" not in dotted and "." in dotted:
        dotted = ":".join(dotted.rsplit(".", 1)) if not name.endswith(".py") else f"{dotted}:Class"
    if not close and ":" in dotted:
        fix = f"write {dotted}"
    return AllranksError(
        f'"{name}" is not a bundled task ({", ".join(BUNDLED)}), and not of the form '
        "package.module:Class",
        fix=fix,
    )


def _find_module(name: str, *, task: str) -> _Module:
    importlib.machinery.PathFinder.invalidate_caches()
    here = os.getcwd()
    # Where `python` would look, started in the current directory.
    folders: Sequence[str] | None = [here, *(one for one in sys.path if one not in ("", here))]
    parent = ""
    for part in name.split("."):
        spec = _find(part, folders or [], task=task, parent=parent)
        folders = spec.submodule_search_locations
        parent = f"{parent}.{part}" if parent else part
    return _read_module(name, spec)


def _find(
    part: str, folders: Sequence[str], *, task: str, parent: str = ""
) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.PathFinder.find_spec(part, folders)
    if spec is None and not parent:
        with suppress(ValueError):
            # A project installed in editable mode may be known to a finder of its own alone.
            spec = importlib.util.find_spec(part)
    if spec is not None:
        return spec
    searched = [folder for folder in folders if os.path.exists(folder)]
    # Not all of sys.path: nobody misspells one of the standard library's hundreds of names.
    names = [module.name for module in pkgutil.iter_modules(searched if parent else searched[:1])]
    close = difflib.get_close_matches(part, names, n=1)
    if parent and len(names) == 1:
        close = names
    prefix = f"{parent}." if parent else ""
    if close:
        fix = f"write {task.replace(prefix + part, prefix + close[0], 1)}"
    elif parent:
        fix = f"name one of its modules: {', '.join(names)}" if names else f"write {parent}:Class"
    else:
        fix = f"run this in the folder that contains {part}, or add that folder to PYTHONPATH"
    where = ", ".join(searched) or f"{parent}, which is a file"
    raise _NotFound(f"task {task}: there is no module {prefix}{part} in {where}", fix=fix)


def _read_module(name: str, spec: importlib.machinery.ModuleSpec) -> _Module:
    file = spec.origin or ""
    folders = spec.submodule_search_locations
    if spec.loader is None:
        raise AllranksError(
            f"{name} is the folder {next(iter(folders or []), name)} without __init__.py, so it "
            "has no classes",
            fix=f"name a module in it: {name}.module:Class",
        )
    if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return _Module(name, file)
    try:
        text = Path(file).read_bytes()
        with warnings.catch_warnings():
            # Such as an invalid escape: whoever imports the module will see it.
            warnings.simplefilter("ignore")
            tree = ast.parse(text, filename=file)
    except SyntaxError as error:
        line = error.lineno or 1
        raise AllranksError(
            f"{file}:{line}: {error.msg}", fix=f"correct line {line} of {file}"
        ) from None
    except (OSError, ValueError) as error:
        raise AllranksError(
            f"{file} cannot be read: {error}", fix="make it a readable Python file"
        ) from None
    return _Module(name, file, tree)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements at the top level, and those under an `if`, `try` or `with` there."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(statement))


def _read_class(module: _Module, name: str, *, above: int | None = None) -> TaskSource:
    """A class of a module, defined above that line, or imported there."""
    path = f"{module.name}:{name}"
    if module.tree is None:
        return TaskSource(path)
    found: ast.ClassDef | ast.ImportFrom | None = None
    classes: list[str] = []
    for statement in _statements(module.tree.body):
        if above is not None and getattr(statement, "lineno", 0) >= above:
            break
        if isinstance(statement, ast.ClassDef):
            classes.append(statement.name)
            found = statement if statement.name == name else found
        elif isinstance(statement, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in statement.names]
            found = statement if name in names else found
    if isinstance(found, ast.ClassDef):
        return _describe(module, found)
    if found is not None:
        return replace(_read_imported(module, found, name), path=path)
    # Assigned or made by a call, or from a module that does not list its names.
    fields = ("id", "name", "asname")
    words = {getattr(node, field, None) for node in ast.walk(module.tree) for field in fields}
    if words & {name, "*", "__getattr__"}:
        return TaskSource(path)
    close = difflib.get_close_matches(name, classes, n=1, cutoff=0.5) or classes[:1]
    listed = f"its classes: {', '.join(classes)}" if classes else "it has no class at all"
    define = f"write `class {name}(allranks.tasks.Task)` there"
    raise _NotFound(
        f"{module.file} has no class {name}; {listed}",
        fix=f"write {module.name}:{close[0]}" if close else define,
    )


def _read_imported(module: _Module, statement: ast.ImportFrom, name: str) -> TaskSource:
    """The class that `from there import name` imports, if its source can be found."""
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    is_package = Path(module.file).stem == "__init__"
    package = module.name if is_package else module.name.rpartition(".")[0]
    there = "." * statement.level + (statement.module or "")
    try:
        there = importlib.util.resolve_name(there, package)
        if (there, original) == ("allranks.tasks", "Task"):
            return TaskSource("", options=())
        return _read_class(_find_module(there, task=f"{there}:{original}"), original)
    except (_NotFound, ImportError, RecursionError):  # the last: modules that import each other
        return TaskSource("")


def _describe(module: _Module, node: ast.ClassDef) -> TaskSource:
    base = TaskSource("")  # not known, if it cannot be read
    is_derived = any(_last_name(one) not in ("Task", "object") for one in node.bases)
    if not is_derived:
        base = TaskSource("", options=())
    elif len(node.bases) == 1 and isinstance(node.bases[0], ast.Name):
        base = _read_class(module, node.bases[0].id, above=node.lineno)
    defaults, options, num_samples = base.defaults, base.options, base.num_samples
    methods: dict[str, int] = {}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            methods[statement.name] = statement.lineno
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [ast.unparse(target) for target in targets]
        if "defaults" in names:
            defaults = _literal_defaults(module, node, statement.value)
        if "num_samples" in names and isinstance(statement.value, ast.Constant):
            value = statement.value.value
            num_samples = value if isinstance(value, int) else None
    if "stages" in methods:
        raise AllranksError(
            f"{module.file}:{methods['stages']}: `stages` of {node.name} is now called `blocks`",
            fix="write `def blocks(self, model)`",
        )
    is_dataclass = any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list)
    if "__init__" in methods or (not is_dataclass and not is_derived):
        options = None
    elif is_dataclass and options is not None:
        options = tuple(dict.fromkeys([*options, *_fields(node)]))
    return TaskSource(f"{module.name}:{node.name}", defaults, options, num_samples)


def _last_name(node: ast.expr) -> str:
    """`field` of `field`, `dataclasses.field`, `field(init=False)`, `field[int]` and `"field"`."""
    return re.split(r"[\[(]", ast.unparse(node).strip("'\""))[0].rpartition(".")[2].strip()


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The names that the `__init__` of a dataclass takes."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value = ast.unparse(statement.value) if statement.value else ""
        is_left_out = re.match(r"(\w+\.)?field\(.*\binit=False", value)
        if _last_name(statement.annotation) not in ("ClassVar", "KW_ONLY") and not is_left_out:
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
