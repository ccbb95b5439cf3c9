"""Commands that start ranks themselves: torchrun and the like, and what to type instead.

allranks starts the ranks. If it started a launcher, every rank of the layout would start a whole
training of its own, and all of them would record the same ranks. A launcher is recognised by its
name (launchers.yaml) before the run starts, and if that fails, by what the run then records.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from allranks.job.job import Job
from allranks.layout import Layout
from allranks.run.folder import RunDir
from allranks.run.stacks import PROC, rank_of

# The commands in a shell's line, and what is between them: not what is in quotes.
COMMANDS = re.compile(
    r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\;&|\n])+|[;&|\n]+|['"\\]""", re.DOTALL
)
SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
LOOK_SECONDS = 1.0  # between two looks for a rank that two processes record


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How a launcher is called; launchers.yaml explains the fields."""

    programs: str
    starts: str
    modules: str = ""
    commands: str = ""
    subcommand: str = ""
    nodes: str = ""
    per_node: str = ""
    ranks: str = ""
    hosts: str = ""
    flags: str = ""
    two_values: str = ""


@cache
def read_tables() -> tuple[list[Launcher], dict[str, dict[str, Any]]]:
    """The launchers and the wrappers of launchers.yaml."""
    content = yaml.safe_load(Path(__file__).with_name("launchers.yaml").read_text())
    return [Launcher(**fields) for fields in content["launchers"]], content["wrappers"]


@dataclass(slots=True)
class Replacement:
    """What to run in place of a launcher, and how many ranks the launcher was told to start."""

    launcher: str  # as it was written: torchrun, accelerate launch
    command: list[str] = field(default_factory=list)
    nodes: int | None = None
    per_node: int | None = None
    ranks: int | None = None

    def layout(self, typed: Layout) -> Layout:
        """The layout that the launcher was told; what it does not say is as `typed`."""
        nodes, per_node = self.nodes, self.per_node
        if self.ranks and per_node:
            nodes = nodes or max(1, self.ranks // per_node)
        elif self.ranks:
            nodes = nodes or (1 if self.ranks % typed.nodes else typed.nodes)
            per_node = max(1, self.ranks // nodes)
        nodes, per_node = nodes or typed.nodes, per_node or typed.gpus
        same = (nodes, per_node) == (typed.nodes, typed.gpus)
        return typed if same else Layout(nodes, per_node)

    def around(self, outer: Replacement) -> Replacement:
        """This launcher, started by another one, usually once per node."""
        self.launcher = f"{outer.launcher} ... {self.launcher}"
        self.nodes = self.nodes or outer.nodes or outer.ranks
        return self


def find_launcher(words: Sequence[str]) -> Replacement | None:
    """What to run in place of a command that starts ranks itself; None for any other command."""
    begin = skip_wrappers(words)
    before, rest = list(words[:begin]), list(words[begin:])
    if rest and os.path.basename(rest[0]) in SHELLS:
        return in_shell(before, rest)
    called = launcher_of(rest) if rest else None
    if called is None:
        return None
    launcher, num_words, python = called
    meant = Replacement(" ".join([os.path.basename(rest[0]), *rest[1:num_words]]))
    meant.command = read_options(launcher, rest[num_words:], meant, python)
    inner = find_launcher(meant.command)
    meant = inner.around(meant) if inner is not None else meant
    meant.command = [*before, *meant.command]
    return meant


def launcher_of(words: Sequence[str]) -> tuple[Launcher, int, str] | None:
    """The launcher that a command begins with, in how many words, and the Python to call."""
    name, num_words, python = os.path.basename(words[0]).partition(".")[0], 1, "python"
    is_module = is_python(words[0])
    if is_module:
        at = module_of(words)
        if at is None:
            return None
        name, num_words, python = words[at], at + 1, words[0]
    for launcher in read_tables()[0]:
        if is_module and name in launcher.modules.split():
            return launcher, num_words, python
        if name in (launcher.commands if is_module else launcher.programs).split():
            follow = [*words[num_words:], "", ""]
            if launcher.subcommand and follow[0] != launcher.subcommand:
                return None
            if launcher.subcommand:
                num_words += 2 if follow[1] == "model" else 1  # of Lightning's older releases
            return launcher, num_words, python
    return None


def skip_wrappers(words: Sequence[str]) -> int:
    """Where the program started by `env X=1`, `nice`, `uv run` and the like begins."""
    at = 0
    while at < len(words):
        while at < len(words) and re.match(r"[A-Za-z_]\w*=", words[at]):
            at += 1
        wrapper = read_tables()[1].get(os.path.basename(words[at])) if at < len(words) else None
        if wrapper is None:
            break
        positional, valued = wrapper.get("words", 0), wrapper.get("options", "").split()
        at += 1
        while at < len(words) and (positional or words[at].startswith("-") or "=" in words[at]):
            if words[at] == "--":
                at += 1
                break
            if words[at] in valued:
                at += 1
            elif not words[at].startswith("-") and "=" not in words[at]:
                positional -= 1
            at += 1
    return at


def module_of(words: Sequence[str]) -> int | None:
    """Where the module's name is in `python -u -m MODULE`; None if a script follows."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if re.fullmatch(r"-[a-zA-Z]*m", words[at]):
            return at + 1 if at + 1 < len(words) else None
        at += 2 if words[at] in ("-X", "-W") else 1
    return None


def in_shell(before: list[str], words: list[str]) -> Replacement | None:
    """What to run in place of `bash -c "..."` with a launcher in it; the rest stays as it is."""
    at = next((n for n, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
    if at is None or at + 1 >= len(words):
        return None
    found: Replacement | None = None
    parts = COMMANDS.findall(words[at + 1])
    for number, part in enumerate(parts):
        meant = find_launcher(raw_words(part))
        if meant is not None:
            spaces = part[: -len(part.lstrip())], part[len(part.rstrip()) :]
            parts[number] = " ".join(meant.command).join(spaces)
            found = found or meant
    if found is not None:
        found.command = [*before, *words[: at + 1], "".join(parts), *words[at + 2 :]]
    return found


def raw_words(text: str) -> list[str]:
    """The words of a shell command, with their quotes."""
    try:
        lexer = shlex.shlex(text, posix=False)
        lexer.whitespace_split, lexer.commenters = True, "#"
        return list(lexer)
    except ValueError:  # a quote that is not closed: a part of something larger
        return text.split()


def read_options(
    launcher: Launcher, words: list[str], meant: Replacement, python: str
) -> list[str]:
    """Note what the launcher's own options say; return the command that it would start."""
    flags = launcher.flags.split()
    at, is_module, is_program = 0, False, launcher.starts == "program"
    while at < len(words) and words[at].startswith(("-", "$")):
        if words[at].startswith("$") and not any(map(is_script, words[at:])):
            break
        option, equals, value = words[at].partition("=")
        plain = option if len(option) == 2 else option.replace("_", "-")
        at += 1
        if plain == "--":
            break
        if launcher.starts == "python":
            is_module |= plain in ("-m", "--module", "--module-mode")
            is_program |= plain in ("--no-python", "--command-mode")
            is_program |= plain == "-c" and "-c" in flags
        if plain in flags or plain.startswith("$"):  # a shell variable that holds options
            continue
        if not equals and launcher.starts == "program" and re.fullmatch(r"-[nNc]\d+", plain):
            plain, value, equals = plain[:2], plain[2:], "="
        if not equals:
            if at < len(words) and is_script(words[at]):
                continue  # a flag that we do not know
            value = words[at] if at < len(words) else ""
            at += 2 if plain in launcher.two_values.split() else 1
        count(launcher, plain, value, meant)
    rest = words[at:]
    if is_program or not rest:
        return rest
    return [python, *(["-m"] if is_module else []), *rest]


def is_python(word: str) -> bool:
    return re.fullmatch(r"(?:python|pypy)[\d.]*", os.path.basename(word)) is not None


def is_script(word: str) -> bool:
    return word.endswith(".py") or is_python(word)


def count(launcher: Launcher, option: str, value: str, meant: Replacement) -> None:
    """Note a number of nodes or ranks, where the option gives one."""
    if option in launcher.hosts.split():
        meant.nodes = len(value.split(","))
    per_host = re.fullmatch(r"ppr:(\d+):node.*", value)
    if per_host:
        meant.per_node = int(per_host[1])
    last = value.rpartition(":")[2].rpartition("-")[2]  # --nnodes 1:4
    if not last.isdigit() or int(last) < 1:
        return
    for name in ("nodes", "per_node", "ranks"):
        if option in getattr(launcher, name).split():
            setattr(meant, name, int(last))


def launcher_in_script(words: Sequence[str]) -> tuple[str, Replacement] | None:
    """A file named in a command whose text starts ranks, and what to run there instead."""
    for word in words:
        try:
            text = Path(word).read_text()[:100_000] if not word.endswith(".py") else ""
        except (OSError, ValueError):
            continue
        for line in re.sub(r"\\\n", " ", text).splitlines():
            for part in COMMANDS.findall(line):
                meant = find_launcher(raw_words(part))
                if meant is not None:
                    return word, meant
    return None


def spell(words: Sequence[str]) -> str:
    """A command as it is typed; a placeholder such as {nodes} needs no quotes."""
    plain = r"[\w@%+=:,./{}-]+"
    return " ".join(w if re.fullmatch(plain, w) else shlex.quote(w) for w in words)


def with_layout(typed: Sequence[str], layout: Layout) -> list[str]:
    """Words of `allranks run` or `submit` with another layout; unchanged if they name several."""
    words = list(typed) or ["run"]
    if words[0] == "bench" or any(w.startswith(("--race", "--ladder")) for w in words):
        return words
    at = next((n for n, w in enumerate(words) if w.partition("=")[0] == "--layout"), None)
    if at is None:
        return [words[0], "--layout", str(layout), *words[1:]]
    after = words[at + 1 :] if "=" in words[at] else words[at + 2 :]
    return [*words[:at], "--layout", str(layout), *after]


class OwnRanksWatch:
    """Looks for the file that a probe leaves when it finds its rank recorded by another process."""

    def __init__(self, run: RunDir, job: Job) -> None:
        self.run = run
        self.job = job
        self._next_look = 0.0

    def must_end(self, attempt: int) -> bool:
        """Whether the ranks must end now; if so, everything that they started is killed here."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        if self._twice_recorded(attempt) is None:
            return False
        kill_all(self.run, attempt)
        return True

    def end(self, attempt: int) -> dict[str, Any] | None:
        """The end event for every rank of such an attempt; None if nothing is wrong."""
        layout, twice = self.job.layout, self._twice_recorded(attempt)
        foreign = [rank for rank in self.run.ranks(attempt) if rank >= layout.ranks]
        if twice is not None:
            return end_of_own_ranks(f"two processes recorded rank {twice}", self.job)
        if foreign:
            what = f"rank {foreign[0]} was recorded, but layout {layout} does not have it"
            return end_of_own_ranks(what, self.job)
        return None

    def _twice_recorded(self, attempt: int) -> int | None:
        try:
            return int(json.loads(self.run.twice(attempt).read_bytes())["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def end_of_own_ranks(seen: str, job: Job) -> dict[str, Any]:
    """The end event of a rank whose command has started ranks itself."""
    inside = launcher_in_script(job.argv) if job.command is not None else None
    who = "the command starts ranks itself, besides those that allranks starts"
    fix = (
        "let only allranks start ranks: no torchrun, mpirun or mp.spawn in what it runs. "
        "If you want a second training run, start it with ALLRANKS_PROBE=off in its environment"
    )
    if inside is not None:
        where, meant = inside
        who = f"the command starts ranks itself ({meant.launcher} in {where})"
        fix = (
            f"write {' '.join(meant.command)} in {where} in place of {meant.launcher}, "
            f"and start it with --layout {meant.layout(job.layout)}"
        )
    error = {"what": f"{seen}: {who}", "fix": fix, "own_ranks": True}
    return {"state": "failed", "exit": 1, "error": error}


def kill_all(run: RunDir, attempt: int, proc: Path = PROC) -> None:
    """Kill every process of an attempt on this machine: ranks of another launcher outlive it."""
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, LookupError):
            if rank_of(folder / "environ", run.name, attempt) is not None:
                os.kill(int(folder.name), signal.SIGKILL)
