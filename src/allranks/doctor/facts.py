"""Everything that is known of one failure: hits, tracebacks, ends, who spoke and who did not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from allranks.doctor.catalogue import Catalogue, load
from allranks.doctor.ends import End, ends_of
from allranks.doctor.scan import Hit, Scanned
from allranks.doctor.tracebacks import Raised, has_progress, tracebacks

GOES_ON_LINES = 300  # a log that has more lines after an error was not ended by it
OUTSIDE = ("slurm", "kernel")  # what they tell of does not end with the lines of a rank
MAX_RANKS = 4096  # that are counted one by one
NEAR_LINES = 8  # a message may have several lines


@dataclass(slots=True)
class Facts:
    """What logs say, put together; events and accounting may add to it."""

    scanned: Sequence[Scanned]
    hits: list[Hit]
    raised: list[Raised]
    ends: dict[int, End]
    world: int | None = None
    known: Mapping[str, str] = field(default_factory=dict)  # of the job and the machine
    situations: tuple[str, ...] = ()
    # Ranks by node and process; of none, as a launcher is, None.
    processes: Mapping[tuple[str | None, int], int | None] = field(default_factory=dict)
    has_failed: bool = False

    def of(self, slug: str) -> list[Hit]:
        return [hit for hit in self.hits if hit.cause.slug == slug]

    @property
    def ranks(self) -> set[int]:
        """Ranks that there are, as far as the logs tell."""
        seen = set().union(*(one.ranks for one in self.scanned)) | set(self.ends)
        seen |= {one.source.rank for one in self.scanned if one.source.rank is not None}
        top = max([self.world or 0, *(rank + 1 for rank in seen)], default=0)
        return set(range(top)) if top <= MAX_RANKS else seen

    def rank_of_process(self, hit: Hit) -> int | None:
        """The rank whose process, or whose loader's, a line names by its number."""
        number = hit.fields.get("pid", "")
        if not number.isdigit():
            return None
        if hit.node is not None:
            return self.processes.get((hit.node, int(number)))
        # Every node counts its processes for itself.
        ranks = {rank for (_, pid), rank in self.processes.items() if pid == int(number)}
        return ranks.pop() if len(ranks) == 1 else None

    def is_final(self, hit: Hit) -> bool:
        """Whether a run may have ended by this line, rather than gone on after it."""
        if any(one.goes_on and is_near(hit, one) for one in self.raised):
            return False
        if self.has_failed or hit.cause.on_warning or hit.cause.kind == "soft":
            return True
        if hit.cause.family not in OUTSIDE and has_progress(hit):
            return False
        lines = next(one.num_lines for one in self.scanned if one.source is hit.source)
        return lines - hit.number <= GOES_ON_LINES


def gather(
    scanned: Sequence[Scanned],
    *,
    ends: Mapping[int, End] | None = None,
    known: Mapping[str, str] | None = None,
    situations: Iterable[str] = (),
    world: int | None = None,
    processes: Mapping[tuple[str | None, int], int | None] | None = None,
) -> Facts:
    """Put together what was found in all files of one failure."""
    order = {id(one.source): index for index, one in enumerate(scanned)}
    hits = [hit for one in scanned for hit in one.hits]
    raised = [one for each in scanned for one in tracebacks(each)]
    hits += [hit for one in raised for hit in _told_by(one, load())]
    hits.sort(key=lambda hit: (order[id(hit.source)], hit.number))
    of_processes = _ranks_of_processes(hits)
    hits = [_with_rank(hit, of_processes) for hit in hits]
    facts = Facts(
        scanned,
        hits,
        raised,
        {**ends_of(hits), **(ends or {})},
        world or _world(hits),
        known or {},
        (*situations, *_situations(hits)),
        processes or {},
    )
    facts.has_failed = _has_failed(facts)
    return facts


def _told_by(raised: Raised, catalogue: Catalogue) -> Iterator[Hit]:
    """Causes that the end of a traceback tells together with its frames."""
    mark = raised.mark
    for cause in catalogue.causes.values():
        if any(one.fits(raised.text, raised.frames) for one in cause.raised):
            line = replace(mark.line, text=raised.text, rank=raised.rank)
            yield Hit(cause, mark.source, raised.number, mark.offset, line, {})


def _has_failed(facts: Facts) -> bool:
    if any(end.code or end.signal for end in facts.ends.values()):
        return True
    return any(
        one.mark.source is each.source and each.num_lines - one.number <= GOES_ON_LINES
        for one in facts.raised
        if not one.goes_on
        for each in facts.scanned
    )


def _ranks_of_processes(hits: Sequence[Hit]) -> dict[tuple[str | None, int], int]:
    """Ranks by node and process: NCCL says them once, and its later lines only the process."""
    found = {}
    for hit in hits:
        if hit.cause.slug == "nccl-rank-of-process" and hit.line.pid is not None:
            found[hit.line.node, hit.line.pid] = int(hit.fields["rank"])
    return found


def _with_rank(hit: Hit, ranks: Mapping[tuple[str | None, int], int]) -> Hit:
    if hit.rank is not None or hit.line.pid is None:
        return hit
    rank = ranks.get((hit.line.node, hit.line.pid))
    if rank is None:
        return hit
    return replace(hit, line=replace(hit.line, rank=rank))


def _world(hits: Sequence[Hit]) -> int | None:
    said = [int(hit.fields["wanted"]) for hit in hits if hit.fields.get("wanted", "").isdigit()]
    layouts = [hit.fields["layout"] for hit in hits if hit.cause.slug == "allranks-job"]
    said += [math.prod(map(int, layout.split("x"))) for layout in layouts[-1:]]
    return max(said, default=None)


def _situations(hits: Sequence[Hit]) -> list[str]:
    text = " ".join(hit.line.text for hit in hits if hit.cause.slug == "framework-said")
    found = []
    if "lightning" in text.lower():
        found.append("lightning")
    if "accelerate/" in text or "transformers/trainer" in text:
        found.append("accelerate")
    if any(word in text for word in ("SLURM", "slurmstepd", "srun:", "sbatch:", "JobState")):
        found.append("slurm")
    return found


def is_near(hit: Hit, raised: Raised) -> bool:
    """Whether a hit is part of a traceback or of the message behind it."""
    return (
        hit.source is raised.mark.source
        and (not raised.mark.line.is_prefixed or hit.rank == raised.rank)
        and raised.mark.number <= hit.number <= raised.number + NEAR_LINES
    )
