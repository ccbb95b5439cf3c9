"""How many nodes x GPUs, and how their ranks divide the work: `2x4`, `2x4:tp=4`, `1x8:fsdp=4`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from allranks.errors import AllranksError

AXES = ("dp", "fsdp", "tp", "pp")
# From the outermost to the innermost. Neighbouring ranks share a node: tensor parallelism exchanges
# the most, replicas the least.
NESTING = ("dp", "pp", "fsdp", "tp")
# What a rank's number along each axis is called, in the order in which it matters.
PLACES = {"pp": "stage", "fsdp": "shard", "tp": "tp", "dp": "replica"}
PATTERN = r"^[0-9]+x[0-9]+(:(dp|fsdp|tp|pp)=[0-9]+(,(dp|fsdp|tp|pp)=[0-9]+)*)?$"

# Far above any machine there is: larger numbers are typing errors, and would only fail later.
MAX_NODES = 65_536
MAX_GPUS_PER_NODE = 1_024


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes x GPUs (on a machine without GPUs: CPU ranks), and the ranks that each axis takes."""

    nodes: int = 1
    gpus: int = 1  # per node
    dp: int = 0  # replicas of the model; 0 is replaced by what the other axes leave
    fsdp: int = 1  # shards of each parameter
    tp: int = 1  # shards of each matmul; keep inside a node
    pp: int = 1  # stages of layers

    def __post_init__(self) -> None:
        self._check_limits()
        if self.dp == 0 and self.ranks % self._ranks_per_replica == 0:
            object.__setattr__(self, "dp", self.ranks // self._ranks_per_replica)
        elif self.dp * self._ranks_per_replica != self.ranks:
            self._refuse_axes()

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def data_ranks(self) -> int:
        """How many ranks train on different samples."""
        return self.dp * self.fsdp

    @property
    def _ranks_per_replica(self) -> int:
        return self.fsdp * self.tp * self.pp

    def place_of(self, rank: int) -> dict[str, int]:
        """A rank's number along each axis."""
        place = {}
        for axis in reversed(NESTING):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    @property
    def divided(self) -> tuple[int, int, int]:
        """Among how many ranks the model is divided along fsdp, tp and pp."""
        return self.fsdp, self.tp, self.pp

    def axis_beyond(self, smaller: Layout) -> str | None:
        """The one axis along which this layout is larger, if all others are equal."""
        larger = [axis for axis in AXES if getattr(self, axis) != getattr(smaller, axis)]
        is_one = len(larger) == 1 and getattr(self, larger[0]) > getattr(smaller, larger[0])
        return larger[0] if is_one else None

    def of_as_many_ranks(self, axes: Sequence[str] = AXES[1:]) -> list[Layout]:
        """Every way to divide the same nodes and GPUs along these axes."""
        found: list[dict[str, int]] = [{}]
        for axis in axes:
            found = [
                {**sizes, axis: size}
                for sizes in found
                for size in divisors(self.ranks // math.prod(sizes.values()))
            ]
        return [Layout(self.nodes, self.gpus, **sizes) for sizes in found]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read what `str` writes. Raises AllranksError."""
        shape, colon, axes = text.partition(":")
        shape = re.sub(r"\s*x\s*", "x", shape.strip())
        match = re.fullmatch(r"([0-9]+)x([0-9]+)", shape)
        if match is None:
            raise AllranksError(f'layout "{text}" is not NODESxGPUS', fix=f"write {_near(shape)}")
        whole = cls(*(_bounded_int(number) for number in match.groups()))
        return whole._divided(text, axes) if colon else whole

    def __str__(self) -> str:
        """The shortest text that parses back: dp is what the others leave, so it is not written."""
        return f"{self.nodes}x{self.gpus}" + self._axes_text()

    def _axes_text(self) -> str:
        written = [f"{axis}={getattr(self, axis)}" for axis in AXES[1:] if getattr(self, axis) > 1]
        return ":" + ",".join(written) if written else ""

    def _check_limits(self) -> None:
        limits = {"nodes": MAX_NODES, "gpus": MAX_GPUS_PER_NODE}
        for field in ("nodes", "gpus", *AXES):
            number = getattr(self, field)
            limit = limits.get(field, MAX_NODES * MAX_GPUS_PER_NODE)
            lowest = 0 if field == "dp" else 1
            if not lowest <= number <= limit:
                shown = str(number) if number <= limit else f"over {limit}"
                raise AllranksError(
                    f"{field} is {shown}, but a layout's {field} must be from 1 to {limit}",
                    fix="write NODESxGPUS within these limits, for example 2x4",
                )

    def _refuse_axes(self) -> NoReturn:
        """Refuse axes that do not divide the ranks, or take another number of them."""
        whole, ranks, replica = Layout(self.nodes, self.gpus), self.ranks, self._ranks_per_replica
        product = f"fsdp={self.fsdp} x tp={self.tp} x pp={self.pp}"
        sizes = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > (axis != "dp")}
        if self.dp:  # all axes were given
            what = f"dp={self.dp} x {product} needs {self.dp * replica} ranks, not {ranks}"
        else:
            what = f"{product} takes {replica} ranks per replica, which does not divide {ranks}"
        raise whole._refused(f"layout {whole}{self._axes_text()}: {what}", sizes)

    def _divided(self, text: str, axes: str) -> Layout:
        """This layout with the axes that follow the colon in `text`."""
        sizes: dict[str, int] = {}
        for part in axes.split(",") if axes.strip() else []:
            axis, _, digits = (piece.strip() for piece in part.partition("="))
            if axis not in AXES:
                close = difflib.get_close_matches(axis.lower(), AXES, n=1)
                known = f"{AXES[0]}, {', '.join(AXES[1:-1])} and {AXES[-1]}"
                what = f'layout "{text}" has no axis "{axis}"; the axes are {known}'
                meant = dict.fromkeys(close or ["fsdp"], _first_number(digits))
                raise self._refused(what, {**sizes, **meant})
            if axis in sizes:
                raise self._refused(f'layout "{text}" gives {axis} twice', sizes)
            if not re.fullmatch(r"[0-9]+", digits) or not digits.strip("0"):
                what = f'layout "{text}": {axis} must be a positive integer, not "{digits}"'
                raise self._refused(what, {**sizes, axis: _first_number(digits)})
            sizes[axis] = _bounded_int(digits)
        if not sizes:
            raise self._refused(f'layout "{text}" names no axis after ":"', {"fsdp": 1})
        return Layout(self.nodes, self.gpus, **sizes)

    def _refused(self, what: str, sizes: Mapping[str, int]) -> AllranksError:
        """The error for axes that do not work; its fix suggests the nearest ones that do."""
        axes = [axis for axis in sizes if axis != "dp"] or ["fsdp"] * len(sizes)

        def distance(other: Layout) -> float:
            apart = {a: abs(math.log(getattr(other, a) / size)) for a, size in sizes.items()}
            return sum(apart.values()) - apart.get("dp", 0.0) / 2  # replicas matter least

        possible = [one for one in self.of_as_many_ranks(axes) if one.dp < self.ranks]
        nearest = sorted(possible, key=distance)[:2]
        if nearest and distance(nearest[0]) == 0:
            nearest = nearest[:1]
        fix = f"write {self}, with a copy of the model on every rank"
        if nearest:
            near = sorted(nearest, key=lambda one: (one.pp, one.tp, one.fsdp))
            fix += f"; to divide the model, {' or '.join(map(str, near))}"
        return AllranksError(what, fix=fix)


def split_layouts(text: str, what: str) -> list[str]:
    """The words of a list such as `1x1,2x4:fsdp=2,tp=2@a40`: a comma before an axis is a layout's.

    Raises AllranksError if one is missing; `what` was typed.
    """
    words = [word.strip() for word in re.split(r",(?!\s*\w+\s*=)", text)]
    if not all(words):
        fix = f"write {','.join(filter(None, words)) or '1x1,1x2,1x4'}"
        raise AllranksError(f'{what} "{text}": a layout is missing', fix=fix)
    return words


def place_in_words(layout: object, ranks: Iterable[int]) -> str:
    """Where ranks are in a layout that divides the model, as far as they share that place.

    For example `stage 1, shard 0`; empty if `layout`, as text from a run's files, is none.
    """
    try:
        whole = Layout.parse(str(layout).partition("@")[0])
    except AllranksError:
        return ""
    places = [whole.place_of(rank) for rank in ranks if rank < whole.ranks]
    if not places or whole.dp == whole.ranks:
        return ""
    shared = [
        f"{word} {places[0][axis]}"
        for axis, word in PLACES.items()
        if getattr(whole, axis) > 1 and len({place[axis] for place in places}) == 1
    ]
    return ", ".join(shared)


def with_place(what: str, layout: object, ranks: Iterable[int]) -> str:
    """`rank 3 (stage 1)`: these ranks in words, and where they are if the model is divided."""
    place = place_in_words(layout, ranks)
    return f"{what} ({place})" if place else what


def _near(shape: str) -> str:
    """What may have been meant by a shape that is not NODESxGPUS."""
    if _is_layout(shape.partition("@")[0]):  # how --race names a type of GPU
        return f"--race {shape}, or the type as slurm.gpu=TYPE"
    if shape.endswith("x") and _is_layout(f"{shape}1"):
        return f"{shape}1, or another number of GPUs per node"
    if _is_layout(colon := shape.replace(",", ":", 1)):
        return f"{colon}, with a colon before the axes"
    if _is_layout(f"1x{shape}"):
        return f"1x{shape} for {shape} ranks on one node"
    return "2x4 for 2 nodes of 4 GPUs each"


def _is_layout(text: str) -> bool:
    try:
        return bool(re.fullmatch(PATTERN, text) and Layout.parse(text))
    except AllranksError:
        return False


def divisors(number: int) -> list[int]:
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})


def _first_number(text: str) -> int:
    """What may have been meant by a word that is no positive integer."""
    match = re.search(r"[1-9][0-9]*", text)
    return _bounded_int(match[0]) if match else 1


def _bounded_int(digits: str) -> int:
    # Python refuses to convert thousands of digits; 12 are over every limit anyway.
    return int(digits[:12]) if len(digits) > 12 else int(digits)
