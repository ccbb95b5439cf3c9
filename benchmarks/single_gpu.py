"""`allranks run` with its defaults is the fastest way to train on one GPU, and on a CPU.

    python benchmarks/single_gpu.py                    # every row that this machine can run
    python benchmarks/single_gpu.py --only digits-cpu  # one row: under 8 minutes, mostly much less
    python benchmarks/single_gpu.py --only 124m --size tiny   # does every contender run? No figures

In a row all contenders train the same model on the same data with AdamW, clipping, and a rate that
changes at every step, each in a process of its own that lives until the row ends. They take turns:
in each round everyone makes one block of steps, after a few that do not count; the order is
reversed from round to round. The others meanwhile wait in the middle of their loop, with the memory
that they do not need given back. allranks is `allranks run`, unchanged, with its probe, events and
progress bar; a task of this file stops it between its steps. Each peer runs with its own defaults
and, as `fast`, with the settings that its documentation recommends for speed; `compiled` and
`graph` are the best loops that we could write by hand. Peers that are not installed are left out.

The rows time-N run `allranks run` from start to end, 124M for N steps, with `compile=` auto, false
and true, from an empty cache of compiled code and from one that a short run has filled.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from allranks.tasks import Task
from allranks.tasks.digits import Digits
from allranks.tasks.language import Language
from allranks.tasks.spiral import Spiral
from allranks.timing import timeline
from allranks.train.data import Batch, Progress, TrainingData
from allranks.train.optim import Schedule

ROW_SECONDS = 450.0  # what has not started by then is left out
PEAK_FLOPS = 989e12  # of an H100 or H200, dense bf16
PARAMETERS = {"124m": 124.4e6, "1.5b": 1557.6e6}  # as GPT-2's are counted, for the MFU
NUM_TOKENS = 20_000_000  # in the file that all read
STEPS = 1_000_000  # more than anyone reaches
RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.01, 1.0  # allranks' defaults
SETTLE_STEPS = 5  # of each turn, not counted: memory is taken again, caches fill
PEERS = {"lightning": "lightning", "accelerate": "accelerate", "trainer": "transformers"}
ADDRESS = "SINGLE_GPU_ADDRESS"  # where a contender hears whose turn it is
CLOCK = "SINGLE_GPU_CLOCK"

HAND = ("eager", "compiled", "graph")
OTHERS = tuple(name + fast for name in PEERS for fast in ("", " fast"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is trained, by whom, and what is claimed. The defaults: GPT-2 124M on a GPU."""

    task: str = "TimedLanguage"  # a class of this file
    options: Mapping[str, Any] = field(default_factory=lambda: {"size": "124m"})
    batch_size: int = 16
    contenders: tuple[str, ...] = ("allranks", *HAND, *OTHERS)
    goals: Mapping[str, float]  # how many times as fast as a contender allranks is, at least
    mfu: float = 0.0  # at least
    device: str = "cuda"
    rounds: int = 3
    block_seconds: float = 2.5
    warm_up_seconds: float = 3.0
    decide_seconds: float = 150.0  # at most, in which allranks compiles and decides


TENSORS: dict[str, Any] = {"task": "TimedDigits", "options": {"network": "mlp"}, "batch_size": 64}
ON_CPU: dict[str, Any] = {
    "contenders": ("allranks", "eager", "lightning", "lightning fast", "accelerate"),
    "goals": {"lightning": 2.0, "accelerate": 1.3, "eager": 0.97},
    "device": "cpu",
    "rounds": 24,
    "block_seconds": 0.5,
}
ROWS = {
    "124m": Row(goals={"lightning": 1.5, "compiled": 1.0}, mfu=0.44),
    "124m-batch64": Row(
        batch_size=64,
        contenders=("allranks", "eager", "compiled", "lightning", "lightning fast"),
        goals={"lightning": 1.5, "compiled": 1.0},
        mfu=0.48,
    ),
    "124m-batch2": Row(batch_size=2, goals={"lightning": 3.0}),
    "16m": Row(
        options={"size": "16m", "context": 1024},
        batch_size=8,
        goals={"lightning": 2.5, "graph": 0.95},
    ),
    "1.5b": Row(
        options={"size": "1.5b"},
        batch_size=8,
        contenders=("allranks", "eager", "compiled", "lightning"),
        goals={},
        mfu=0.46,
        decide_seconds=240.0,
    ),
    "digits": Row(**TENSORS, goals={"lightning": 8.0}),
    "digits-cpu": Row(**TENSORS, **ON_CPU),
    "spiral-cpu": Row(task="TimedSpiral", options={}, batch_size=32, **ON_CPU),
}
TIMES = {"time-200": 200, "time-1000": 1000, "time-3000-cold": 3000, "time-3000-warm": 3000}


# --- Whose turn it is ----------------------------------------------------------------------------


class Turns:
    """In a contender: called before every step, it waits there until it is this one's turn."""

    def __init__(self) -> None:
        self._parent = Client(os.environ[ADDRESS])
        self._left, self._started = 0, 0.0
        self._clock: Callable[[], float] = getattr(time, os.environ.get(CLOCK, "perf_counter"))

    def __call__(self) -> None:
        if self._left == 0:
            self._wait()
        self._left -= 1

    def _wait(self) -> None:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if on_gpu:
            torch.cuda.synchronize()
        is_choosing = timeline.current is not None and timeline.current.is_choosing
        self._parent.send((self._clock() - self._started, is_choosing))
        if on_gpu and not self._parent.poll(0.05):  # it is somebody else's turn
            torch.cuda.empty_cache()
        self._left = self._parent.recv()
        self._started = self._clock()


class Contender:
    """In the parent: a process that trains when it is told to."""

    def __init__(self, name: str, row: Row, folder: Path, deadline: float) -> None:
        self.name, self.deadline = name, deadline
        self.seconds: list[float] = []  # of a step, in each round
        self._is_choosing = False  # whether its steps may still become faster
        address = str(folder / f"{name.replace(' ', '-')}.socket")
        # One GPU, even where there are more: the Trainer would take them all.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        env = {**os.environ, ADDRESS: address}
        env["CUDA_VISIBLE_DEVICES"] = "" if row.device == "cpu" else visible
        self._listener = Listener(address)
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        self._said = ""
        terminal, end = pty.openpty()  # progress bars are drawn as on a terminal
        self._process = subprocess.Popen(
            command_of(name, row, folder), env=env, cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL, stdout=end, stderr=end, start_new_session=True,
        )  # fmt: skip
        os.close(end)
        threading.Thread(target=self._listen, args=(terminal,), daemon=True).start()

    def begin(self, row: Row) -> None:
        """Wait until it trains, and until its steps are steady."""
        self._turns = self._meet()
        self._receive()
        self._run(2)  # in which some compile
        began, passed, steps = time.monotonic(), 0.0, 2
        while passed < (row.decide_seconds if self._is_choosing else row.warm_up_seconds):
            seconds = self._run(steps) / steps
            steps = max(2, round(0.3 / seconds))
            passed = time.monotonic() - began
        self.steps = max(-(-60 // row.rounds), round(row.block_seconds / seconds))

    def turn(self) -> None:
        """Make a block of steps."""
        self._run(SETTLE_STEPS)
        self.seconds.append(self._run(self.steps) / self.steps)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # ranks die with their parent
        self._process.wait()
        self._listener.close()

    def _run(self, steps: int) -> float:
        self._turns.send(steps)
        return self._receive()

    def _receive(self) -> float:
        with suppress(EOFError, ConnectionError):
            if not self._turns.poll(max(1.0, self.deadline - time.monotonic())):
                raise LeftOut(f"no time was left: {self._last_words()}")
            seconds: float
            seconds, self._is_choosing = self._turns.recv()
            return seconds
        raise LeftOut(f"it ended: {self._last_words()}")

    def _meet(self) -> Connection:
        while time.monotonic() < self.deadline and self._process.poll() is None:
            with suppress(TimeoutError):
                return self._listener.accept()
        raise LeftOut(f"it did not train: {self._last_words()}")

    def _listen(self, terminal: int) -> None:
        with suppress(OSError):  # the other end was closed
            while said := os.read(terminal, 65536):
                self._said = (self._said + said.decode(errors="replace"))[-4000:]

    def _last_words(self) -> str:
        time.sleep(0.5)  # for what is still on its way
        lines = [line.strip() for line in self._said.splitlines() if line.strip()]
        return " | ".join(lines[-8:])[-400:]


class LeftOut(Exception):
    """Why a contender has no figure."""


def command_of(name: str, row: Row, folder: Path) -> list[str]:
    work = {"task": row.task, "options": row.options, "batch_size": row.batch_size}
    if name != "allranks":
        this = [sys.executable, __file__, "--contender", name]
        return [*this, json.dumps({**work, "device": row.device})]
    job = {**work, "task": f"single_gpu:{row.task}", "steps": STEPS, "name": "single-gpu"}
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    run = [sys.executable, "-m", "allranks", "run", str(folder / "job.yaml")]
    return [*run, "--runs", str(folder / "runs")]


# --- What is trained -----------------------------------------------------------------------------


class Timed(Task):
    """A task without evaluation, whose epochs are whole batches; in a rank it waits its turn."""

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        dataset = super().datasets()["train"]
        if isinstance(dataset, TensorDataset):
            count = len(dataset) // 64 * 64
            dataset = TensorDataset(*(tensor[:count] for tensor in dataset.tensors))
        if "ALLRANKS_RUN_DIR" in os.environ:
            wait_in_training()
        return {"train": dataset}


@dataclass
class TimedDigits(Timed, Digits):
    pass


@dataclass
class TimedSpiral(Timed, Spiral):
    pass


@dataclass
class TimedLanguage(Timed, Language):
    pass


def wait_in_training() -> None:
    """Have the training of this rank ask before every step."""
    original = TrainingData.batches

    def batches(self: TrainingData, progress: Progress) -> Iterator[Batch]:
        turns = Turns()
        for batch in original(self, progress):
            turns()
            yield batch

    TrainingData.batches = batches  # type: ignore[method-assign]


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """What one would write for a DataLoader; the same windows of the same file."""

    def __init__(self, path: str, context: int) -> None:
        self.tokens = np.memmap(path, "<u2", mode="r")
        self.length = context + 1

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length]
        tokens = torch.from_numpy(window.astype(np.int64))
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True, slots=True)
class Work:
    """What every contender trains, in its own process."""

    task: Task
    model: nn.Module
    batch_size: int
    device: torch.device
    turns: Turns

    @classmethod
    def of(cls, task: str, options: dict[str, Any], batch_size: int, device: str) -> Work:
        torch.manual_seed(0)
        made: Task = globals()[task](**options)
        return cls(made, made.model(), batch_size, torch.device(device), Turns())

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.task.loss(outputs, targets)
        assert isinstance(losses, Tensor)
        return losses.mean()

    def loader(self, *, fast: bool) -> DataLoader[Any]:
        """A DataLoader with its defaults, or with what is recommended."""
        dataset = self.task.datasets()["train"]
        options: dict[str, Any] = {}
        if isinstance(self.task, Language):
            dataset = Tokens(str(self.task.tokens), self.task.shape.context)
            if fast:
                options = {"num_workers": 4, "persistent_workers": True}
        if fast:
            options["pin_memory"] = self.on_gpu
        return DataLoader(dataset, self.batch_size, shuffle=True, drop_last=True, **options)

    def optimizer(self, model: nn.Module, *, fused: bool, graph: bool = False) -> torch.optim.AdamW:
        rate = torch.tensor(RATE, device=self.device) if graph else RATE
        return torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, fused=fused or None,
            capturable=graph,
        )  # fmt: skip

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        rate = schedule().rate
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step + 1) / RATE)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.on_gpu else nullcontext()


def schedule() -> Schedule:
    from allranks.job.job import Optimizer

    return Schedule(Optimizer(lr=RATE), num_steps=STEPS)


# --- The contenders ------------------------------------------------------------------------------


def by_hand(work: Work, *, compiled: bool = False, graph: bool = False) -> None:
    """A loop without anything that is not needed, and with everything that makes it fast."""
    model = work.model.to(work.device)
    optimizer = work.optimizer(model, fused=True, graph=graph)
    rate = schedule().rate

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with work.autocast():
            if compiled and isinstance(work.task, Language):
                return loss_in_chunks(work, model, inputs, targets)
            return work.loss(model(inputs), targets)

    compute = torch.compile(loss_of) if compiled else loss_of

    def step(inputs: Tensor, targets: Tensor) -> None:
        compute(inputs, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    stream = batches_by_hand(work)
    act = as_graph(step, stream) if graph else step
    for number in itertools.count(1):
        work.turns()
        for group in optimizer.param_groups:
            if graph:
                group["lr"].fill_(rate(number))
            else:
                group["lr"] = rate(number)
        act(*next(stream))


def loss_in_chunks(work: Work, model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a GPT, without the logits of the whole batch in memory."""
    x = model.embedding(inputs)
    for block in model.blocks:
        x = block(x)
    parts = zip(x.chunk(2), targets.chunk(2), strict=True)
    losses = [work.loss(model.head(part), target) * len(part) for part, target in parts]
    return torch.stack(losses).sum() / len(x)


def as_graph(
    step: Callable[[Tensor, Tensor], None], stream: Iterator[tuple[Tensor, Tensor]]
) -> Callable[[Tensor, Tensor], None]:
    """The whole step as one CUDA graph."""
    inputs, targets = (tensor.clone() for tensor in next(stream))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(11):
            step(inputs, targets)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> None:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        captured.replay()

    return replay


def batches_by_hand(work: Work) -> Iterator[tuple[Tensor, Tensor]]:
    """Small data sets on the device, shuffled once an epoch; tokens from their file, pinned.

    What the host does for a batch overlaps with the step that was launched before.
    """
    dataset: Any = work.task.datasets()["train"]
    is_tensors = isinstance(dataset, TensorDataset)
    tensors = [tensor.to(work.device) for tensor in dataset.tensors] if is_tensors else []
    while True:
        order = torch.randperm(len(dataset))
        shuffled = [tensor[order.to(work.device)] for tensor in tensors]
        for start in range(0, len(dataset) - work.batch_size + 1, work.batch_size):
            stop = start + work.batch_size
            if is_tensors:
                inputs, targets = (tensor[start:stop] for tensor in shuffled)
            else:
                inputs, targets = dataset.batch(order[start:stop].tolist())
                if work.on_gpu:
                    inputs, targets = (
                        tensor.pin_memory().to(work.device, non_blocking=True)
                        for tensor in (inputs, targets)
                    )
            yield inputs, targets


def lightning(work: Work, *, fast: bool) -> None:
    import lightning

    model = torch.compile(work.model) if fast and work.on_gpu else work.model

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = work.loss(self.model(batch[0]), batch[1])
            if not fast:
                self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = work.optimizer(self, fused=fast)
            scheduler = {"scheduler": work.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            work.turns()

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if fast:  # Lightning's own refuses a fused optimizer in bf16, too
                nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)
            else:
                super().configure_gradient_clipping(optimizer, *args, **kwargs)

    lightning.Trainer(
        max_steps=STEPS,
        precision="bf16-mixed" if work.on_gpu else "32-true",
        accelerator="gpu" if work.on_gpu else "cpu",
        devices=1,
        gradient_clip_val=MAX_NORM,
        barebones=fast,
        default_root_dir=tempfile.mkdtemp(),
    ).fit(Module(), work.loader(fast=fast))


def accelerate(work: Work, *, fast: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=not work.on_gpu,
        mixed_precision="bf16" if work.on_gpu else "no",
        dynamo_backend="inductor" if fast and work.on_gpu else "no",
    )
    optimizer = work.optimizer(work.model, fused=fast)
    model, optimizer, loader, scheduler = accelerator.prepare(
        work.model, optimizer, work.loader(fast=fast), work.schedule(optimizer)
    )
    while True:
        for inputs, targets in loader:
            work.turns()
            accelerator.backward(work.loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def trainer(work: Work, *, fast: bool) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": work.loss(self.model(inputs), targets)}

    wait = {"on_step_begin": lambda *args, **kwargs: work.turns()}
    loader = work.loader(fast=fast)
    settings: dict[str, Any] = {}
    if fast:
        settings = {
            "torch_compile": work.on_gpu,
            "optim": "adamw_torch_fused",
            "disable_tqdm": True,
            "dataloader_num_workers": loader.num_workers,
            "dataloader_persistent_workers": loader.persistent_workers,
        }
    Trainer(
        model=Model(),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=work.batch_size,
            max_steps=STEPS,
            learning_rate=RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="cosine",
            bf16=work.on_gpu,
            use_cpu=not work.on_gpu,
            report_to="none",
            save_strategy="no",
            remove_unused_columns=False,
            dataloader_drop_last=True,
            **settings,
        ),
        train_dataset=loader.dataset,
        data_collator=lambda rows: dict(
            zip(("inputs", "targets"), default_collate(rows), strict=True)
        ),
        callbacks=[type("Wait", (TrainerCallback,), wait)()],
    ).train()


CONTENDERS: dict[str, Callable[[Work], None]] = {
    "eager": by_hand,
    "compiled": partial(by_hand, compiled=True),
    "graph": partial(by_hand, compiled=True, graph=True),
    **{
        name + " fast" * fast: partial(globals()[name], fast=bool(fast))
        for name in PEERS
        for fast in (0, 1)
    },
}


# --- Measuring -----------------------------------------------------------------------------------


def compare(row: Row, folder: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds a step of each contender in each round, and why some have none."""
    deadline = time.monotonic() + ROW_SECONDS
    left_out: dict[str, str] = {}
    started: list[Contender] = []

    def try_it(contender: Contender, act: Callable[[], None]) -> None:
        try:
            act()
        except LeftOut as why:
            left_out[contender.name] = str(why)
            contender.end()

    try:
        for name in row.contenders:
            package = PEERS.get(name.split()[0])
            if package and importlib.util.find_spec(package) is None:
                left_out[name] = f"{package} is not installed"
            elif row.device == "cpu" and name == "graph":
                left_out[name] = "it needs a GPU"
            else:  # all at once: importing and building take a while
                started.append(Contender(name, row, folder, deadline))
        for contender in started:
            try_it(contender, partial(contender.begin, row))
        longest = 0.0
        for number in range(row.rounds):
            began = time.monotonic()
            if number and began + longest > deadline:
                break  # what was measured counts, and is said to be fewer rounds
            for contender in started[:: -1 if number % 2 else 1]:
                if contender.name not in left_out:
                    try_it(contender, contender.turn)
            longest = max(longest, time.monotonic() - began)
    finally:
        for contender in started:
            contender.end()
    return {one.name: one.seconds for one in started if one.name not in left_out}, left_out


def show(name: str, row: Row, seconds: dict[str, list[float]], left_out: dict[str, str]) -> bool:
    """Print a row's table; whether its claims hold."""
    shape = shape_of(row)
    per_step = row.batch_size * (shape.context if shape else 1)
    unit = ("tokens" if shape else "samples") + "/s"
    rounds = max(map(len, seconds.values()), default=0)
    print(f"\n{name}: batch {row.batch_size}, medians of {rounds} rounds")
    print(f"{'':16}   ms/step {unit:>12}    MFU  allranks is      interval  claim")
    ours, holds = seconds.get("allranks"), {"allranks", *row.goals} <= set(seconds)
    for contender, measured in seconds.items():
        step = statistics.median(measured)
        mfu = mfu_of(row, per_step / step)
        line = f"{contender:16} {1e3 * step:9.3f} {per_step / step:12,.0f} "
        line += f"{mfu:6.1%}" if mfu else f"{'':6}"
        if contender == "allranks":
            if mfu and row.mfu:
                holds &= mfu >= row.mfu
                line += f"{'':28}MFU >= {row.mfu:.0%}: {'yes' if mfu >= row.mfu else 'NO'}"
        elif ours:
            ratios = [theirs / mine for theirs, mine in zip(measured, ours, strict=True)]
            low, high = interval(ratios)
            line += f" {statistics.median(ratios):11.2f}x {low:6.2f}-{high:.2f}"
            goal = row.goals.get(contender)
            if goal:
                line += f"  >= {goal:.2f}x: {'yes' if high >= goal else 'NO'}"
                holds &= high >= goal
        print(line)
    for contender, why in left_out.items():
        print(f"{contender:16} left out: {why}")
    return holds


def interval(values: list[float]) -> tuple[float, float]:
    """Between which the median lies with 95%: by resampling."""
    draw = random.Random(0).choices
    medians = sorted(statistics.median(draw(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def shape_of(row: Row) -> Any:
    return Language(**row.options).shape if row.task == "TimedLanguage" else None


def mfu_of(row: Row, tokens_per_second: float) -> float:
    """The part of the GPU's peak that the model's own operations are; 0 if it is not known."""
    shape, parameters = shape_of(row), PARAMETERS.get(row.options.get("size", ""), 0.0)
    if row.device == "cpu" or not parameters:
        return 0.0
    flops = 6 * parameters + 12 * shape.layers * shape.width * shape.context
    return float(flops * tokens_per_second / PEAK_FLOPS)


def time_to_finish(name: str, steps: int, row: Row, folder: Path) -> bool:
    """Time whole runs of `allranks run`; whether `auto` is nearly the best."""
    print(f"\n{name}: {steps} steps, batch {row.batch_size}; seconds from the command to its end")
    holds = True
    eager = whole_run(steps, row, folder, "false", folder / "eager")
    for state in ("cold", "warm"):
        if not name.endswith((state, str(steps))):
            continue  # a row of this state alone
        caches = {choice: folder / f"{state}-{choice}" for choice in ("auto", "true")}
        if state == "warm":
            for cache in caches.values():
                whole_run(20, row, folder, "true", cache)
        auto, compiled = (whole_run(steps, row, folder, *one) for one in caches.items())
        ratio = auto / min(eager, compiled)
        verdict = "yes" if ratio <= 1.05 else "NO"
        print(
            f"{state} cache: auto {auto:.1f}, false {eager:.1f}, true {compiled:.1f};"
            f" auto takes {ratio:.2f}x the better, at most 1.05x: {verdict}",
            flush=True,
        )
        holds &= ratio <= 1.05
    return holds


def whole_run(steps: int, row: Row, folder: Path, compile: str, cache: Path) -> float:
    """Seconds of a run whose compilers keep what they make in `cache`."""
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }
    if row.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    options = [f"options.{key}={value}" for key, value in row.options.items()]
    words = ["task=language", *options, f"batch_size={row.batch_size}", f"steps={steps}"]
    command = [sys.executable, "-m", "allranks", "run", "--runs", str(folder / "runs"), *words]
    began = time.monotonic()
    subprocess.run([*command, f"compile={compile}"], env=env, check=True, capture_output=True)
    return time.monotonic() - began


def with_tokens(row: Row, folder: Path) -> Row:
    """The row with a file of tokens, distributed as words are."""
    if row.task != "TimedLanguage":
        return row
    vocabulary = shape_of(row).vocabulary
    path = folder / f"{vocabulary}.bin"
    if not path.exists():
        tokens = np.random.default_rng(0).zipf(1.2, NUM_TOKENS) % vocabulary
        tokens.astype("<u2").tofile(path)
    return replace(row, options={**row.options, "tokens": str(path)})


def smallest(row: Row) -> Row:
    """A row to see whether everything runs, wherever that is."""
    options = {"size": "tiny"} if row.task == "TimedLanguage" else row.options
    device = row.device if torch.cuda.is_available() else "cpu"
    return replace(
        row, options=options, batch_size=min(row.batch_size, 64), device=device,
        block_seconds=0.2, warm_up_seconds=0.5, decide_seconds=0.5, rounds=3,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*ROWS, *TIMES], action="append", help="default: all")
    parser.add_argument("--size", choices=["tiny"], help="does everything run? no figures")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU rows: the CPU time of the training process, all its threads, instead of the"
        " clock's; for a machine that is busy with other work, with OMP_NUM_THREADS=1",
    )
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.contender:
        name, work = wanted.contender
        CONTENDERS[name](Work.of(**json.loads(work)))
        return 0
    if wanted.cpu_time:
        os.environ[CLOCK] = "process_time"
    holds = True
    for name in wanted.only or [*ROWS, *TIMES]:
        row = ROWS.get(name, ROWS["124m"])
        row = smallest(row) if wanted.size else row
        row = replace(row, rounds=wanted.rounds or row.rounds)
        if row.device == "cuda" and not torch.cuda.is_available():
            print(f"{name}: left out, it needs a GPU")
            continue
        with tempfile.TemporaryDirectory(prefix="single-gpu-") as folder:
            row = with_tokens(row, Path(folder))
            if name in TIMES:
                holds &= time_to_finish(name, TIMES[name], row, Path(folder))
            else:
                holds &= show(name, row, *compare(row, Path(folder)))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
