"""`attempts/N/attempt.json`: what whoever starts an attempt tells all of its nodes.

It is written once, before any rank starts; a node's launcher is given only its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.launch import prepare
from allranks.launch.prepare import Prepared, Request
from allranks.layout import Layout
from allranks.run.folder import RunDir, write_atomically

FILE = "attempt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What the launchers of an attempt need to know."""

    number: int
    layout: str
    checkpoint: str  # to resume from; empty: start at step 0
    threads: int | None  # per rank, as when the checkpoint was written in the same layout
    claim: int | None
    nodes: tuple[str, ...]  # names by which they reach each other; the first one leads
    port: int  # of the first node, where the others meet it
    max_restarts: int | None = None  # None: what the job says
    oversubscribe: bool = False
    check: tuple[str, ...] = ()  # arguments of the preflight, where launchers are to run it

    @property
    def master(self) -> str:
        return f"{self.nodes[0]}:{self.port}"

    def write(self, run: RunDir) -> Path:
        """Write it into the run's folder; returns its path."""
        path = run.attempt(self.number) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")
        return path


def describe(prepared: Prepared, **more: object) -> Attempt:
    """The attempt that was prepared; `more`: its nodes, their port, and the rest."""
    return Attempt(
        number=prepared.attempt,
        layout=str(prepared.layout),
        checkpoint=prepared.checkpoint,
        threads=prepared.threads,
        claim=prepared.claim,
        **more,  # type: ignore[arg-type]  # checked where it is called, by its names
    )


def read(path: Path) -> Attempt:
    content = json.loads(path.read_text())
    lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
    return Attempt(**{**content, **lists})


def prepared_for(attempt: Attempt, run: RunDir, variables: Mapping[str, str]) -> Prepared:
    """What the launcher of one node starts; `variables`: for its ranks only."""
    layout = Layout.parse(attempt.layout)
    return Prepared(
        request=Request(runs=run.path.parent, leads=False),
        # Not the file's layout: a run that is being moved has its next one there already.
        job=prepare.load_resolved(run).model_copy(update={"layout": layout}),
        run=run,
        attempt=attempt.number,
        checkpoint=attempt.checkpoint,
        threads=attempt.threads,
        claim=attempt.claim,
        variables=dict(variables),
    )
