"""Which tp a model can have, by plain facts about it, so that no rank has to find out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.errors import AllranksError
from allranks.layout import Layout

MOST_SHOWN = 8  # choices of one axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What decides how tensor parallelism can divide a task's model."""

    task: str  # its class
    divided: Mapping[str, int] | None = None  # what tp divides, each evenly; None: it has no plan

    def can_have_tp(self, tp: int) -> bool:
        return tp == 1 or (
            self.divided is not None and not any(n % tp for n in self.divided.values())
        )


def check_tp(layout: Layout, facts: ModelFacts) -> None:
    """Refuse a layout whose tp the model cannot have; the error names those that it can have."""
    if not facts.can_have_tp(layout.tp):
        fixes = [f"write --layout {near}" for near in nearest(layout, facts)]
        what = f"layout {layout}: {why_not(layout.tp, facts)}"
        raise AllranksError(what, fix="; ".join([*fixes, choices(facts)]))


def why_not(tp: int, facts: ModelFacts) -> str:
    if facts.divided is None:
        return (
            f"tp={tp} needs a plan of which matrices to divide, and {facts.task} has none "
            "(tensor_parallel_plan)"
        )
    sizes = sorted(facts.divided.items(), key=lambda item: item[1])
    uneven = [f"{n:,} {name}" for name, n in sizes if n % tp]
    return f"tp={tp} does not divide the model's {' and '.join(uneven[:2])} evenly"


def choices(facts: ModelFacts) -> str:
    """What tp may be with this model, in words."""
    if facts.divided is None:
        return "fsdp divides any model"
    most = max(facts.divided.values(), default=1)
    sizes = [str(tp) for tp in range(1, most + 1) if facts.can_have_tp(tp)]
    if len(sizes) > MOST_SHOWN:
        sizes[MOST_SHOWN - 1 : -1] = ["…"]
    why, common = [], 0
    for name, n in sorted(facts.divided.items(), key=lambda item: item[1]):
        if math.gcd(common, n) != common:  # else the others allow no more than this one
            why.append(f"{n:,} {name}")
        common = math.gcd(common, n)
    which = " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))
    return f"this model can have tp={which} ({', '.join(why)})"


def nearest(layout: Layout, facts: ModelFacts) -> list[str]:
    """The layout of as many ranks that is most like this one and that the model can have."""

    def distance(other: Layout) -> tuple[float, ...]:
        # First the axes that change what is sent, then as many parts of the model as were asked.
        changed = sum(abs(math.log(getattr(layout, a) / getattr(other, a))) for a in ("tp", "pp"))
        parts = (layout.ranks / layout.dp) / (other.ranks / other.dp)
        return changed, abs(math.log(parts)), other.pp

    possible = [one for one in layout.of_as_many_ranks() if facts.can_have_tp(one.tp)]
    return [str(min(possible, key=distance))] if possible else []
