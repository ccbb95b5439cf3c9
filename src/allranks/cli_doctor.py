"""The command that says what is wrong: of this machine, of a run, or of any log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli_words import AsJson, Debug, Runs, app, people_console

if TYPE_CHECKING:
    from allranks.doctor.finding import Finding

Subjects = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN|LOG...", help="Default: check this machine before a run."),
]
ListCauses = Annotated[bool, typer.Option("--list", help="Print the causes that are known.")]


@app.command()
def doctor(
    subject: Subjects = None,
    list_causes: ListCauses = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What is wrong, on which rank, and what to type: a run, any log, or this machine."""
    if list_causes:
        print_causes(as_json)
    elif not subject:
        from allranks.doctor.here import check_here

        raise typer.Exit(check_here(as_json=as_json))
    else:
        print_findings(diagnosis(runs, subject), " ".join(subject), as_json)


def diagnosis(runs: Path, subjects: list[str]) -> list[Finding]:
    """What is wrong with what was named: files are logs of one run, anything else is a run."""
    from allranks.doctor.diagnose import diagnose_logs, log_files
    from allranks.doctor.layouts import compare
    from allranks.doctor.runs import diagnose_run
    from allranks.rundir import find_run

    logs, references = [], []
    for one in subjects:
        path = Path(one).expanduser()
        if path.exists() and not (path / "run.json").is_file():
            logs += log_files(path)
        else:
            references.append(one)
    found = diagnose_logs(logs) if logs else []
    named = [find_run(runs, one) for one in references]
    for run in named:
        found += diagnose_run(run)
    return [*found, *compare(named)]


def print_findings(findings: list[Finding], subject: str, as_json: bool) -> None:
    from allranks.doctor.finding import as_json as to_objects
    from allranks.doctor.show import show_findings
    from allranks.events import to_json

    if as_json:
        print(to_json(to_objects(findings)))
    else:
        show_findings(people_console(False), findings, subject)


def print_causes(as_json: bool) -> None:
    from allranks.doctor.catalogue import load
    from allranks.doctor.show import show_causes
    from allranks.events import to_json

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
