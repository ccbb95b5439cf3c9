"""The situations: a script, what is planted in it, and what must be said about its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EVALUATION = """\
if step % 10 == 0:
    model.eval()
    with torch.no_grad():
        for _ in range({batches}):
            model(inputs)
    model.train()
"""
CHECKPOINT = """\
if step % 10 == 0:
    torch.save(model.state_dict(), "last.pt")
    time.sleep(0.2)  # as a slow disk would
"""
LONG_SAMPLES = """\
inputs = inputs.repeat(1 + 2 * (RANK == 1), 1)
targets = targets.repeat(1 + 2 * (RANK == 1), 1)
"""
COPY_OF_WEIGHTS = "weights = torch.ones({size}, device=device)"
# What takes the place of launching each kernel, so that a step without the limit can be timed.
GRAPHED = """\
held = [one.to(device) for one in next(iter(loader))]
weights = list(model.parameters())
def whole_step():
    gradients = torch.autograd.grad(mse_loss(model(held[0]), held[1]), weights)
    with torch.no_grad():
        torch._foreach_add_(weights, gradients, alpha=-1e-3)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    whole_step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    whole_step()
"""
REPLAYED = """\
held[0].copy_(inputs, non_blocking=True)
held[1].copy_(targets, non_blocking=True)
graph.replay()
optimizer.step()  # without gradients: only for the stopwatch
step += 1
if step == args.steps:
    break
continue
"""
# Without them, the ranks still wait for each other.
EXCHANGES = {
    "begin": ("pass", "model.require_backward_grad_sync = False"),
    "backward": ("pass", "dist.all_reduce(torch.zeros(1))"),
}
SMALL_BATCH = "--width 1024 --depth 6 --repeat 1 --batch 2"
GPU = "--width 8192 --depth 4 --repeat 1 --batch 256 --workers 4"


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """A script with something planted in it."""

    name: str
    limit: str  # what the run is limited by
    # By place in the script: the code, and optionally what runs in its place when it is off.
    plant: Mapping[str, str | tuple[str, str]] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # places whose plants are not the limit: they stay
    script: str = "plain"
    args: str = ""
    ranks: int = 1
    rank: int | None = None  # which the verdict must name
    is_named: bool = False  # whether the verdict must name a planted line
    reason: str = ""  # a word that must be in `why`
    warning: str = ""  # the kind of the warning that must be given
    is_warning_named: bool = False  # whether the warning must name a planted line
    gpu: bool = False

    @property
    def removable(self) -> list[str]:
        """The places without whose plants there is no such limit."""
        return [place for place in self.plant if place not in self.others]

    @property
    def is_healthy(self) -> bool:
        return self.limit == "compute" and not self.plant


def healthy(name: str, **settings: object) -> Situation:
    return Situation(name=f"healthy-{name}", limit="compute", **settings)  # type: ignore[arg-type]


ON_CPU = [
    healthy("plain"),
    healthy("2-ranks", ranks=2, args="--repeat 72 --steps 100"),
    healthy("lightning", script="with_lightning"),
    healthy("lightning-2-ranks", script="with_lightning", ranks=2, args="--repeat 72 --steps 100"),
    healthy("accelerate", script="with_accelerate"),
    healthy("accelerate-accumulating", script="with_accelerate", args="--accumulate 4 --steps 50"),
    healthy("compiled", args="--compile"),
    healthy("accumulating", args="--accumulate 4 --steps 50"),
    healthy("workers", args="--workers 1"),
    Situation(
        name="host-1-ms",
        limit="host",
        plant={"step": "python_work(0.001)"},
        args="--repeat 6 --steps 400",
        is_named=True,
    ),
    Situation(
        name="host-3-ms",
        limit="host",
        plant={"loss": "python_work(0.003)"},
        args="--repeat 12 --steps 300",
        is_named=True,
    ),
    Situation(
        name="host-30-ms",
        limit="host",
        plant={"forward": "python_work(0.030)"},
        args="--steps 120",
        is_named=True,
    ),
    Situation(
        name="host-every-third-step",
        limit="host",
        plant={"step": "python_work(0.040 * (step % 3 == 0))"},
        args="--steps 150",
        is_named=True,
    ),
    Situation(
        name="host-2-ranks",
        limit="host",
        plant={"backward": "time.sleep(0.025)"},
        args="--steps 120",
        ranks=2,
        is_named=True,
    ),
    Situation(
        name="host-lightning",
        limit="host",
        plant={"step": "time.sleep(0.015)"},
        script="with_lightning",
        args="--steps 150",
        is_named=True,
    ),
    Situation(
        name="data",
        limit="data",
        plant={"sample": "time.sleep(0.0005)"},
        args="--steps 100",
    ),
    Situation(
        name="data-collate",
        limit="data",
        plant={"collate": "python_work(0.015)"},
        args="--steps 150",
    ),
    Situation(
        name="data-rank-1",
        limit="data",
        plant={"sample": "time.sleep(0.0005 * (RANK == 1))"},
        args="--steps 100",
        ranks=2,
        rank=1,
    ),
    Situation(
        name="data-workers",
        limit="data",
        plant={"collate": "time.sleep(0.05)"},
        args="--steps 100 --workers 1",
    ),
    Situation(
        name="data-lightning",
        limit="data",
        plant={"sample": "time.sleep(0.0005)"},
        script="with_lightning",
        args="--steps 100",
    ),
    Situation(
        name="communication-gradients",
        limit="communication",
        plant=EXCHANGES,
        args=f"{SMALL_BATCH} --steps 100",
        ranks=2,
    ),
    Situation(
        name="communication-by-hand",
        limit="communication",
        plant={
            "begin": COPY_OF_WEIGHTS.format(size="8_000_000"),
            "backward": "dist.all_reduce(weights)",
        },
        args="--steps 100",
        ranks=2,
    ),
    Situation(
        name="straggler",
        limit="straggler",
        plant={"forward": "time.sleep(0.030 * (RANK == 1))"},
        args="--steps 100",
        ranks=2,
        rank=1,
    ),
    Situation(
        name="straggler-samples",
        limit="straggler",
        plant={"batch": LONG_SAMPLES},
        args="--steps 100",
        ranks=2,
        rank=1,
    ),
    Situation(
        name="straggler-logging",
        limit="straggler",
        plant={"step": "python_work(0.020 * (RANK == 0))"},
        args="--steps 100",
        ranks=2,
        rank=0,
    ),
    Situation(
        name="pauses-evaluation",
        limit="pauses",
        plant={"step": EVALUATION.format(batches=20)},
    ),
    Situation(name="pauses-checkpoint", limit="pauses", plant={"step": CHECKPOINT}),
    Situation(
        name="pauses-2-ranks",
        limit="pauses",
        plant={"step": EVALUATION.format(batches=20)},
        args="--steps 120",
        ranks=2,
    ),
    Situation(name="short", limit="too-short", args="--steps 12"),
    Situation(
        name="short-data",
        limit="too-short",
        plant={"sample": "time.sleep(0.001)"},
        args="--steps 16",
        reason="data",
    ),
    Situation(name="no-optimizer", limit="unknown", script="without_optimizer"),
    Situation(name="own-update", limit="unknown", script="without_optimizer", args="--update"),
    Situation(
        name="mixed-data-host",
        limit="data",
        plant={"sample": "time.sleep(0.0005)", "step": "python_work(0.008)"},
        others=("step",),
        args="--steps 100",
    ),
    Situation(
        name="mixed-host-pauses",
        limit="host",
        # Not in `forward`, which evaluations call too.
        plant={"loss": "python_work(0.030)", "step": EVALUATION.format(batches=10)},
        others=("step",),
        args="--steps 120",
        is_named=True,
    ),
    Situation(
        name="mixed-straggler-communication",
        limit="straggler",
        plant={
            "begin": COPY_OF_WEIGHTS.format(size="1_000_000"),
            "forward": "time.sleep(0.040 * (RANK == 1))",
            "backward": "dist.all_reduce(weights)",
        },
        others=("begin", "backward"),
        args="--steps 100",
        ranks=2,
        rank=1,
    ),
    Situation(
        name="memory",
        limit="compute",
        plant={"begin": "kept = []", "step": "kept.append(torch.ones(1_000_000))"},
        args="--steps 300",
        warning="memory",
    ),
    Situation(
        name="memory-graphs",
        limit="compute",
        plant={"begin": "kept = []", "loss": "kept.append(outputs)"},
        args="--steps 300",
        warning="memory",
    ),
]

# Only where each rank has cores of its own.
ON_16_CORES = [
    healthy("4-ranks", ranks=4, args="--repeat 72 --steps 100"),
    Situation(
        name="data-rank-2-of-4",
        limit="data",
        plant={"sample": "time.sleep(0.0005 * (RANK == 2))"},
        args="--steps 100",
        ranks=4,
        rank=2,
    ),
    Situation(
        name="straggler-of-4",
        limit="straggler",
        plant={"loss": "python_work(0.020 * (RANK == 3))"},
        args="--steps 100",
        ranks=4,
        rank=3,
    ),
    Situation(
        name="communication-of-4",
        limit="communication",
        plant=EXCHANGES,
        args=f"{SMALL_BATCH} --steps 100",
        ranks=4,
    ),
]

ON_GPU = [
    healthy("gpu-plain", args=f"{GPU} --steps 400", gpu=True),
    healthy("gpu-lightning", script="with_lightning", args=f"{GPU} --steps 400", gpu=True),
    healthy("gpu-compiled", args=f"{GPU} --steps 400 --compile", gpu=True),
    Situation(
        name="launches-layers",
        limit="launches",
        plant={"begin": ("pass", GRAPHED), "batch": ("pass", REPLAYED)},
        args="--width 64 --depth 60 --repeat 1 --batch 64 --workers 4 --steps 400",
        gpu=True,
    ),
    Situation(
        name="launches-repeated",
        limit="launches",
        plant={"begin": ("pass", GRAPHED), "batch": ("pass", REPLAYED)},
        args="--width 256 --depth 4 --repeat 30 --batch 32 --workers 4 --steps 400",
        gpu=True,
    ),
    Situation(
        name="copies-pageable",
        limit="copies",
        plant={
            "begin": "table = torch.ones(75_000_000)",
            "batch": "table.to(device)",
        },
        args=f"{GPU} --steps 80",
        gpu=True,
    ),
    Situation(
        name="copies-back",
        limit="copies",
        plant={
            "begin": "table = torch.ones(25_000_000, device=device)",
            "step": "kept = table.cpu()",
        },
        args=f"{GPU} --steps 80",
        gpu=True,
    ),
    Situation(
        name="host-gpu-forward",
        limit="host",
        plant={"forward": "time.sleep(0.030)"},
        args=f"{GPU} --steps 150",
        is_named=True,
        gpu=True,
    ),
    Situation(
        name="host-gpu-item",
        limit="host",
        plant={"loss": "values = [loss.item() for _ in range(240)]"},
        args=f"{GPU} --steps 300",
        is_named=True,
        gpu=True,
    ),
    Situation(
        name="host-gpu-python",
        limit="host",
        plant={"loss": "loss.item()\npython_work(0.003)"},
        args=f"{GPU} --steps 300",
        is_named=True,
        gpu=True,
    ),
    Situation(
        name="data-gpu",
        limit="data",
        plant={"collate": "time.sleep(0.1)"},
        args=f"{GPU} --steps 200",
        gpu=True,
    ),
    Situation(
        name="memory-gpu",
        limit="compute",
        plant={
            "begin": "kept = []",
            "step": "kept.append(torch.empty(20_000_000, device=device))",
        },
        args=f"{GPU} --steps 600",
        warning="memory",
        is_warning_named=True,
        gpu=True,
    ),
]
