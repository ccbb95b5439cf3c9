"""Commands as rows of a table: loaded when typed, their help pages, and which options go together.

A row is enough for `allranks --help`; the module of a command is imported when it is typed.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

WIDEST = 100  # characters: longer lines are hard to read
WIDEST_NAME = 26
Function = TypeVar("Function", bound=Callable[..., Any])

_script: list[list[str]] = []
_typed: list[str] = []
_given: dict[str, str] = {}  # parameters of the command that were typed, and how they are written


@dataclass(frozen=True, slots=True)
class Row:
    """One command, or one group of commands, of the table."""

    name: str
    panel: str  # of the help page that lists it
    line: str  # what it does
    function: str = ""  # module:function, the module being one of allranks.cli
    _: KW_ONLY
    takes_script: bool = False  # after a lone `--`
    rows: tuple[Row, ...] = ()  # of a group


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only with, or only without, another parameter."""

    other: str  # a parameter, or parameter=value
    options: tuple[str, ...]
    together: bool

    def check(self, ctx: Any, given: dict[str, str], names: dict[str, str]) -> None:
        name, _, value = self.other.partition("=")
        is_there = str(ctx.params.get(name)) == value if value else name in given
        if is_there == self.together:
            return
        shown = f"{names[name]} {value}" if value else names[name]
        if is_there:
            refuse(self.options, f"with {shown}")
        else:
            refuse(self.options, f"without {shown}", fix=f"add {shown}")


def only_with(other: str, *options: str) -> Callable[[Function], Function]:
    """Refuse these options where `other`, which they are for, was not typed."""
    return _with_rule(Rule(other, options, together=True))


def never_with(other: str, *options: str) -> Callable[[Function], Function]:
    """Refuse these options beside `other`, with which they would have no effect."""
    return _with_rule(Rule(other, options, together=False))


def _with_rule(rule: Rule) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        function.__dict__["rules"] = [rule, *function.__dict__.get("rules", [])]
        return function

    return decorate


def refuse(options: Sequence[str], where: str, *, fix: str = "") -> None:
    """Refuse what was typed of these options, since it has no effect there.

    `fix`: what gives them an effect.
    """
    from allranks.errors import AllranksError

    shown = " and ".join(_given[name] for name in options if name in _given)
    if shown:
        has = "have" if " and " in shown else "has"
        fixes = [*([fix] if fix else []), f"leave out {shown}"]
        raise AllranksError(f"{shown} {has} no effect {where}", fix=", or ".join(fixes))


def keep_typed(words: list[str], script: list[str] | None) -> None:
    """What was typed: before a lone `--`, and after it, if there was one."""
    _typed[:] = words
    _script[:] = [] if script is None else [script]


def typed_words() -> list[str]:
    return [*_typed]


def typed_script() -> list[str] | None:
    """The user's own command, after a lone `--`; None if there was no `--`."""
    return _script[0] if _script else None


class Page:
    """The help page of a command or a group: the same with every version of typer."""

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        pieces = ["[OPTIONS]"]
        for param in self.get_params(ctx):
            if isinstance(param, TyperArgument):
                name = name_of(param)
                pieces.append(name if param.required else f"[{name}]")
        return [*pieces, *(["COMMAND"] if isinstance(self, TyperGroup) else [])]

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx))


class Command(Page, TyperCommand):
    """A command that refuses options without effect."""

    row: Row

    def invoke(self, ctx: Any) -> Any:
        names = {param.name: name_of(param).removesuffix("...") for param in self.params}
        _given.clear()
        _given.update({name: shown for name, shown in names.items() if is_typed(ctx, name)})
        if _script and not self.row.takes_script:
            _given["--"] = "what follows --"
            refuse(["--"], f"with {ctx.command_path}")
        for rule in getattr(self.callback, "rules", []):
            rule.check(ctx, _given, names)
        return super().invoke(ctx)


class Commands(Page, TyperGroup):
    """A group of commands, of which one is loaded when it is typed."""

    table: ClassVar[tuple[Row, ...]] = ()

    def __init__(self, *, rows: tuple[Row, ...] = (), **given: Any) -> None:
        super().__init__(**given)
        self.rows = {row.name: row for row in rows or self.table}
        self.commands = {
            row.name: TyperCommand(row.name, short_help=row.line, rich_help_panel=row.panel)
            for row in self.rows.values()
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            print(self.get_help(ctx))
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.load(name or ""), rest

    def load(self, name: str) -> Command | Commands:
        """The command itself, with its module."""
        row = self.rows[name]
        if row.rows:
            return Commands(name=name, rows=row.rows, help=row.line)
        module, _, function = row.function.partition(":")
        alone = typer.Typer(add_completion=False)
        callback = getattr(import_module(f"allranks.cli.{module}"), function)
        more = inspect.getdoc(callback)
        text = f"{row.line}\n\n{more}" if more else row.line
        alone.command(name, cls=Command, help=text)(callback)
        command = typer.main.get_command(alone)
        assert isinstance(command, Command)
        command.row = row
        return command


def is_typed(ctx: Any, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    is_empty = ctx.params.get(name) in (None, (), [])  # arguments that may be several
    return source is not None and source.name == "COMMANDLINE" and not is_empty


def name_of(param: Any) -> str:
    """A parameter as it is typed: `--layout`, `RUN`. Further long spellings are older ones."""
    if not isinstance(param, TyperArgument):
        return next(str(opt) for opt in param.opts if opt.startswith("--"))
    return (param.metavar or param.name.upper()) + ("..." if param.nargs == -1 else "")


def help_page(command: Any, ctx: Any) -> str:
    """Usage, what it does, and sections of names with what they mean."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    sections: dict[str, list[tuple[str, str]]] = {}
    if isinstance(command, Commands):
        for row in command.rows.values():
            sections.setdefault(row.panel, []).append((row.name, row.line))
    for param in command.get_params(ctx):
        is_argument = isinstance(param, TyperArgument)
        value = "" if is_argument or param.is_flag else " " + (param.metavar or param.name.upper())
        short = [] if is_argument else [opt for opt in param.opts if not opt.startswith("--")]
        names = ", ".join([*short, name_of(param)])
        title = "Arguments" if is_argument else "Options"
        sections.setdefault(title, []).append((names + value, about(param)))
    names_width = max(len(name) for rows in sections.values() for name, _ in rows)
    left = min(WIDEST_NAME, names_width) + 4
    first, _, more = (command.help or "").partition("\n\n")
    paragraphs = [command.get_usage(ctx), textwrap.fill(first, width), *([more] if more else [])]
    for title, rows in sections.items():
        lines = [line for row in rows for line in folded(*row, left, width)]
        paragraphs.append("\n".join([bold(title), *lines]))
    return "\n\n".join(paragraphs) + "\n"


def about(param: Any) -> str:
    """The help of a parameter, its default, and the variable that can set it."""
    notes = []
    is_flag = not isinstance(param, TyperArgument) and param.is_flag
    if not is_flag and param.show_default and param.default not in (None, (), []):
        notes.append(f"default: {param.default}")
    if param.envvar:
        notes.append(f"or as ${param.envvar} says")
    return " ".join([param.help or "", *([f"({', '.join(notes)})"] if notes else [])]).strip()


def folded(name: str, text: str, left: int, width: int) -> Iterator[str]:
    """A name and what it means, in two columns."""
    lines = textwrap.wrap(text, max(20, width - left), break_on_hyphens=False) or [""]
    if len(name) > left - 4:
        yield f"  {name}"
    else:
        yield f"  {name:{left - 2}}{lines.pop(0)}".rstrip()
    yield from (" " * left + line for line in lines)


def bold(text: str) -> str:
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR")
    return text if is_plain else f"\033[1m{text}\033[0m"
