"""The command that says what is wrong: of this machine, of a run, or of any log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.options import AsJson, Debug, Runs, people_console

if TYPE_CHECKING:
    from allranks.doctor.finding import Finding
    from allranks.doctor.slow import Thresholds
    from allranks.run.folder import RunDir

Subjects = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN|LOG...", help="Default: check this machine before a run."),
]
Listen = Annotated[
    bool, typer.Option("--listen", help="Wait for --connect from another machine; [PORT] follows.")
]
Connect = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Test the way to a machine that listens."),
]
DataFolders = Annotated[
    list[Path] | None, typer.Option("--data", help="Look at this folder's disk too.")
]
StalledAfter = Annotated[
    float | None,
    typer.Option(
        "--stalled",
        "--stalled-after",
        min=0,
        metavar="SECONDS",
        help="Without a step: it is stalled. Default: by the run's own steps.",
    ),
]
Threshold = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=NUMBER", help="When slowness is told, such as data=0.2."),
]
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
ListCauses = Annotated[bool, typer.Option("--list", help="Print the causes that are known.")]


def doctor(
    subject: Subjects = None,
    list_causes: ListCauses = False,
    listen: Listen = False,
    connect: Connect = None,
    data: DataFolders = None,
    stalled_after: StalledAfter = None,
    threshold: Threshold = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    if list_causes:
        print_causes(as_json)
    elif listen or connect is not None or not subject:
        from allranks.cli import doctor_machine as machine

        if connect is not None:
            raise typer.Exit(machine.connect(connect, as_json=as_json))
        if listen:
            raise typer.Exit(machine.listen(machine.port_of(subject), as_json=as_json))
        raise typer.Exit(machine.check_here(runs, data or [], as_json=as_json))
    else:
        from allranks.doctor.slow import Thresholds

        limits = Thresholds.parse(threshold or [])
        found = diagnosis(runs, subject, limits, stalled_after)
        print_findings(found, " ".join(subject), as_json)


def diagnosis(
    runs: Path, subjects: list[str], limits: Thresholds, stalled_after: float | None = None
) -> list[Finding]:
    """What is wrong with what was named: files are logs of one run, anything else is a run."""
    from allranks.doctor.diagnose import diagnose_logs, log_files
    from allranks.doctor.differing_results import compare
    from allranks.errors import AllranksError
    from allranks.run.folder import find_run

    logs, references = [], []
    for one in subjects:
        path = Path(one).expanduser()
        if path.exists() and not (path / "run.json").is_file():
            logs += log_files(path)
        elif path.suffix in LOG_SUFFIXES:
            raise AllranksError(
                f"there is no file {one}",
                fix="name a log that is there, a folder of logs, or a run",
            )
        else:
            references.append(one)
    found = diagnose_logs(logs) if logs else []
    named = [find_run(runs, one) for one in references]
    for run in named:
        found += diagnosis_of(run, limits, stalled_after)
    return [*found, *compare(named)]


def diagnosis_of(
    run: RunDir, limits: Thresholds | None = None, stalled_after: float | None = None
) -> list[Finding]:
    """What is wrong with one run: why it failed, hangs or is slow."""
    from allranks.doctor import diagnose
    from allranks.doctor.diagnose import diagnose_run
    from allranks.launch import backends
    from allranks.run import run_state

    state = run_state.describe(run, backends.look([run]))["state"]
    stalls = diagnose.stalled(run, state, after=stalled_after)
    slowness = diagnose.slowed(run, state, limits) if not stalls else []
    return [*diagnose.together(diagnose_run(run), stalls, slowness), *diagnose.odd_folder(run)]


def print_findings(findings: list[Finding], subject: str, as_json: bool) -> None:
    from allranks.doctor.finding import as_json as to_objects
    from allranks.doctor.show import show_findings
    from allranks.run.events import to_json

    if as_json:
        print(to_json(to_objects(findings)))
    else:
        show_findings(people_console(False), findings, subject)


def print_causes(as_json: bool) -> None:
    from allranks.doctor.catalogue import load
    from allranks.doctor.show import show_causes
    from allranks.run.events import to_json

    causes = load().findings()
    if not as_json:
        show_causes(people_console(False), causes)
        return
    known: list[dict[str, Any]] = [
        {
            "cause": cause.slug,
            "family": cause.family,
            "title": cause.words({}),
            "about": cause.cause,
            "fix": cause.advice({}),
            "references": list(cause.references),
        }
        for cause in causes
    ]
    print(to_json(known))
