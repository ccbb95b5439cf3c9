"""How the launchers of all nodes meet: one store, node ranks as typed, rounds for restarts."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from allranks.errors import AllranksError
from allranks.launch.door import Met, names_of
from allranks.launch.link import MEETING_SECONDS, Interrupted, Wait, listen, own_address
from allranks.show.numbers import duration

ROUND_POLL_SECONDS = 0.01
NAMING_SECONDS = 1.0  # between looks at which node is missing
MORE_PORTS = 16  # that are tried for the ranks of a restart


def open_store(met: Met, wait: Wait) -> dist.TCPStore:
    """The store that all nodes share; node 0 serves it, at the door through which they came."""
    descriptor = met.listener.detach() if met.listener is not None else None

    def connect() -> dist.TCPStore:
        return dist.TCPStore(
            met.address,
            met.port,
            is_master=descriptor is not None,
            timeout=timedelta(seconds=MEETING_SECONDS),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    try:
        return wait.beside(connect, f"the store at {met.address}:{met.port}")
    except (dist.DistError, RuntimeError) as error:
        raise AllranksError(
            f"cannot reach the store of node 0 at {met.address}:{met.port}: "
            f"{str(error).splitlines()[0]}",
            fix="node 0 has ended, or the network between them is gone: start every node again",
            exit_code=1,
        ) from None


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
        self.awaits: tuple[str, float] | None = None  # what is waited for, and for how long it was
        self.leaves = False  # nobody waits for this any more

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        try:
            self._store.set("round", str(self.round))
            self._store.set(f"round/{self.round}/{self._node_rank}", "here")
            self._wait_for_all()
            port = self._port_of_ranks()
        except (dist.DistError, RuntimeError) as error:
            raise AllranksError(
                f"node 0 is gone: {str(error).splitlines()[0]}",
                fix="start every node again, with --resume last if there is a checkpoint",
                exit_code=1,
            ) from None
        return RendezvousInfo(
            dist.PrefixStore(f"agents/{self.round}", self._store),
            self._node_rank,
            self._num_nodes,
            RendezvousStoreInfo(self._address, port),
        )

    def _wait_for_all(self) -> None:
        """Until every node has come to this round; `awaits` says meanwhile which ones have not."""
        keys = {node: f"round/{self.round}/{node}" for node in range(self._num_nodes)}
        begin, next_look = time.monotonic(), 0.0
        missing = [node for node in keys if node != self._node_rank]
        try:
            while not self._store.check([*keys.values()]):
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + NAMING_SECONDS
                    missing = [node for node in missing if not self._store.check([keys[node]])]
                left = MEETING_SECONDS - (now - begin)
                text = f"waiting for {names_of(missing)}; {duration(left, whole=True)} left"
                self.awaits = text, now - begin
                if self.leaves:
                    raise Interrupted
                if left < 0:
                    raise TimeoutError(
                        f"{names_of(missing)} did not come within "
                        f"{duration(MEETING_SECONDS, whole=True)}"
                    )
                time.sleep(ROUND_POLL_SECONDS)
        finally:
            self.awaits = None

    def _port_of_ranks(self) -> int:
        """The port of the store in which the ranks meet: a fresh one after a restart.

        torch leaves the addresses of the ranks in it, and would have new ranks call dead ones.
        """
        if self.round == 0:
            return int(self._store.port)
        if self._node_rank == 0:
            self._serve_ranks()
        return int(self._store.get(f"port/{self.round}"))

    def _serve_ranks(self) -> None:
        alone = self._num_nodes == 1
        # Beside the port that the user typed: where that one is open, others near it may be.
        near = self._store.port + self.round
        for port in [0] if alone else [*range(near, near + MORE_PORTS), 0]:
            try:
                listener = listen(self._address, port, alone=alone)
                break
            except (OSError, OverflowError):  # taken, or beyond the last one
                continue
        port = listener.getsockname()[1]
        self._store_of_ranks = dist.TCPStore(
            own_address(listener),
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store.set(f"port/{self.round}", str(port))

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
