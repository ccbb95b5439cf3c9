"""Reads a job's YAML with the line of every key, and overrides; merges them as layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from allranks.errors import AllranksError
from allranks.run.files import open_file, open_named

KeyPath = tuple[str, ...]

# Setting one in a higher layer clears the other in the lower ones.
EXCLUSIVE = (("epochs", "steps"), ("batch_size", "batch_size_per_rank"))

COMMAND_LINE = " on the command line"

# A job is a page of text. Anything larger is another kind of file, or aliases that multiply.
MAX_BYTES = 1_000_000
MAX_NODES = 20_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written, as shown to users, and its line if it has one (to sort by)."""

    text: str
    line: int = 0

    @property
    def short(self) -> str:
        return f"line {self.line}" if self.line else self.text.removesuffix(COMMAND_LINE)


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one source, and the place of each key path among them."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Origin] = field(default_factory=dict)

    def place(self, path: Sequence[str]) -> Origin:
        """The place of the key, or of the nearest key above it."""
        for length in range(len(path), -1, -1):
            if (found := self.places.get(tuple(path[:length]))) is not None:
                return found
        return Origin("job")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a job, where it is, and what to write instead."""

    place: Origin
    what: str
    fix: str


def error_of(problems: Sequence[Problem]) -> AllranksError:
    """All problems as one error, in the order of the file."""
    ordered = sorted(problems, key=lambda problem: problem.place.line)
    what = [f"{problem.place.text}: {problem.what}" for problem in ordered]
    if len(ordered) == 1:
        return AllranksError(what[0], fix=ordered[0].fix)
    # Aligned with the text after `fix:`, so that several fixes read as a list.
    fixes = [f"{problem.place.short}: {problem.fix}" for problem in ordered]
    return AllranksError("\n".join(what), fix="\n       ".join(fixes))


class Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars: `1e-3` is a number, `off` and `1:30:00` are text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - as PyYAML declares it


class Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes Unicode's line breaks unquoted, and reads them back as spaces.
    style = '"' if re.search("[\r\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)

_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALARS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
)
for _name, _pattern, _first in _SCALARS:
    _tag, _regexp = f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$")
    Loader.add_implicit_resolver(_tag, _regexp, _first)
    Dumper.add_implicit_resolver(_tag, _regexp, _first)


def _construct_number(loader: Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    try:
        if node.tag.endswith(":int"):
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        return float(re.sub(r"\.(?=[in])", "", text.lower()))  # .inf, .nan
    except ValueError as error:
        raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None


# Dates, sets and binary data do not belong in a job: their tags are errors.
Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "str", "seq", "map")
}
for _name in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _construct_number)


def parse_value(text: str) -> tuple[Any, list[tuple[KeyPath, int]]]:
    """A YAML document and the line of every key path in it. Raises yaml.YAMLError."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        lines = list(_key_lines(node, (), [], [MAX_NODES]))
        return loader.construct_document(node), lines
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None
    finally:
        loader.dispose()


def _key_lines(
    node: yaml.Node, path: KeyPath, parents: list[yaml.Node], left: list[int]
) -> Iterator[tuple[KeyPath, int]]:
    """The line of every key, from nodes: values no longer show duplicate keys and lines."""
    left[0] -= 1
    if node in parents or left[0] < 0:
        problem = "an alias refers to itself" if node in parents else "it has too many values"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    inside = [*parents, node]
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_lines(item, (*path, str(index)), inside, left)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        mark = key.start_mark
        if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
            written = f"key {key.value}" if isinstance(key, yaml.ScalarNode) else "key"
            problem = f"the {written} is not text; write it in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if key.value in seen:
            problem = f"the key {key.value} is already on line {seen[key.value]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        seen[key.value] = mark.line + 1
        yield (*path, key.value), mark.line + 1
        yield from _key_lines(value, (*path, key.value), inside, left)


def read_file(path: Path, *, resolved: bool = False) -> Layer:
    """A job file as written. Raises AllranksError with the line that cannot be read.

    `resolved`: from a run's folder, where only a regular file is opened.
    """
    text = _read_text(path, open_file if resolved else open_named)
    try:
        values, lines = parse_value(text)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, text, error) from None
    except yaml.YAMLError as error:  # a control character: it has no mark, only a position
        start = text[: getattr(error, "position", 0)]
        raise AllranksError(
            f"{path}:{start.count(chr(10)) + 1}: {str(error).splitlines()[0]}",
            fix="remove that character",
        ) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else f'the value "{values}"'
        raise AllranksError(
            f"{path}:1: a job file contains keys and values, not {kind}",
            fix="write `key: value` lines, or let `allranks init` write a file to start from",
        )
    places = {key: Origin(f"{path}:{line}", line) for key, line in lines}
    return Layer(values, {(): Origin(str(path)), **places})


def _read_text(path: Path, opened: Callable[[Path], BinaryIO]) -> str:
    start_from = "or let `allranks init` write a job.yaml to start from"
    try:
        with opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise AllranksError(
            f"there is no job file {path}", fix=f"name one that exists, {start_from}"
        ) from None
    except IsADirectoryError:
        inside = path / "job.yaml"
        fix = f"write {inside}" if inside.is_file() else f"name a YAML file, {start_from}"
        raise AllranksError(f"{path} is a folder, not a job file", fix=fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AllranksError(
            f"the job file {path} cannot be read: {reason}", fix="make it readable"
        ) from None
    if b"\0" in data or len(data) > MAX_BYTES:
        raise AllranksError(
            f"{path} is not a job file: it is binary, or larger than {MAX_BYTES} bytes",
            fix=f"name a YAML file in UTF-8, {start_from}",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise AllranksError(
            f"{path}:{line}:{column}: the byte {data[error.start]:#04x} is not UTF-8",
            fix="save the file as UTF-8",
        ) from None


def _syntax_error(path: Path, text: str, error: yaml.MarkedYAMLError) -> AllranksError:
    mark = error.problem_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    written = [*text.splitlines(), ""][line - 1] if line <= len(text.splitlines()) else ""
    if "'\\t'" in str(error.problem) or "\t" in written[: len(written) - len(written.lstrip())]:
        return AllranksError(
            f"{path}:{line}:{column}: YAML does not allow a tab here",
            fix="indent with spaces",
        )
    context = f" {error.context}" if error.context else ""
    return AllranksError(
        f"{path}:{line}:{column}: not valid YAML{context}: {error.problem}",
        fix=f"correct line {line}: {written.strip()}" if written.strip() else f"see line {line}",
    )


def read_overrides(overrides: Sequence[str]) -> Layer:
    """A layer of `key.path=value` arguments; later ones win. Raises AllranksError."""
    layer = Layer()
    problems: list[Problem] = []
    for text in overrides:
        place = Origin(text + COMMAND_LINE)
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            swapped = key.replace(":", "=", 1) if ":" in key else f"{key}=VALUE"
            fix = f"write {swapped}" if not equals and key else "write key=value or key.path=value"
            problems.append(Problem(place, "an override is key.path=value", fix))
            continue
        try:
            value, lines = parse_value(written)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            fix = f"write {key}=VALUE with a YAML value, in quotes if it has brackets or colons"
            problems.append(Problem(place, f"the value is not valid YAML: {reason}", fix))
            continue
        below = value
        for part in reversed(path):
            below = {part: below}
        places = [path[:length] for length in range(1, len(path) + 1)]
        places += [path + inner for inner, _ in lines]
        _merge_into(layer.values, below)
        layer.places.update({inner: place for inner in places if inner})
    if problems:
        raise error_of(problems)
    return layer


def merge(layers: Sequence[Layer], sections: Sequence[str]) -> Layer:
    """Later layers over earlier ones, key by key.

    A section that is null (all its lines commented out) says nothing.
    """
    merged = Layer()
    for layer in layers:
        said = {
            key: value
            for key, value in layer.values.items()
            if not (value is None and key in sections)
        }
        for pair in EXCLUSIVE:
            if any(said.get(key) is not None for key in pair):
                for key in pair:
                    merged.values.pop(key, None)
        _merge_into(merged.values, said)
        merged.places.update(layer.places)
    return merged


def _merge_into(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        below = values.get(key)
        if isinstance(value, dict):
            # Always a copy, since later layers are written into it.
            values[key] = dict(below) if isinstance(below, dict) else {}
            _merge_into(values[key], value)
        else:
            values[key] = value
