"""How the launchers of all nodes meet: one store, node ranks as typed, rounds for restarts."""

from __future__ import annotations

import json
import os
import secrets
import socket
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


@dataclass(frozen=True, slots=True)
class Meeting:
    """What node 0 decides for all nodes."""

    run_dir: str
    attempt: int
    layout: str
    checkpoint: str
    token: str  # name of a file in the run folder: who sees it sees the same disk


def open_store(address: str, port: int, *, is_first: bool, seconds: float) -> dist.TCPStore:
    """The store that all nodes share; the first node serves it. Port 0 takes any free one."""
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=is_first,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        verb = "serve at" if is_first else "reach node 0 at"
        raise AllranksError(
            f"cannot {verb} {address}:{port}: {str(error).splitlines()[0]}",
            fix="give every node the same --master HOST:PORT: a name of node 0's machine and a "
            "free port there that no firewall closes; start node 0 within ten minutes of the rest",
            exit_code=1,
        ) from None


def meet(
    store: dist.Store, node_rank: int, num_nodes: int, layout: str, mine: Meeting | None
) -> Meeting:
    """Agree with node 0 (which passes `mine`) on one run; refuse a second node of the same rank."""
    me = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "layout": layout})
    # compare_set returns what is there in the end: its own value only for the first to come.
    there = json.loads(store.compare_set(f"node/{node_rank}", "", me))
    if there != json.loads(me):
        raise AllranksError(
            f"two nodes say that they are node {node_rank}: process {there['pid']} on "
            f"{there['host']}, and process {os.getpid()} on {socket.gethostname()}",
            fix=f"give each machine its own --node-rank, from 0 to {num_nodes - 1}",
        )
    if mine is not None:
        store.set("meeting", json.dumps(asdict(mine)))
        return mine
    store.set_timeout(timedelta(seconds=MEETING_SECONDS))
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
    return meeting


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
        # Ranks inherit these: a restart is the run's next attempt, on every node alike.
        os.environ["ALLRANKS_ATTEMPT"] = str(self.first_attempt + self.round)
        os.environ["ALLRANKS_RESTARTS"] = str(self.round)
        self._store.set("round", str(self.round))
        self._store.set(f"round/{self.round}/{self._node_rank}", "here")
        everyone = [f"round/{self.round}/{node}" for node in range(self._num_nodes)]
        self._store.wait(everyone, timedelta(seconds=MEETING_SECONDS))
        return RendezvousInfo(
            dist.PrefixStore(f"agents/{self.round}", self._store),
            self._node_rank,
            self._num_nodes,
            RendezvousStoreInfo(self._address, self._store.port),
        )

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
