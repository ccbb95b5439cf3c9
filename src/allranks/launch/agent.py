"""torch's elastic agent, changed so that it leaves signals to the launcher, and its rendezvous.

The rendezvous has one store, node ranks as typed, and a round for each restart.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from allranks.errors import AllranksError
from allranks.launch.meeting import (
    MEETING_SECONDS,
    Interrupted,
    Met,
    Wait,
    listen,
    names_of,
    own_address,
)
from allranks.machine.processes import has_ended
from allranks.show.numbers import duration

ENDING_SECONDS = 5.0  # after its ranks, before a wait for other nodes is worth a line
ROUND_POLL_SECONDS = 0.01
NAMING_SECONDS = 1.0  # between looks at which node is missing
MORE_PORTS = 16  # that are tried for the ranks of a restart

# What only torchrun decides; the rest that torch gives a rank is from our own environment.
OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
)


def open_store(met: Met, wait: Wait) -> dist.TCPStore:
    """The store that all nodes share; node 0 serves it where they met."""
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
    """A fixed set of nodes, which meet again whenever one of them restarts its ranks."""

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
        """Wait until every node has come to this round; `awaits` says which ones have not yet."""
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
                        f"{names_of(missing)} did not join within "
                        f"{duration(MEETING_SECONDS, whole=True)}"
                    )
                time.sleep(ROUND_POLL_SECONDS)
        finally:
            self.awaits = None

    def _port_of_ranks(self) -> int:
        """The port of the store in which the ranks meet: a new one after a restart.

        torch leaves the addresses of the ranks in it, and would have new ranks call dead ones.
        """
        if self.round == 0:
            return int(self._store.port)
        if self._node_rank > 0:
            return int(self._store.get(f"port/{self.round}"))
        # Beside the port that the user typed: where that one is open, others near it may be.
        near = self._store.port + self.round
        for port in [0] if self._num_nodes == 1 else [*range(near, near + MORE_PORTS), 0]:
            try:
                listener = listen(self._address, port)
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
        return int(port)

    def num_nodes_waiting(self) -> int:
        """More than 0 if another node has moved on to a later round: this one must follow."""
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


class NoLogs(DefaultLogsSpecs):
    """Ranks have logs of their own: a folder of torch's would outlive a launcher that is killed."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found: LogsDest = super().reify(envs)
        found.tee_stdouts, found.tee_stderrs = {}, {}  # else threads would read from nowhere
        return found


class Agent(LocalElasticAgent):
    """Starts ranks and restarts all of them when one dies; run it off the main thread.

    Off the main thread it installs no signal handlers. Its own would kill the ranks after 30
    seconds, and they may need longer for a checkpoint. `kills_peers`: end the ranks beside a
    failed one at once, because they can only hang. `arguments`: of Python, in an attempt;
    `environment`: a rank's variables besides this process's own and those of torchrun. `ended` is
    called with exit codes and an attempt as soon as that is over, before anything is waited for.
    `goes_on`: whether an attempt has ended only to be continued, which is no restart of a crash.
    """

    def __init__(
        self,
        nodes: FixedNodes,
        arguments: Callable[[int], list[str]],
        environment: Mapping[str, str],
        ended: Callable[[dict[int, int | None], int], None],
        goes_on: Callable[[int], bool],
        *,
        num_ranks: int,
        max_restarts: int,
        kills_peers: bool,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            rdzv_handler=nodes,
            entrypoint=sys.executable,
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(spec=spec, logs_specs=NoLogs(log_dir=os.devnull))
        self._nodes = nodes
        self._arguments = arguments
        self._environment = environment
        self._ended = ended
        self._goes_on = goes_on
        self._may_restart = True
        self._kills_peers = kills_peers
        self._codes: dict[int, int] = {}  # by local rank, once one has failed
        self._ended_at: float | None = None  # since when no rank runs

    @property
    def attempt(self) -> int:
        """The run's attempt that is under way."""
        return self._nodes.first_attempt + max(self._nodes.round, 0)

    @property
    def meets(self) -> bool:
        """Whether it waits for other nodes before it starts ranks."""
        return self._nodes.awaits is not None

    def leave(self) -> None:
        """Stop waiting for other nodes."""
        self._nodes.leaves = True

    def awaits(self) -> tuple[str, float] | None:
        """What it waits for on other nodes, before or after its ranks, and for how long so far.

        Raises if node 0 stays silent: torch's own calls would wait forever.
        """
        processes = self.processes()
        if self.meets or not all(map(has_ended, processes)):
            self._ended_at = None
            return self._nodes.awaits
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        waited = now - self._ended_at
        if waited > MEETING_SECONDS and processes:
            raise AllranksError(
                "the ranks here have ended, but node 0 has been silent for "
                f"{duration(waited, whole=True)}",
                fix="see whether node 0's machine and launcher are still running",
                exit_code=1,
            )
        left = duration(MEETING_SECONDS - waited, whole=True)
        is_long = waited > ENDING_SECONDS and bool(processes)
        return (f"waiting for the other nodes to end; {left} left", waited) if is_long else None

    def run_quietly(self) -> dict[int, int | None]:
        """Run to the end; exit code by (global) rank, None for ranks ended because of another."""
        # The launcher explains better what its warnings are about.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            outcome = self.run()
        except AllranksError:
            raise
        except Exception as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise AllranksError(
                f"the ranks could not be run: {what}",
                fix="start every node of the layout within ten minutes, with the same --master; "
                "if one was stopped, start all again",
                exit_code=1,
            ) from error
        failed = self.failed()
        return dict.fromkeys(failed, 0) if outcome.state == WorkerState.SUCCEEDED else failed

    def failed(self) -> dict[int, int | None]:
        """Exit code by rank, once a rank has failed; None for those ended because of another."""
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return {rank: self._codes.get(local_rank) for local_rank, rank in enumerate(ranks)}

    def processes(self) -> list[int]:
        """Process ids of the ranks that were started last."""
        context = self._pcontext
        return list(context.pids().values()) if context is not None else []

    def never_restart(self) -> None:
        """From now on the ranks end because somebody asked for it."""
        self._may_restart = False
        self._remaining_restarts = 0

    def kill(self) -> None:
        """End every rank now."""
        for process in self.processes():
            try:
                os.killpg(process, signal.SIGKILL)  # each leads a session of its own
            except ProcessLookupError:
                continue

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._nodes.round >= 0:  # a restart: its ranks are stopped, the other nodes not met yet
            self._ended(self.failed(), self.attempt)
        super()._initialize_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._codes = {}
        worker_group.spec.args = tuple(self._arguments(self.attempt))
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        # Where torch adds variables to what it has built for each rank: the last place before the
        # ranks start, and the only one that leaves this process's own environment alone.
        super()._setup_local_watchdog(envs)
        # A restart is the run's next attempt, on every node alike.
        count = {"ALLRANKS_ATTEMPT": self.attempt, "ALLRANKS_RESTARTS": self._nodes.round}
        for env in envs.values():
            ranks_own = {name: env[name] for name in env if name.startswith(OF_TORCHRUN)}
            env.update(self._environment)
            env.update(ranks_own)
            env.update({name: str(number) for name, number in count.items()})

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before torch looks: when it finds a failed rank it sends the others SIGTERM and waits up
        # to 30 seconds, then counts them as failed too.
        if not self._codes:
            handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
            codes = {rank: handler.proc.poll() for rank, handler in handlers.items()}
            if any(codes.values()):  # and ranks that ended well before were not ended by that
                self._codes = {rank: code for rank, code in codes.items() if code is not None}
                if self._kills_peers:
                    self.kill()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._may_restart and self._goes_on(self.attempt):
            self._remaining_restarts += 1
        if result.state == WorkerState.SUCCEEDED:
            # torch now waits for the other nodes: what happens meanwhile is not these ranks' end.
            self._ended(dict.fromkeys(self.failed(), 0), self.attempt)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._kills_peers:
            super()._shutdown(signal.SIGKILL)
        else:
            super()._shutdown(*args, **kwargs)
