"""How many stages and micro-batches a pipeline has, and what is impossible."""

from __future__ import annotations

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.layout import Layout

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
MICRO_BATCHES_PER_STAGE = 4  # unless the job says: less than a fifth of the time is spent waiting


def num_micro_batches(job: Job, layout: Layout, batch_size: int) -> int:
    """How many micro-batches a rank's share of the batch is cut into. Raises AllranksError.

    As many as the job says, or enough to keep the stages busy, as far as the batch allows.
    """
    schedule, wanted, size = job.pipeline.schedule, job.pipeline.micro_batches, job.micro_batch_size
    if schedule == "zero-bubble":
        for key in ("activation_checkpointing", "compile"):
            if getattr(job, key) not in ("off", "auto", False):
                raise AllranksError(
                    f"pipeline.schedule zero-bubble cuts backward passes in two, which does not "
                    f"work with {key}",
                    fix=f"write pipeline.schedule=1f1b, or leave out {key}",
                )
    share = -(-batch_size // layout.data_ranks)
    possible = possible_numbers(schedule, layout.pp, share)
    if wanted is not None and wanted not in possible:
        why = f"a rank's share of the batch has {share} samples"
        if wanted <= share:
            why = f"{schedule} works in rounds of about {layout.pp} of them, all equally long"
        near = sorted(possible, key=lambda n: abs(n - wanted))[:2]
        raise AllranksError(
            f"pipeline.micro_batches is {wanted}, but {why}",
            fix="write pipeline.micro_batches=" + " or ".join(str(n) for n in sorted(near)),
        )
    if wanted is not None:
        return wanted
    if isinstance(size, int):
        return min(n for n in possible if n >= -(-share // size)) if size < share else 1
    return max(n for n in possible if n <= MICRO_BATCHES_PER_STAGE * layout.pp)


def possible_numbers(schedule: str, num_ranks: int, share: int) -> list[int]:
    """The numbers of micro-batches into which a pipeline can cut a share of so many samples."""
    return [number for number in range(1, share + 1) if _in_rounds(number, num_ranks, schedule)]


def _in_rounds(number: int, num_ranks: int, schedule: str) -> bool:
    """Whether the schedule can work on so many micro-batches."""
    return schedule in ("gpipe", "1f1b") or number % max(1, number // num_ranks) == 0


def check_stages(layout: Layout, schedule: str, num_blocks: int) -> int:
    """How many stages the layout has. Raises AllranksError if there are not enough blocks.

    `num_blocks` counts the blocks with weights: the others stay with the one before.
    """
    num_stages = layout.pp * STAGES_PER_RANK[schedule]
    if num_stages <= num_blocks:
        return num_stages
    fixes = []
    if layout.pp <= num_blocks:
        fixes.append("pipeline.schedule=1f1b")
    others = layout.ranks // layout.pp
    depths = [pp for pp in range(layout.pp - 1, 0, -1) if layout.ranks % (pp * others) == 0]
    depths = [pp for pp in depths if pp * STAGES_PER_RANK[schedule] <= num_blocks]
    for pp in depths[:1]:
        axes = Layout(
            layout.nodes, layout.gpus, layout.ranks // (layout.fsdp * layout.tp * pp),
            layout.fsdp, layout.tp, pp,
        )  # fmt: skip
        fixes.append(f"--layout {axes}")
    each = (
        f", {STAGES_PER_RANK[schedule]} for each rank of a pipeline"
        if layout.pp < num_stages
        else ""
    )
    raise AllranksError(
        f"layout {layout} with pipeline.schedule {schedule} has {num_stages} stages{each}, but the "
        f"model has only {num_blocks} blocks with weights of their own",
        fix=f"write {' or '.join(fixes)}" if fixes else "use a model with more blocks",
    )
