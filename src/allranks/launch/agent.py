"""torch's elastic agent, taught to leave signals to the launcher."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from allranks.launch.rendezvous import FixedNodes


class Agent(LocalElasticAgent):  # type: ignore[misc]  # torch does not type it
    """Starts ranks and restarts all of them when one dies; run it off the main thread.

    Off the main thread it installs no signal handlers. Its own would kill the ranks after 30
    seconds, and they may need longer for a checkpoint.
    """

    def __init__(
        self,
        nodes: FixedNodes,
        command: list[str],
        *,
        num_ranks: int,
        max_restarts: int,
        logs: str,
        grace_seconds: int,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            rdzv_handler=nodes,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(spec=spec, logs_specs=DefaultLogsSpecs(log_dir=logs))
        self._nodes = nodes
        self._grace_seconds = grace_seconds

    @property
    def attempt(self) -> int:
        """The run's attempt that is under way."""
        return self._nodes.first_attempt + max(self._nodes.round, 0)

    def run_quietly(self) -> dict[int, int]:
        """Run to the end; the exit code of each local rank."""
        # Its warnings tell of what the launcher tells better.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        outcome = self.run()
        if outcome.state == WorkerState.SUCCEEDED:
            return dict.fromkeys(outcome.return_values, 0)
        codes = {failure.local_rank: failure.exitcode for failure in outcome.failures.values()}
        # The others were healthy until they were ended for it.
        killed = dict.fromkeys(range(self._worker_group.spec.local_world_size), -signal.SIGKILL)
        return killed | codes

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

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # Called when a rank has failed, for the others. They hang in a collective at worst.
        if self._grace_seconds == 0:
            super()._shutdown(signal.SIGKILL)
        else:
            super()._shutdown(signal.SIGTERM, timeout=self._grace_seconds)
