"""torch's elastic agent, taught to leave signals to the launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from allranks.errors import AllranksError
from allranks.launch.link import MEETING_SECONDS
from allranks.launch.rendezvous import FixedNodes
from allranks.show.numbers import duration

ENDING_SECONDS = 5.0  # after its ranks, before a wait for other nodes is worth a line

# What only torchrun decides; the rest that torch gives a rank is from our own environment.
OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
)


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
    """

    def __init__(
        self,
        nodes: FixedNodes,
        arguments: Callable[[int], list[str]],
        environment: Mapping[str, str],
        ended: Callable[[dict[int, int | None], int], None],
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
        """Wait for no other node any more."""
        self._nodes.leaves = True

    def awaits(self) -> tuple[str, float] | None:
        """What of other nodes it waits for, and how long it has, before or after its ranks.

        Raises if it waits in vain: torch's own calls wait for ever where node 0 is silent.
        """
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        if self.meets or any(handler.proc.poll() is None for handler in handlers.values()):
            self._ended_at = None
            return self._nodes.awaits
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        waited = now - self._ended_at
        if waited > MEETING_SECONDS and handlers:
            raise AllranksError(
                "the ranks here have ended, but node 0 has been silent for "
                f"{duration(waited, whole=True)}",
                fix="see whether node 0's machine and launcher are still running",
                exit_code=1,
            )
        left = duration(MEETING_SECONDS - waited, whole=True)
        is_long = waited > ENDING_SECONDS and bool(handlers)
        return (f"waiting for the other nodes to end; {left} left", waited) if is_long else None

    def run_quietly(self) -> dict[int, int | None]:
        """Run to the end; exit code by (global) rank, None for ranks ended because of another."""
        # Its warnings tell of what the launcher tells better.
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
        """Whatever ends the ranks from now on was asked for."""
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
        if result.state == WorkerState.SUCCEEDED:
            # torch now waits for the other nodes: what happens meanwhile is not these ranks' end.
            self._ended(dict.fromkeys(self.failed(), 0), self.attempt)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._kills_peers:
            super()._shutdown(signal.SIGKILL)
        else:
            super()._shutdown(*args, **kwargs)
