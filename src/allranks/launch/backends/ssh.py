"""Runs on hosts that `ssh` reaches: this process holds the run, each host has a launcher for it.

The user's own ssh is used, with its configuration and keys. Where a host does not see the run's
folder, the folder of the job is copied there with rsync, and what its ranks write is fetched back.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from allranks import __version__
from allranks.errors import AllranksError
from allranks.launch import checks, prepare
from allranks.launch.backends import Draft, Options, local
from allranks.launch.node import AT_ONCE_SECONDS, Outcome, Place, outcome_of
from allranks.launch.prepare import Prepared, Request
from allranks.launch.screen import Screen
from allranks.machine.processes import Signals, output_of
from allranks.run import commits
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.show.numbers import count
from allranks.show.text import clean

is_queue = False
look, stop, suggestions = local.look, local.stop, local.suggestions  # this machine has the run

# ssh must never ask for a password, and must notice within 15 seconds that a host is gone.
ANSWERS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH = ["ssh", *(word for answer in ANSWERS for word in ("-o", answer))]
FETCH_SECONDS = 2.0  # between fetches from hosts that do not share the run's folder
FOLLOW_SECONDS = 5.0  # for the other hosts to end by themselves after one has failed
PASSED_ON = ("ALLRANKS_", "NCCL_", "TORCH_", "OMP_")  # variables that ranks there get, too
# Run on each host: does its Python have allranks, and which port is free there?
PROBE = """import allranks, random, socket, sys
ports = random.sample(range(20000, 30000), 100)
port = next(port for port in ports if socket.socket().connect_ex(("127.0.0.1", port)))
print("allranks", allranks.__version__, port, sys.executable)"""
EACH_PYTHON = f"for python in {shlex.quote(sys.executable)} python3"  # ours, if its disk is shared
NO_ALLRANKS, NO_SSH = 90, 255  # exit codes: our own, and ssh's where there is no connection


@dataclass(frozen=True, slots=True)
class Host:
    """A host as the user names it, and what it answered."""

    name: str
    address: str  # by which the other hosts reach it
    python: str
    port: int  # that is free there


def check(request: Request, options: Options) -> Prepared:
    """The run to start, if there is a host for each node of its layout."""
    checks.check_supported((prepared := prepare.prepare(request)).job)
    hosts_of(prepared, options)
    return prepared


def hosts_of(prepared: Prepared, options: Options) -> tuple[str, ...]:
    """The hosts that were typed, or those of the run so far: one for each node."""
    known = prepared.run.info().get("hosts", []) if prepared.run is not None else []
    hosts, layout = options.hosts or tuple(known), prepared.layout
    if wrong := [host for host in hosts if not re.fullmatch(r"[\w.@:\[\]][\w.@:\[\]-]*", host)]:
        raise AllranksError(f"{wrong[0]!r} is not the name of a host", fix="write --hosts a,b")
    if len(hosts) < layout.nodes or (options.hosts and len(hosts) > layout.nodes):
        named = f"{len(hosts)} ({', '.join(hosts)})" if hosts else "none"
        fix = f"name {layout.nodes} with --hosts"
        if hosts:
            fix += f", or write --layout {len(hosts)}x{layout.gpus}"
        what = f"layout {layout} needs {count(layout.nodes, 'host')}, not {named}"
        raise AllranksError(what, fix=fix)
    return hosts[: layout.nodes]


def draft(prepared: Prepared, options: Options) -> Draft:
    """The command of each rank, and the hosts."""
    found, hosts = local.draft(prepared, options), ", ".join(hosts_of(prepared, options))
    table = {key: {**row, "hosts": hosts} for key, row in found.table.items()}
    return Draft(found.scripts, table, found.remarks)


def start(prepared: Prepared, options: Options) -> Outcome:
    """Run it to its end, with a launcher on each host."""
    assert options.screen and options.signals
    if done := local.finished(prepared, options.screen):
        return done
    with ThreadPoolExecutor(len(names := hosts_of(prepared, options))) as asking:
        hosts = [*asking.map(ask_host, names)]
    place = local.place_of(prepared, options)
    with ExitStack() as held:
        prepared = prepare.hold_run(prepared, held)
        run = prepare.open_run(prepared, backend="ssh")
        run.update_info(lambda info: info.update(hosts=[*names]))
        for remark in [*checks.warnings(prepared.job), *prepared.remarks]:
            options.screen.remark(remark)
        return Head(prepared, run, hosts, place, options.screen, options.signals).run_to_end()


move = start  # `check` has refused a running one


def ask_host(name: str) -> Host:
    """What a host has; raises AllranksError if it cannot be used."""
    tries = f'"$python" -c {shlex.quote(PROBE)} && exit'
    done = call(ssh_to(name, f"{EACH_PYTHON}; do {tries}; done; exit {NO_ALLRANKS}"))
    words = (done.stdout.strip().splitlines() or [""])[-1].split(maxsplit=3)
    install = f"ssh {name} python3 -m pip install allranks=={__version__}"
    if done.returncode == NO_ALLRANKS:
        raise AllranksError(f"host {name} has no Python with allranks", fix=install)
    if done.returncode or len(words) != 4 or words[0] != "allranks":
        said = clean(" ".join(done.stderr.split())) or f"ssh ended with code {done.returncode}"
        fix = f"make `ssh {name} true` work without a password: set up a key, and a Host entry in "
        fix += "~/.ssh/config"
        raise AllranksError(f"host {name} cannot be used: {said}", fix=fix, exit_code=1)
    if words[1] != __version__:
        raise AllranksError(f"host {name} has allranks {words[1]}, not {__version__}", fix=install)
    # The other hosts do not have our ~/.ssh/config, in which it may have another name.
    found = re.search(r"(?m)^hostname (\S+)$", call(["ssh", "-G", "--", name]).stdout)
    return Host(name, found[1] if found else name, words[3], int(words[2]))


def on_nodes(run: RunDir, words: Sequence[str], seconds: float) -> str:
    """What `python WORDS` prints on the hosts of a run, all asked at once."""
    hosts = run.info().get("hosts", [])
    script = f'"$python" -c "import allranks" 2>/dev/null && exec "$python" {shlex.join(words)}'
    commands = [ssh_to(host, f"{EACH_PYTHON}; do {script}; done") for host in hosts]
    with ThreadPoolExecutor(max(1, len(hosts))) as asking:
        return "".join(asking.map(lambda command: output_of(command, seconds) or "", commands))


def ssh_to(host: str, script: str) -> list[str]:
    """The command that runs a line of shell on a host."""
    return [*SSH, "--", host, f"sh -c {shlex.quote(script)}"]


def rsync(*words: str) -> subprocess.CompletedProcess[str]:
    return call(["rsync", "-a", "-e", shlex.join(SSH), *words])


def call(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    except OSError as error:
        what, fix = f"{command[0]} cannot be started: {error.strerror}", f"install {command[0]}"
        raise AllranksError(what, fix=fix) from None


@dataclass
class Head:
    """The launcher on this machine, which holds the run but runs none of its ranks."""

    prepared: Prepared
    run: RunDir
    hosts: Sequence[Host]
    place: Place
    screen: Screen
    signals: Signals
    nodes: dict[Host, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: dict[Host, str] = field(default_factory=dict)  # whose launcher failed, and its last words
    apart: list[Host] = field(default_factory=list)  # that do not share the run's folder

    def run_to_end(self) -> Outcome:
        with NamedTemporaryFile(dir=self.run.path, prefix=".shared-") as marker:
            sees = f"test -e {shlex.quote(marker.name)}"
            self.apart = [host for host in self.hosts if call(ssh_to(host.name, sees)).returncode]
        if self.apart:  # only this machine has whole checkpoints
            self.place = replace(self.place, max_restarts=0)
            names = ", ".join(host.name for host in self.apart)
            self.screen.remark(
                f"the job's folder is copied to {names}, and results are copied back"
            )
        nodes, port = tuple(host.address for host in self.hosts), self.hosts[0].port
        told = {"nodes": nodes, "port": port, **self.place.kept}
        path = prepare.write_attempt(self.prepared, self.run, **told)
        self.screen.follow(self.run, self.prepared.job, 0)
        try:
            for rank, host in enumerate(self.hosts):
                if host in self.apart:
                    self._send(host)
                self._start(host, path, rank)
                if rank == 0 and self.apart:
                    self._share_key()
            self._follow()
        finally:
            for node in self.nodes.values():  # where this is left early: it ends what they run
                node.stdin.close()  # type: ignore[union-attr]  # a pipe
            self._fetch()
            self.screen.finish(max(self.run.attempts(), default=0))
        return self._outcome()

    def _start(self, host: Host, path: Path, rank: int) -> None:
        words = [host.python, "-m", "allranks.launch.remote_node", str(path), str(rank)]
        command = ssh_to(host.name, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}")
        given = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        with (self.run.path / f"ssh-{host.name}.log").open("ab") as log:
            # In a session of its own: a Ctrl-C in the terminal is for this process to pass on.
            self.nodes[host] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        # Not among the words of the command: every user of the host can read those.
        self._tell(host, json.dumps({**given, **self.prepared.variables}))

    def _tell(self, host: Host, line: str) -> None:
        with suppress(OSError):  # it has ended
            os.write(self.nodes[host].stdin.fileno(), line.encode() + b"\n")  # type: ignore[union-attr]

    def _follow(self) -> None:
        """Until all launchers have ended; one that fails ends the others."""
        alive, num_told, until = [*self.nodes], 0, time.monotonic() + FOLLOW_SECONDS
        next_fetch, fetching = 0.0, threading.Thread()
        while alive:
            time.sleep(0.1)
            now = time.monotonic()
            alive = [host for host in alive if self.nodes[host].poll() is None]
            for number in self.signals.received[num_told:]:
                num_told += 1
                self.screen.stopping(number.name)
                for host in alive:
                    self._tell(host, number.name)
            for host, node in self.nodes.items():
                if node.returncode and host not in self.lost and not num_told:
                    said = (self.run.path / f"ssh-{host.name}.log").read_text(errors="replace")
                    self.lost[host] = clean(said.strip().rpartition("\n")[2])
            if not (self.lost or self.signals.at_once):
                until = now + FOLLOW_SECONDS
            for host in alive if now > until else ():
                self._tell(host, "SIGINT\nSIGINT")  # two of them: at once
                if now > until + AT_ONCE_SECONDS:  # it does not hear
                    self.nodes[host].kill()
            if now > next_fetch and not fetching.is_alive():
                fetching, next_fetch = threading.Thread(target=self._fetch), now + FETCH_SECONDS
                fetching.start()
            with suppress(OSError, ValueError):  # a closed pipe, a poor terminal
                self.screen.update(max(self.run.attempts(), default=0))
        fetching.join()

    def _outcome(self) -> Outcome:
        attempt, error = max(self.run.attempts(), default=0), None
        for rank in self.run.ranks(attempt):
            host = self.hosts[rank // self.prepared.layout.gpus]
            if host in self.lost and self.run.end(attempt, rank) is None:
                end = {"error": {"what": f"host {host.name} was lost", "fix": ""}, "exit": 1}
                append_event(self.run.events(attempt, rank), "end", state="failed", **end)
        for host, said in self.lost.items():
            if self.nodes[host].returncode == NO_SSH or not self.run.ranks(attempt):
                what = f"host {host.name} was lost in attempt {attempt}: {said}"
                fix = f"continue with {self.run.resume_command}; for other hosts, add --hosts A,B"
                error = AllranksError(what, fix=fix, exit_code=1)
        state = "failed" if error else self.run.ended_state()
        return outcome_of(self.run, self.prepared, self.place, self.signals, state, error)

    def _send(self, host: Host) -> None:
        """Copy the folder of the job, less what git ignores, and the run's own."""
        here, run = f"{os.getcwd()}/", f"{self.run.path}/"
        call(ssh_to(host.name, f"mkdir -p {shlex.quote(here)} {shlex.quote(run)}"))
        unsent = ["--exclude=.git", f"--exclude=/{os.path.relpath(self.run.path.parent)}/"]
        unsent += ["--filter=:- .gitignore"]
        for folder, options in ((here, unsent), (run, ["--exclude=.lock", "--exclude=*.log"])):
            if (done := rsync(*options, folder, f"{host.name}:{folder}")).returncode:
                what = f"{folder} could not be copied to host {host.name}: {clean(done.stderr)}"
                fix = f"ssh {host.name} rsync --version; or use a folder that all hosts share"
                raise AllranksError(what, fix=fix, exit_code=1)

    def _share_key(self) -> None:
        """Bring the key of the first host's door to the others: see meeting.py."""
        first, folder = self.hosts[0], shlex.quote(str(self.run.path))
        look = ssh_to(first.name, f"cd {folder} && head .door-* /dev/null")
        while not (key := re.match(r"==> (\.door-\w+) <==\n(\w+)", call(look).stdout)):
            if self.nodes[first].poll() is not None or self.signals.received:
                return
            time.sleep(0.3)
        for host in self.hosts[1:]:
            script = f"umask 077; mkdir -p {folder} && cat > {folder}/{key[1]}"
            call(ssh_to(host.name, script), key[2])

    def _fetch(self) -> None:
        """Bring back what ranks have written: events, logs, and checkpoints once they are whole."""
        here, first = self.run.path, self.hosts[0]
        for host in [host for host in self.apart if host in self.nodes]:
            there = f"{host.name}:{here}"
            rsync("--append", f"{there}/attempts/", f"{here}/attempts/")
            if host == first:
                rsync("--exclude=.step-*", f"{there}/checkpoints/", f"{here}/checkpoints/")
            elif self.nodes[host].poll() is not None:  # the first host waits for its ranks' ends
                rsync("--append", f"{here}/attempts/", f"{first.name}:{here}/attempts/")
            for commit in commits.commits(self.run.checkpoints):  # its part of each
                part = f"{there}/checkpoints/.{commit.path.name}.*.writing/"
                rsync("--remove-source-files", part, f"{commit.path}/")
        keep = self.prepared.job.checkpoint.keep if self.apart else None
        for old in commits.commits(self.run.checkpoints)[keep:] if keep else ():
            shutil.rmtree(old.path, ignore_errors=True)
