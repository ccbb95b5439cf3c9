"""Commands as rows of a table: loaded when typed, their help pages, and which options go together.

A row is enough for `allranks --help`; the module of a command is imported when it is typed.
"""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

WIDEST = 100  # characters: longer lines are hard to read
WIDEST_NAME = 26
Function = TypeVar("Function", bound=Callable[..., Any])

_script: list[list[str]] = []
_typed: list[str] = []
_given: dict[str, str] = {}  # parameters of the command that were typed, and how they are written


class Row(NamedTuple):
    """One command, or one group of commands, of the table."""

    name: str  # also that of its function
    module: str  # of allranks.cli
    line: str  # what it does
    panels: Panels = {}  # noqa: RUF012 - of a group, never changed


Panels = Mapping[str, tuple[Row, ...]]  # rows by the title above them on the help page


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only with, or only without, another parameter."""

    other: str  # a parameter, or parameter=value
    options: tuple[str, ...]
    together: bool

    def apply(self, ctx: Any, given: dict[str, str], names: dict[str, str]) -> None:
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


def takes_script(function: Function) -> Function:
    """Let the user's own command follow a lone `--`."""
    function.__dict__["takes_script"] = True
    return function


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


def refuse_script(ctx: Any, words: Sequence[str], params: Sequence[Any]) -> None:
    """Refuse a script where a job file is expected, with the command to type instead."""
    options = [param for param in params if not isinstance(param, TyperArgument)]
    is_flag = {opt: getattr(param, "is_flag", True) for param in options for opt in param.opts}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 1 if is_flag.get(words[place], True) else 2
    first, *rest = words[place:] or [""]
    is_script, *others = (word.endswith(".py") and "=" not in word for word in (first, *rest))
    is_program = shutil.which(first) or (any(others) and not os.path.splitext(first)[1])
    is_program = is_program and "=" not in first  # which is a setting
    if not is_script and (not is_program or os.path.exists(first)):
        return
    from allranks.errors import AllranksError

    script = place + [is_script, *others, True].index(True) + 1
    ours, theirs = options_apart(words[script:], is_flag)  # of a launcher's options, none is ours
    command = [*(["python"] if is_script else []), *words[place:script], *theirs]
    raise AllranksError(
        f"{first} is a {'script' if is_script else 'program'}, not a job file",
        fix=f"write {ctx.command_path} {shlex.join([*words[:place], *ours, '--', *command])}",
    )


def options_apart(words: Sequence[str], is_flag: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The command's own options among these words, with their values; and the other words."""
    ours: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, has_value, _ = word.partition("=")
        (ours if name in is_flag else others).append(word)
        if left and not has_value and not is_flag.get(name, True):
            ours.append(left.pop(0))
    return ours, others


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
    """A command that refuses options without effect, and a script that is not after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if hasattr(self.callback, "takes_script") and not _script:
            refuse_script(ctx, args, self.params)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        names = {param.name: name_of(param).removesuffix("...") for param in self.params}
        _given.clear()
        _given.update({name: shown for name, shown in names.items() if is_typed(ctx, name)})
        if _script and not hasattr(self.callback, "takes_script"):
            _given["--"] = "what follows --"
            refuse(["--"], f"with {ctx.command_path}")
        for rule in getattr(self.callback, "rules", []):
            rule.apply(ctx, _given, names)
        return super().invoke(ctx)


class Commands(Page, TyperGroup):
    """A group of commands, of which one is loaded when it is typed."""

    panels: ClassVar[Panels] = {}

    def __init__(self, *, panels: Panels | None = None, **given: Any) -> None:
        super().__init__(**given)
        self.shown = self.panels if panels is None else panels
        self.rows = {row.name: row for rows in self.shown.values() for row in rows}
        self.commands = {name: TyperCommand(name) for name in self.rows}

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
        if row.panels:
            return Commands(name=name, panels=row.panels, help=row.line)
        alone = typer.Typer(add_completion=False)
        callback = getattr(import_module(f"allranks.cli.{row.module}"), name.replace("-", "_"))
        more = inspect.getdoc(callback)
        text = f"{row.line}\n\n{more}" if more else row.line
        alone.command(name, cls=Command, help=text)(callback)
        command = typer.main.get_command(alone)
        assert isinstance(command, Command)
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
        for title, inner in command.shown.items():
            sections[title] = [(row.name, row.line) for row in inner]
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
        notes.append(f"or set ${param.envvar}")
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
