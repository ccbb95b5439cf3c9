"""How the launchers of all nodes meet: one store, node ranks as typed, rounds for restarts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from allranks.errors import AllranksError

MEETING_SECONDS = 600.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Meeting:
    """What node 0 decides for all nodes."""

    run_dir: str
    attempt: int
    layout: str
    checkpoint: str
    token: str  # name of a file in the run folder: who sees it sees the same disk
    claim: int | None = None  # under which the ranks of all nodes work


class Interrupted(AllranksError):
    """The user stopped the launcher while it waited for other nodes."""

    def __init__(self) -> None:
        what = "stopped before all nodes were there: no rank was started"
        super().__init__(what, fix="type the command again", exit_code=130)


def open_store(
    address: str, port: int, *, is_first: bool, interrupted: Callable[[], bool]
) -> dist.TCPStore:
    """The store that all nodes share; the first node serves it. Port 0 takes any free one."""
    try:
        if not is_first:
            _wait_for(lambda: _answers(address, port), interrupted)
        return dist.TCPStore(
            address,
            port,
            is_master=is_first,
            timeout=timedelta(seconds=MEETING_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError, TimeoutError, OSError) as error:
        if is_first:
            _refuse_second_first(address, port)
        verb = "serve at" if is_first else "reach node 0 at"
        raise AllranksError(
            f"cannot {verb} {address}:{port}: {str(error).splitlines()[0]}",
            fix="give every node the same --master HOST:PORT: a name of node 0's machine and a "
            "free port there that no firewall closes; start node 0 within ten minutes of the rest",
            exit_code=1,
        ) from None


def meet(
    store: dist.Store,
    node_rank: int,
    layout: str,
    mine: Meeting | None,
    interrupted: Callable[[], bool],
) -> Meeting:
    """Agree with node 0 (which passes `mine`) on one run; refuse a node that does not fit."""
    if mine is not None:
        store.set("meeting", json.dumps(asdict(mine)))
        meeting = mine
    else:
        _wait_for(lambda: bool(store.check(["meeting"])), interrupted)
        meeting = Meeting(**json.loads(store.get("meeting")))
    if meeting.layout != layout:
        raise AllranksError(
            f"node 0 was started with --layout {meeting.layout}, node {node_rank} with {layout}",
            fix=f"type --layout {meeting.layout} on every machine",
        )
    if not (Path(meeting.run_dir) / meeting.token).exists():
        raise AllranksError(
            f"node {node_rank} ({socket.gethostname()}) does not see the run folder of node 0, "
            f"{meeting.run_dir}",
            fix="give every machine the same --runs DIR, on a disk that all of them share",
        )
    me = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
    # compare_set returns what is there in the end: its own value only for the first to come.
    there = json.loads(store.compare_set(f"node/{node_rank}", "", me))
    if there != json.loads(me):
        raise _duplicate(node_rank, there)
    return meeting


def _wait_for(condition: Callable[[], bool], interrupted: Callable[[], bool]) -> None:
    """Wait in Python, where a Ctrl-C is noticed; torch's own waiting is deaf to it."""
    deadline = time.monotonic() + MEETING_SECONDS
    while not condition():
        if interrupted():
            raise Interrupted
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer for {MEETING_SECONDS:.0f} seconds")
        time.sleep(POLL_SECONDS)


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=2):
            return True
    except socket.gaierror:
        raise  # no machine of that name: waiting will not help
    except OSError:
        return False


def _duplicate(node_rank: int, there: dict[str, object]) -> AllranksError:
    return AllranksError(
        f"two nodes say that they are --node-rank {node_rank}: process {there['pid']} on "
        f"{there['host']}, and process {os.getpid()} on {socket.gethostname()}",
        fix="give each machine of the layout its own --node-rank, counted from 0",
    )


def _refuse_second_first(address: str, port: int) -> None:
    """If the port is taken by another node 0, say so."""
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))
        there = json.loads(store.get("node/0"))
    except (dist.DistError, RuntimeError, ValueError):
        return
    raise _duplicate(0, there)


def new_token() -> str:
    return f".seen-{secrets.token_hex(4)}"


class FixedNodes(RendezvousHandler):
    """Nodes with the ranks that they were given, meeting anew whenever one restarts its ranks."""

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        node_rank: int,
        num_nodes: int,
        address: str,
        run: str,
        attempt: int,
    ) -> None:
        self._store = store
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._address = address
        self._run = run
        self.first_attempt = attempt
        self.round = -1

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        self._store.set("round", str(self.round))
        self._store.set(f"round/{self.round}/{self._node_rank}", "here")
        everyone = [f"round/{self.round}/{node}" for node in range(self._num_nodes)]
        self._store.wait(everyone, timedelta(seconds=MEETING_SECONDS))
        return RendezvousInfo(
            dist.PrefixStore(f"agents/{self.round}", self._store),
            self._node_rank,
            self._num_nodes,
            RendezvousStoreInfo(self._address, self._port_of_ranks()),
        )

    def _port_of_ranks(self) -> int:
        """The port of the store in which the ranks meet: a fresh one after a restart.

        torch leaves the addresses of the ranks in it, and would have new ranks call dead ones.
        """
        if self.round == 0:
            return int(self._store.port)
        if self._node_rank == 0:
            # Beside the port that the user typed: where that one is open, others near it may be.
            wanted = self._store.port + self.round if self._num_nodes > 1 else 0
            self._store_of_ranks = dist.TCPStore(
                self._address, wanted, is_master=True, wait_for_workers=False
            )
            self._store.set(f"port/{self.round}", str(self._store_of_ranks.port))
        return int(self._store.get(f"port/{self.round}"))

    def num_nodes_waiting(self) -> int:
        """More than 0 if another node has gone on to a further round: this one must follow."""
        if self._num_nodes == 1:
            return 0
        try:
            return int(int(self._store.get("round")) > self.round)
        except dist.DistError:
            return 0  # node 0 is gone; the ranks will notice by themselves

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "fixed"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True
