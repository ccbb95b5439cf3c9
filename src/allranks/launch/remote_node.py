"""The launcher of one node, started from another machine, which follows the run.

    python -m allranks.launch.remote_node RUN_DIR/attempts/0/attempt.json NODE_RANK

Its standard input carries variables for the ranks as one line of JSON, then one signal name per
line. When that ends (the connection is lost, whoever started it is gone), the ranks save and stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

from allranks.errors import AllranksError
from allranks.launch import checks, network
from allranks.launch.node import Place, run_beside
from allranks.launch.prepare import read_attempt
from allranks.machine.processes import listening
from allranks.run.folder import RunDir


def main() -> int:
    path, node_rank = Path(sys.argv[1]), int(sys.argv[2])
    told, run = read_attempt(path), RunDir(path.parents[2])
    words = os.fdopen(os.dup(0), "rb", buffering=0)  # no rank must read from it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(json.loads(words.readline()))
    place = Place(
        node_rank=node_rank,
        master=told.master,
        max_restarts=told.max_restarts,
        oversubscribe=told.oversubscribe,
    )
    with listening() as signals:
        threading.Thread(target=obey, args=(words,), daemon=True).start()
        try:
            prepared = told.prepared(run, network.variables(told.nodes))
            here = prepared.layout.gpus
            checks.check_machine(prepared.layout, here=here, oversubscribe=told.oversubscribe)
            checks.settle_precision(prepared)
            return run_beside(prepared, place, signals)
        except AllranksError as error:
            print(error.shown, flush=True)
            return error.exit_code
        finally:
            for key in run.path.glob(".door-*"):  # where it was brought here: see backends/ssh.py
                key.unlink(missing_ok=True)


def obey(words: IO[bytes]) -> None:
    """Pass on signals from whoever started this; when the connection ends, save and stop."""
    while line := words.readline().strip():
        os.kill(os.getpid(), signal.Signals[line.decode()])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
