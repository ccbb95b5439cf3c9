"""What each way of writing a checkpoint in the background costs the training beside it.

    python benchmarks/checkpoint_writers.py      # a minute; a table, no claim

The reason why checkpoints are plain bytes (train/storage.py). Steps of `language` (124m on a GPU,
else 16m) run while a thread writes the copied tensors; `lost` is how much longer these steps took
than the same number of undisturbed ones. A thread that only sleeps shows the noise, and one that
only computes in Python shows what holding the interpreter costs.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint_stall import now, training


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        measure(Path(folder))


def measure(folder: Path) -> None:
    t = training(folder)
    # After the environment of a rank is set.
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from allranks.run.commits import checksums
    from allranks.train import loop
    from allranks.train.storage import TensorWriter

    stream = t.data.batches(t.progress)
    saver = t.checkpointer
    for name, tensor in saver._copy_what_may_change().items():
        saver._staged[name].copy_(tensor)

    def step() -> None:
        loop.forward_backward(t, next(stream), False)
        loop.update(t)

    def steps(count: int) -> float:
        started = now(t)
        for _ in range(count):
            step()
        return now(t) - started

    def save(writer: FileSystemWriter) -> None:
        dcp.save(dict(saver._staged), storage_writer=writer, process_group=saver.group)

    def spin() -> None:
        end = time.perf_counter() + 1
        while time.perf_counter() < end:
            pass

    def read_back() -> None:
        checksums(list((folder / "bytes").glob("*.distcp")))

    ways: dict[str, Callable[[], None]] = {
        "sleep 1 s": lambda: time.sleep(1),
        "compute in Python for 1 s": spin,
        "DCP's writer": lambda: save(FileSystemWriter(folder / "dcp", sync_files=False)),
        "DCP's writer, no copying ahead": lambda: save(
            FileSystemWriter(folder / "serial", sync_files=False, per_thread_copy_ahead=0)
        ),
        "plain bytes": lambda: save(TensorWriter(folder / "bytes")),
        "checksum of the file": read_back,
    }
    steps(5)
    undisturbed = min(steps(10), steps(10)) / 10
    print(
        f"a step takes {undisturbed:.4f} s; {sum(x.nbytes for x in saver._staged.values()):,} bytes"
    )
    for name, write in ways.items():
        thread = threading.Thread(target=write)
        started = now(t)
        thread.start()
        count = 0
        while thread.is_alive():
            step()
            count += 1
        written = time.perf_counter() - started
        lost = now(t) - started - count * undisturbed
        print(f"{name:32} {written:6.2f} s of writing, {lost:6.3f} s lost", flush=True)
    t.meter.log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
