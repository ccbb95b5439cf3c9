"""Commands that start ranks themselves: torchrun and the like, and what to type instead.

allranks starts the ranks. If it started a launcher, every rank of the layout would start a whole
training of its own, and all of them would record the same ranks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.layout import Layout

PYTHON = r"(?:python|pypy)[\d.]*"
# The commands in a shell's line, and what is between them: not what is in quotes.
COMMANDS = re.compile(
    r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\;&|\n])+|[;&|\n]+|['"\\]""", re.DOTALL
)
SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
# Programs that start another: how many words come before it, and which options take a value.
WRAPPERS = {
    "env": (0, "-u --unset -C --chdir"),
    "nice": (0, "-n --adjustment"),
    "ionice": (0, "-c -n --class --classdata"),
    "chrt": (1, "-T -P -D"),
    "time": (0, "-f -o --format --output"),
    "timeout": (1, "-k -s --kill-after --signal"),
    "stdbuf": (0, "-i -o -e --input --output --error"),
    "numactl": (0, "-i -w -p -m -N -C -P --interleave --membind --cpunodebind --physcpubind"),
    "taskset": (1, ""),
    **dict.fromkeys(("nohup", "setsid", "if", "then", "else", "do", "!"), (0, "")),
    "exec": (0, "-a"),
    "sudo": (0, "-u -g"),
    "uv": (1, "--with --python -p --extra --group --project --directory --env-file --index"),
    "poetry": (1, "-C -P --directory --project"),
    "pdm": (1, "-p --project"),
    "pipenv": (1, ""),
    "hatch": (1, "-e --env"),
    "rye": (1, ""),
    "pixi": (1, "-e --environment --manifest-path"),
    "conda": (1, "-n -p --name --prefix --cwd"),
    "mamba": (1, "-n -p --name --prefix --cwd"),
    "micromamba": (1, "-n -p --name --prefix --cwd"),
    "apptainer": (2, "-B --bind -H --home --env --env-file --overlay --pwd"),
    "singularity": (2, "-B --bind -H --home --env --env-file --overlay --pwd"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How a launcher is called: what its options say, and where the script begins."""

    starts: str  # "python": a Python script follows; "program": any program does
    nodes: str = ""  # options that give the number of nodes,
    per_node: str = ""  # of ranks per node,
    ranks: str = ""  # of all ranks
    hosts: str = ""  # comma-separated lists of hosts
    flags: str = ""  # options without a value
    two_values: str = ""
    subcommand: str = ""  # that must follow


TORCHRUN = Launcher(
    starts="python",
    nodes="--nnodes",
    per_node="--nproc-per-node",
    flags="--standalone --use-env --run-path --no-python --module -m --virtual-local-rank",
)
MPI = Launcher(
    starts="program",
    ranks="-n -np --np -c",
    per_node="-npernode --npernode -ppn -perhost -N",
    hosts="-H -host --host -hosts --hosts",
    flags="--allow-run-as-root --oversubscribe --bind-to-none --bycore --bynode --byslot "
    "--tag-output -tag-output --display-map --report-bindings -q --quiet -v --verbose "
    "--nolocal --noversubscribe -oversubscribe -prepend-rank -l",
    two_values="--mca -mca --gmca -gmca -genv -env",
)
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "accelerate": Launcher(
        starts="python",
        subcommand="launch",
        nodes="--num-machines",
        ranks="--num-processes",
        flags="--cpu --multi-gpu --tpu --use-deepspeed --use-fsdp --use-megatron-lm --use-xpu "
        "--use-mps-device --ipex --same-network --debug --quiet -q --no-python --module -m "
        "--downcast-bf16 --enable-cpu-affinity --use-parallelism-config",
    ),
    "deepspeed": Launcher(
        starts="python",
        nodes="--num-nodes",
        per_node="--num-gpus --num-accelerators",
        flags="--no-python --module --no-local-rank --no-ssh --no-ssh-check --force-multi "
        "--save-pid --bind-cores-to-rank --elastic-training",
    ),
    "composer": Launcher(
        starts="python",
        ranks="--world-size",
        per_node="-n --nproc",
        flags="-v --verbose -m --module-mode -c --command-mode",
    ),
    "lightning": Launcher(
        starts="python",
        subcommand="run",
        nodes="--num-nodes",
        per_node="--devices",
    ),
    "horovodrun": Launcher(
        starts="program",
        ranks="-np --num-proc -n",
        hosts="-H --hosts",
        flags="--verbose --gloo --mpi --disable-cache --hierarchical-allreduce",
    ),
    "srun": Launcher(
        starts="program",
        nodes="-N --nodes",
        per_node="--ntasks-per-node",
        ranks="-n --ntasks",
        flags="-l -u -E -K -O -Q -v -s -X -k --label --unbuffered --pty --exact --overlap "
        "--exclusive --overcommit --quiet --verbose --kill-on-bad-exit --no-kill --oversubscribe "
        "--contiguous --spread-job --preserve-env",
    ),
    "mpirun": MPI,
}
SAME = {"mpiexec": "mpirun", "orterun": "mpirun", "prterun": "mpirun", "fabric": "lightning"}
SAME["lightning_fabric"] = "lightning"
# What is run as `python -m MODULE`: the launcher that it is, and whether its subcommand follows.
MODULES = {
    "torch.distributed.run": ("torchrun", False),
    "torch.distributed.launch": ("torchrun", False),
    "accelerate.commands.launch": ("accelerate", False),
    "accelerate.commands.accelerate_cli": ("accelerate", True),
    "accelerate": ("accelerate", True),
    "deepspeed": ("deepspeed", False),
    "deepspeed.launcher.runner": ("deepspeed", False),
    "composer": ("composer", False),
    "composer.cli.launcher": ("composer", False),
    "horovod.runner": ("horovodrun", False),
    "horovod.runner.launch": ("horovodrun", False),
    "lightning": ("lightning", True),
    "lightning.fabric": ("lightning", True),
    "lightning.fabric.cli": ("lightning", True),
    "lightning_fabric": ("lightning", True),
    "lightning_fabric.cli": ("lightning", True),
}


@dataclass(slots=True)
class Meant:
    """A command without the launcher in it, and how many ranks the launcher was told to start."""

    launcher: str  # as it was written: torchrun, accelerate launch
    command: list[str] = field(default_factory=list)
    nodes: int | None = None
    per_node: int | None = None
    ranks: int | None = None

    def layout(self, typed: Layout) -> Layout:
        """The intended layout: what the launcher does not specify is as it was typed."""
        nodes, per_node = self.nodes, self.per_node
        if self.ranks and per_node:
            nodes = nodes or max(1, self.ranks // per_node)
        elif self.ranks:
            nodes = nodes or (1 if self.ranks % typed.nodes else typed.nodes)
            per_node = max(1, self.ranks // nodes)
        nodes, per_node = nodes or typed.nodes, per_node or typed.gpus
        same = (nodes, per_node) == (typed.nodes, typed.gpus)
        return typed if same else Layout(nodes, per_node)

    def around(self, outer: Meant) -> Meant:
        """This launcher, started by another one, usually once per node."""
        self.launcher = f"{outer.launcher} ... {self.launcher}"
        self.nodes = self.nodes or outer.nodes or outer.ranks
        return self


def find_launcher(words: Sequence[str]) -> Meant | None:
    """What a command that starts ranks itself is meant to do; None for any other command."""
    begin = skip_wrappers(words)
    before, rest = list(words[:begin]), list(words[begin:])
    if rest and os.path.basename(rest[0]) in SHELLS:
        return in_shell(before, rest)
    called = launcher_of(rest) if rest else None
    if called is None:
        return None
    launcher, num_words, python = called
    meant = Meant(" ".join([os.path.basename(rest[0]), *rest[1:num_words]]))
    meant.command = read_options(launcher, rest[num_words:], meant, python)
    inner = find_launcher(meant.command)
    meant = inner.around(meant) if inner is not None else meant
    meant.command = [*before, *meant.command]
    return meant


def launcher_of(words: Sequence[str]) -> tuple[Launcher, int, str] | None:
    """The launcher that a command begins with, in how many words, and the Python to call."""
    program = os.path.basename(words[0])
    if re.fullmatch(PYTHON, program):
        at = module_of(words)
        name, has_subcommand = MODULES.get(words[at], ("", False)) if at else ("", False)
        num_words, python = (at or 0) + 1, words[0]
    else:
        name = program.partition(".")[0]  # mpiexec.hydra
        name, has_subcommand, num_words, python = SAME.get(name, name), True, 1, "python"
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        return None
    if launcher.subcommand and has_subcommand:
        if [*words, ""][num_words] != launcher.subcommand:
            return None
        num_words += 1
        num_words += [*words, ""][num_words] == "model"  # of Lightning's older releases
    return launcher, num_words, python


def skip_wrappers(words: Sequence[str]) -> int:
    """Where the program started by `env X=1`, `nice`, `uv run` and the like begins."""
    at = 0
    while at < len(words):
        while at < len(words) and re.match(r"[A-Za-z_]\w*=", words[at]):
            at += 1
        wrapper = WRAPPERS.get(os.path.basename(words[at])) if at < len(words) else None
        if wrapper is None:
            break
        positional, valued = wrapper
        at += 1
        while at < len(words) and (positional or words[at].startswith("-") or "=" in words[at]):
            if words[at] == "--":
                at += 1
                break
            if words[at] in valued.split():
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


def in_shell(before: list[str], words: list[str]) -> Meant | None:
    """What is meant by `bash -c "..."` with a launcher in it; the rest of it stays as it is."""
    at = next((n for n, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
    if at is None or at + 1 >= len(words):
        return None
    found: Meant | None = None
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


def read_options(launcher: Launcher, words: list[str], meant: Meant, python: str) -> list[str]:
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


def is_script(word: str) -> bool:
    return word.endswith(".py") or re.fullmatch(PYTHON, os.path.basename(word)) is not None


def count(launcher: Launcher, option: str, value: str, meant: Meant) -> None:
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


def launcher_in_script(words: Sequence[str]) -> tuple[str, Meant] | None:
    """A file named in a command whose text starts ranks, and what is meant there."""
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
