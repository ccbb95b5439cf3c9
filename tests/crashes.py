"""Scripts that crash, each in its own way, with the line and the message that people look for.

python -m tests.crashes FOLDER      writes them all, to be looked at one by one
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

PRELUDE = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
rank = int(os.environ["RANK"])
bad = rank == 1
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(batches, callback=lambda step: None, model=model):
    for step, x in enumerate(batches):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        callback(step)
data = [torch.randn(2, 4) for _ in range(6)]
"""


@dataclass(frozen=True)
class Crash:
    """`text` has a `# HERE` behind the line that is to blame."""

    name: str
    text: str
    says: str  # in the first line
    rank: int | None = 1  # None: all of them fail
    begins: str = PRELUDE

    @property
    def script(self) -> str:
        return self.begins + textwrap.dedent(self.text).lstrip("\n")

    @property
    def line(self) -> int:
        lines = self.script.splitlines()
        return next(number for number, line in enumerate(lines, 1) if "# HERE" in line)


CRASHES = [
    Crash(
        "forward",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 1)
            def forward(self, x):
                return self.linear({"x": x}["label" if bad else "x"])  # HERE
        train(data, model=nn.parallel.DistributedDataParallel(Net()))
        """,
        "KeyError: 'label'",
    ),
    Crash(
        "backward",
        """
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x
            @staticmethod
            def backward(ctx, grad):
                if bad:
                    raise ArithmeticError("no gradient today")  # HERE
                return 2 * grad
        for x in data:
            Double.apply(model(x)).sum().backward()
        """,
        "ArithmeticError: no gradient today",
    ),
    Crash(
        "worker",
        """
        class Images(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if bad and index == 5:
                    raise ValueError(f"image {index} is broken")  # HERE
                return torch.randn(4)
        train(DataLoader(Images(), batch_size=2, num_workers=1))
        """,
        "ValueError: image 5 is broken",
    ),
    Crash(
        "callback",
        """
        def save(step):
            if bad and step == 2:
                open(f"/nowhere/step-{step}.pt", "w")  # HERE
        train(data, save)
        """,
        "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/step-2.pt'",
    ),
    Crash(
        "import",
        """
        if bad:
            import torchvisionary  # HERE
        train(data)
        """,
        "ModuleNotFoundError: No module named 'torchvisionary'",
    ),
    Crash(
        "exit",
        """
        def check(step):
            if bad and step == 1:
                exit(3)  # HERE
        train(data, check)
        """,
        "ended with code 3",
    ),
    Crash(
        "sys_exit_text",
        """
        if bad:
            sys.exit("no data in /scratch")  # HERE
        train(data)
        """,
        "no data in /scratch",
    ),
    Crash(
        "sys_exit_after_an_error",
        """
        def load():
            return {}["path"]  # HERE
        try:
            if bad:
                load()
        except KeyError as error:
            print("cannot load:", error)
            sys.exit(4)
        train(data)
        """,
        "KeyError: 'path'",
    ),
    Crash(
        "os_exit",
        """
        def check(step):
            if bad:
                os._exit(5)  # HERE
        train(data, check)
        """,
        "ended with code 5",
    ),
    Crash(
        "killed_by_itself",
        """
        def check(step):
            if bad and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE
        train(data, check)
        """,
        "was killed by SIGKILL",
    ),
    Crash(
        "killed",
        """
        import subprocess
        def train_long():
            for step in range(10000):
                model(data[0]).sum().backward()
                optimizer.step()  # HERE
                if bad and step == 5:
                    subprocess.run(["kill", "-9", str(os.getpid())])
        train_long()
        """,
        "was killed by SIGKILL",
    ),
    Crash(
        "segfault",
        """
        import ctypes
        def dereference(step):
            if bad and step == 1:
                ctypes.string_at(0)  # HERE
        train(data, dereference)
        """,
        "was killed by SIGSEGV",
    ),
    Crash(
        "abort",
        """
        def give_up(step):
            if bad and step == 1:
                os.abort()  # HERE
        train(data, give_up)
        """,
        "was killed by SIGABRT",
    ),
    Crash(
        "out_of_memory",
        """
        def hoard(step):
            if bad:
                torch.empty(1 << 50)  # HERE
        train(data, hoard)
        """,
        "RuntimeError: [enforce fail at alloc_cpu.cpp",
    ),
    Crash(
        "shapes_differ_between_ranks",
        """
        for step in range(3):
            if step == 2:
                model(torch.randn(2, 4 + rank)).sum()  # HERE
            model(torch.randn(2, 4)).sum().backward()
        """,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x1)",
    ),
    Crash(
        "assertion_everywhere",
        """
        def check(step):
            assert step < 3, f"step {step} is too far"  # HERE
        train(data, check)
        """,
        "AssertionError: step 3 is too far",
        rank=None,
    ),
    Crash(
        "gloo_everywhere",
        """
        dist.barrier(group=dist.new_group([0, 1], backend="nccl"))  # HERE
        """,
        "Error: ",
        rank=None,
    ),
    Crash(
        "keyboard_interrupt",
        """
        def stop(step):
            if bad and step == 2:
                raise KeyboardInterrupt  # HERE
        train(data, stop)
        """,
        "KeyboardInterrupt",
    ),
    Crash(
        "chained",
        """
        class ConfigError(Exception):
            pass
        def read(step):
            if bad:
                try:
                    int("ten")
                except ValueError as error:
                    raise ConfigError("lr is no number") from error  # HERE
        train(data, read)
        """,
        "ConfigError: lr is no number",
    ),
    Crash(
        "long_message",
        """
        def tell(step):
            if bad:
                raise ValueError("far too much " * 1000)  # HERE
        train(data, tell)
        """,
        "ValueError: far too much",
    ),
    Crash(
        "message_of_300_lines",
        """
        def tell(step):
            if bad:
                raise RuntimeError("first of all\\n" + "and so on\\n" * 300)  # HERE
        train(data, tell)
        """,
        "RuntimeError: first of all",
    ),
    Crash(
        "recursion",
        """
        def deeper(step):
            return deeper(step) if bad else None  # HERE
        train(data, deeper)
        """,
        "RecursionError: maximum recursion depth exceeded",
    ),
    Crash(
        "syntax",
        """
        if bad:
            model = = None  # HERE
        """,
        "SyntaxError: invalid syntax",
        rank=None,
    ),
    Crash(
        "arguments",
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.parse_args(["--lr", "fast"] if bad else [])  # HERE
        train(data)
        """,
        "argument --lr: invalid float value: 'fast'",
    ),
    Crash(
        "own_hook",
        """
        def hook(kind, error, trace):
            print("something went wrong")
        sys.excepthook = hook
        def check(step):
            if bad:
                raise LookupError("no such class")  # HERE
        train(data, check)
        """,
        "LookupError: no such class",
    ),
    Crash(
        "hook_that_leaves",
        """
        import traceback
        def hook(kind, error, trace):
            traceback.print_exception(error)
            os.execvp("false", ["false"])
        sys.excepthook = hook
        def check(step):
            if bad:
                raise LookupError("no such class")  # HERE
        train(data, check)
        """,
        "LookupError: no such class",
    ),
    Crash(
        "raised_exit",
        """
        def check(step):
            if bad and step == 1:
                raise SystemExit(6)  # HERE
        train(data, check)
        """,
        "ended with code 6",
    ),
    Crash(
        "error_while_cleaning_up",
        """
        def check(step):
            if bad and step == 1:
                raise ZeroDivisionError("the real one")  # HERE
        try:
            train(data, check)
        finally:
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        """,
        "ZeroDivisionError: the real one",
    ),
    Crash(
        "error_that_wraps_an_echo",
        """
        def check(step):
            if bad and step == 1:
                time.sleep(0.2)
                raise ZeroDivisionError("the real one")  # HERE
        try:
            train(data, check)
        except RuntimeError as error:
            raise ValueError("the training failed") from error
        """,
        "ZeroDivisionError: the real one",
    ),
    Crash(
        "spawned_worker",
        """
        def boom(index):
            raise OSError(f"file {index} is gone")  # HERE
        if __name__ == "__main__":
            import torch.multiprocessing as mp
            if bad:
                mp.start_processes(boom, nprocs=1, start_method="fork")
            train(data)
        """,
        "OSError: file 0 is gone",
    ),
    Crash(
        "group",
        """
        def check(step):
            if bad:
                raise ExceptionGroup("two of them", [ValueError("one"), KeyError("two")])  # HERE
        train(data, check)
        """,
        "ExceptionGroup: two of them (2 sub-exceptions)",
    ),
    Crash(
        "thread_pool",
        """
        from concurrent.futures import ThreadPoolExecutor
        def read(name):
            if bad:
                raise PermissionError(f"not yours: {name}")  # HERE
            return data
        with ThreadPoolExecutor(2) as pool:
            train(pool.submit(read, "images").result())
        """,
        "PermissionError: not yours: images",
    ),
]


def main() -> None:
    for crash in CRASHES:
        folder = Path(sys.argv[1]) / crash.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(crash.script)


if __name__ == "__main__":
    main()
