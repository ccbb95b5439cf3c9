"""Which program printed a line: words that many programs use count only from the right one.

A pattern of the catalogue that is not unmistakable names its speaker, the program that must have
printed it. It is recognised by the line itself, by the frames of the traceback that the line
belongs to, or by the lines around it; what describes a whole log (`ranks`) may be anywhere in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allranks.doctor.log_search import Hit, Scanned, parse, read_around
from allranks.doctor.tracebacks import Raised

AROUND_BYTES = 2000  # before and after a line
AROUND_LINES = 6
MESSAGE_LINES = 8  # of an exception
WHOLE_BYTES = 1 << 16  # of a log's beginning and of its end
MAX_LOGS = 16  # whose beginnings and ends are read
# Lines of source code: rich shows them in a box, IPython with an arrow.
_SOURCE = re.compile(r"\s*[│┃❱]|-+> ?\d+ |\s+(?:raise|assert|except)\b")


@dataclass(frozen=True, slots=True)
class Speaker:
    """The lines and frames by which a program is recognised."""

    expression: str
    is_anywhere: bool = False  # in a log, rather than near a line

    def speaks(self, text: str) -> bool:
        return re.search(self.expression, text) is not None


_STORE = r"torch[./]distributed|\bc10d\b|socket\.cpp|TCPStore|rendezvous|init_process_group"
_GLOO = r"\b[Gg]loo\b|transport/tcp/"
_GROUPS = rf"{_STORE}|{_GLOO}|ProcessGroup|\bNCCL|\bnccl[A-Z_/]|horovod|\bDist\w+Error|\bMPI_"
_TORCH = (
    r"\btorch(?:vision|audio)?[./]|\bc10::|\bATen\b|[Ll]ightning|deepspeed|accelerate/|safetensors"
    r"|transformers/|diffusers/|mmcv|mmengine|detectron2|fairseq|megatron|ultralytics|timm/"
)
SPEAKERS = {
    "c10d": Speaker(_STORE),
    "groups": Speaker(_GROUPS),
    "nccl": Speaker(r"\bNCCL|\bnccl[A-Z]"),
    "gloo": Speaker(_GLOO),
    "torch": Speaker(rf"{_TORCH}|{_GROUPS}"),
    "loading": Speaker(
        r"torch/serialization|torch\.load|load_state_dict|safetensors|checkpoint|\bckpt\b"
    ),
    "cuda": Speaker(r"CUDA|\bcuda|NVIDIA|nvidia|\bGPU"),
    "slurm": Speaker(
        r"\b(?:s(?:batch|run|alloc|queue|control|acct|info)|slurm\w*(?:-[\w.-]+)?|run\.json): "
        r"|JobId=|StepId=|BatchFlag=|JobState=|\bslurm_\w+|[Ss]lurm(?:ctld|stepd|d)\b"
        r"|\*\*\* (?:JOB|STEP) \d|NODELIST|JobID .*State"
    ),
    "environment": Speaker(r"\bos\.py \w|environ"),
    "ranks": Speaker(
        rf"{_GROUPS}|\[rank\d+\]|\btorchrun\b|deepspeed|accelerate[ /.](?:launch|commands)"
        r"|DistributedDataParallel|DistributedSampler|\bFSDP\b|\bDDP\b|\b(?:LOCAL_RANK|WORLD_SIZE)"
        r"|MASTER_(?:ADDR|PORT)|world_size|local_rank|nproc.per.node|\b(?:srun|slurmstepd\S*): "
        r"|SLURM_|GLOBAL_RANK|multiprocessing[./]spawn|mpirun|elastic",
        is_anywhere=True,
    ),
}


def spoken(
    hits: Sequence[Hit], raised: Sequence[Raised], scanned: Sequence[Scanned], *, of_ranks: bool
) -> list[Hit]:
    """The hits whose speaker is recognised, and that are not quoted source code.

    `of_ranks`: the logs are known to be of ranks.
    """
    known = dict.fromkeys(
        (name for name, one in SPEAKERS.items() if one.is_anywhere and of_ranks), of_ranks
    )

    def is_heard(name: str, hit: Hit, inside: Sequence[Raised]) -> bool:
        speaker = SPEAKERS[name]
        # What a command printed has its name, as the lines of srun do.
        if speaker.speaks(f"{hit.source.path.name}: {hit.line.text}"):
            return True
        if not speaker.is_anywhere:
            texts = _of_traceback(inside) if inside else _around(hit)
            return any(map(speaker.speaks, texts))
        if name not in known:
            known[name] = any(map(speaker.speaks, _ends_of(scanned)))
        return known[name] or any(map(speaker.speaks, _around(hit)))

    def is_said(hit: Hit) -> bool:
        needed = hit.cause.speakers(hit.line.text)
        if hit.cause.kind == "mark" and not needed:
            return True
        inside = [one for one in raised if is_near(hit, one)]
        if any(_is_source(hit, one) for one in inside) or _SOURCE.match(hit.line.text):
            return False
        return not needed or any(is_heard(name, hit, inside) for name in needed)

    return [hit for hit in hits if is_said(hit)]


def is_near(hit: Hit, raised: Raised) -> bool:
    """Whether a hit is part of a traceback or of the message after it."""
    return (
        hit.source is raised.mark.source
        and (not raised.mark.line.is_prefixed or hit.rank == raised.rank)
        and raised.mark.number <= hit.number <= raised.number + MESSAGE_LINES
    )


def _is_source(hit: Hit, raised: Raised) -> bool:
    """Whether a hit is a line of source code that a traceback shows."""
    is_between = raised.mark.number < hit.number < raised.number
    return is_between and hit.line.text.startswith("    ") and hit.cause.kind != "mark"


def _of_traceback(raised: Sequence[Raised]) -> Iterator[str]:
    for last in raised:
        for one in last.chain:
            yield one.text
            yield from one.frames


def _around(hit: Hit) -> Iterator[str]:
    """The lines around a hit; of the same rank, if each line names its rank."""
    start = max(0, hit.offset - AROUND_BYTES)
    before = read_around(hit.source, start, hit.offset - start).splitlines()[-AROUND_LINES:]
    after = read_around(hit.source, hit.offset, AROUND_BYTES).splitlines()[: AROUND_LINES + 1]
    for raw in (*before, *after):
        line = parse(raw)
        if not hit.line.is_prefixed or line.rank == hit.rank:
            yield line.text


def _ends_of(scanned: Sequence[Scanned]) -> Iterator[str]:
    """The beginnings and the ends of logs."""
    for one in scanned[:MAX_LOGS]:
        yield read_around(one.source, 0, WHOLE_BYTES)
        if one.num_bytes > WHOLE_BYTES:
            yield read_around(one.source, one.num_bytes - WHOLE_BYTES, WHOLE_BYTES)
