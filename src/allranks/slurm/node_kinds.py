"""What a cluster's node has, from its gres and features: GPU boards, CPUs, what it suits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.machine.gpus import GIB, GPU, catalogue, find_gpu, plain_name
from allranks.slurm import reasons

MIG = re.compile(r"[_-]?\d+g\.(\d{1,4})gb.*", re.IGNORECASE)  # a100_1g.5gb
GPU_MEMORY = re.compile(r"(?:gpu|vram)[_-]?(?:mem|ram)?[:=_-]?(\d{1,3})(?:gi?b?)?", re.IGNORECASE)
# Also 80gb, a100_80g, a100-80: these may mean something else, and only decide between options.
ANY_MEMORY = re.compile(r"(?:.*[^0-9a-z])?(\d{1,3})gi?b?|[a-z]\d+[_-](\d{1,3})", re.IGNORECASE)

# What a GPU needs for each of the answers of `suits`.
LARGE_BYTES = 64 * GIB
LARGE_FLOPS = 150e12  # dense 16-bit: an MI250X die and everything newer
MIDDLE_BYTES = 30 * GIB
LARGE_RAM_BYTES = 960 * GIB


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one gres type in a node."""

    type: str | None  # as in --gres=gpu:TYPE:n
    count: int
    model: str | None  # the catalogue's name, if the board is known
    memory_bytes: int | None  # of one GPU; the smallest of the options
    memory_options: tuple[int, ...]  # several if neither name nor features decide
    slice_of: str | None  # of a MIG slice: the board


def resolve_gpus(type: str | None, count: int, features: Sequence[str]) -> Gpus:
    """The board that a gres type names; if it names none (gpu:4), the features may (a100)."""
    sliced = MIG.search(type or "")
    if type is not None and sliced is not None:
        board = find_gpu(type[: sliced.start()])
        memory = int(sliced[1]) * GIB
        board_name = type[: sliced.start()] if board is None else board.name.split()[0]
        return Gpus(type, count, None, memory, (memory,), board_name or "unknown")
    boards = fitting_boards(type) if type is not None else _boards_of_features(features)
    sizes = sorted({board.memory_bytes for board in boards})
    if len(sizes) > 1:
        hinted = _hinted_bytes(features, GPU_MEMORY, ANY_MEMORY)
        settled = [size for size in sizes if size in hinted]
        sizes = settled if len(settled) == 1 else sizes
    if not boards:
        said = re.search(r"(?<!\d)(\d{1,3})gb", type or "", re.IGNORECASE)
        hinted = {int(said[1]) * GIB} if said else _hinted_bytes(features, GPU_MEMORY)
        sizes = sorted(hinted) if len(hinted) == 1 else []
    fits = [board for board in boards if board.memory_bytes == sizes[0]]
    name = fits[0].name if fits and len(sizes) == 1 else _family(boards)
    return Gpus(type, count, name, sizes[0] if sizes else None, tuple(sizes), None)


def fitting_boards(name: str) -> list[GPU]:
    """Every board of the catalogue that a name may mean, the likeliest of each size first."""
    plain = plain_name(name)
    return [board for board in catalogue() if re.fullmatch(board.pattern, plain)]


def _boards_of_features(features: Sequence[str]) -> list[GPU]:
    """The boards that the features name, if they name only one model."""
    words = [re.split(r"[:=]", feature)[-1] for feature in features]  # GPU_SKU:A100_SXM4
    named = [boards for word in words if (boards := fitting_boards(word))]
    narrow = min(named, key=len, default=[])  # a100 and a100-80gb: the latter
    return narrow if all(set(narrow) <= set(boards) for boards in named) else []


def _family(boards: Sequence[GPU]) -> str | None:
    """The common beginning of the boards' names: A100 SXM4, for those with 40 and 80 GB."""
    words = [board.name.split() for board in boards]
    shared = []
    for column in zip(*words, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return " ".join(shared) or None


def _hinted_bytes(features: Sequence[str], *patterns: re.Pattern[str]) -> set[int]:
    found = (pattern.fullmatch(word) for pattern in patterns for word in features)
    return {int(next(filter(None, match.groups()))) * GIB for match in found if match}


def cpu_model(features: Sequence[str]) -> str | None:
    """The CPU that the features name (milan, epyc_7763, gold6248); SLURM itself does not know."""
    last = [re.split(r"[:=]", feature)[-1] for feature in features]
    plain = [re.sub(r"[_\s-]+", " ", word.lower()) for word in last]
    plain = [re.sub(r"^((intel|amd|cpu) ?)+", "", word).strip() for word in plain]
    for pattern, model in reasons.words()["cpu_numbers"].items():
        for word in plain:
            if match := re.fullmatch(pattern, word):
                number = re.sub(r"[ -]?V(\d)$", r" v\1", match[1].upper())
                return str(model).format(number.replace("E5 ", "E5-"))
    families = reasons.words()["cpu_families"].items()
    found = {model for pattern, model in families if any(re.fullmatch(pattern, w) for w in plain)}
    return found.pop() if len(found) == 1 else None


def suits(gpus: Sequence[Gpus], *, memory_bytes: int) -> str | None:
    """What a node is good for, by the memory, links and speed of its best GPUs.

    Large models need 64 GB per GPU, NVLink (or AMD's fabric) between the GPUs of a node and 150
    TFLOP/s in 16 bit; mid-size ones 30 GB. `memory_bytes` is the node's. None for unknown boards.
    """
    if not gpus:
        large = memory_bytes >= LARGE_RAM_BYTES
        return f"CPU-only: trees, data preparation{', large memory' if large else ''}"
    best = max(gpus, key=lambda kind: kind.memory_bytes or 0)
    if best.slice_of is not None:
        return "notebooks, tests: slices of a GPU"
    board = board_of(best)
    if board is None:
        return None
    linked = best.count > 1 and board.link.kind != "pcie"
    flops = max(board.peak_flops.get("bf16", 0), board.peak_flops.get("fp16", 0))
    old = "" if "bf16" in board.peak_flops else "; no bf16"
    alone = f"on one GPU{' (no NVLink)' if best.count > 1 else ''}"
    if board.memory_bytes >= LARGE_BYTES and flops >= LARGE_FLOPS:
        return f"training large models{'' if linked else f' {alone}'}{old}"
    if board.memory_bytes >= MIDDLE_BYTES and linked:
        return f"training mid-size models{old}"
    if board.memory_bytes >= MIDDLE_BYTES:
        return f"cheaper jobs: mid-size models {alone}{old}"
    return f"cheaper jobs: small models, tests{old}"


def board_of(kind: Gpus) -> GPU | None:
    """The catalogue's row for these GPUs; the one with the least memory if it is undecided."""
    if kind.model is None:
        return None
    family = [board for board in catalogue() if board.name.startswith(kind.model)]
    fits = (board for board in family if board.memory_bytes == kind.memory_bytes)
    return next(fits, None)
