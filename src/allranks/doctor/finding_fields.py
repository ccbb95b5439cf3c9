"""Fields of a finding's title and fix that are worked out from several facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from allranks.doctor.culprit import absent, first_nonfinite, other_call
from allranks.doctor.failure_facts import FailureFacts, signal_name
from allranks.show.numbers import size

Fields = dict[str, str]
Refine = Callable[[Fields, FailureFacts], Fields]


def more_fields(slug: str, fields: Mapping[str, str], facts: FailureFacts) -> Fields:
    """The fields and those that follow from the facts; `rank` is "none" if none is to blame."""
    found: Fields = {key: str(value) for key, value in fields.items()}
    return found | _REFINE[slug](found, facts) if slug in _REFINE else found


def _rendezvous(fields: Fields, facts: FailureFacts) -> Fields:
    joined, wanted = fields.get("joined"), fields.get("wanted")
    rank = absent(facts, int(wanted) if wanted else facts.world)
    more = {"rank": str(rank)} if rank is not None else {}
    if joined and wanted:
        more["joined_words"] = f": {joined} of {wanted} did"
        if (joined, wanted) == ("1", "2"):  # the one that reports it is there, so the other is not
            more["rank"] = "0" if fields.get("reporter") == "1" else "1"
    elif rank is not None:
        more["joined_words"] = f": rank {rank} did not"
    return more


def _master(fields: Fields, facts: FailureFacts) -> Fields:
    words = re.compile(r"gai ?error|not known|name resolution|route to host|unreachable", re.I)
    is_network = any(words.search(hit.line.text) for hit in facts.of("master-unreachable"))
    return {"rank": "none"} if is_network else {}  # the address or the route to it, not rank 0


def _port(fields: Fields, facts: FailureFacts) -> Fields:
    port = fields.get("port", "")
    return {"other_port": str(int(port) + 1)} if port.isdigit() else {}


def _interface(fields: Fields, facts: FailureFacts) -> Fields:
    name = fields.get("interface", "").rstrip(".,;")
    more = {"interface": name} if name else {}
    seen = [
        match[1]
        for hit in facts.hits
        if (match := re.search(r"(?:Using|OOB) (?:\[\d\])?([a-z]\w+):\d", hit.line.text))
    ]
    seen += [one for one in facts.interfaces if not re.match("lo|docker|veth|br-", one)]
    return {**more, "suggested": seen[0]} if seen else more


def _memory(fields: Fields, facts: FailureFacts) -> Fields:
    if not fields.get("limit"):
        return {}
    used, allowed = int(fields["used"]), int(fields["limit"])
    limit = allowed / 2**30
    more = max(1, round(2 * limit)) if limit >= 1 else 0
    return {
        "limit_words": f": {size(used)} where {size(allowed)} were asked for",
        "more_memory": f"{more}G" if more else f"{round(4 * limit * 1024)}M",
    }


def _worker(fields: Fields, facts: FailureFacts) -> Fields:
    paths = [hit.fields["path"] for hit in facts.of("missing-file") if "path" in hit.fields]
    return {"path": paths[0]} if paths else {}


def _signal(fields: Fields, facts: FailureFacts) -> Fields:
    number = fields.get("number", "")
    return {"signal": signal_name(int(number))} if number.isdigit() else {}


def _nan(fields: Fields, facts: FailureFacts) -> Fields:
    first = first_nonfinite(facts)
    if first is not None:
        step, ranks = first
        rank = str(ranks[0]) if len(ranks) == 1 and len(facts.ranks) > 1 else "none"
        return {"step": str(step), "rank": rank}
    # In most scripts one rank prints the loss of all: only an exception is a rank's own.
    told = {(id(hit.source), hit.number) for hit in facts.of("nan-loss")}
    own = any((id(one.mark.source), one.number) in told for one in facts.raised)
    return {} if own else {"rank": "none"}


def _died(fields: Fields, facts: FailureFacts) -> Fields:
    how = fields.get("how", "")
    return {"how": how if not how or how.startswith(("by ", "with")) else f"({how})"}


def _mismatch(fields: Fields, facts: FailureFacts) -> Fields:
    rank, words = other_call(facts)
    words = words or fields.get("difference", "")
    if rank is None:
        return {"difference": words} if words else {}
    return {"rank": str(rank), "difference": words or f": rank {rank} unlike the others"}


_REFINE: Mapping[str, Refine] = {
    "rendezvous-timeout": _rendezvous,
    "master-unreachable": _master,
    "port-in-use": _port,
    "wrong-network-interface": _interface,
    "gloo-connect-failed": _interface,
    "nccl-connect-failed": _interface,
    "host-out-of-memory": _memory,
    "worker-raised": _worker,
    "terminated-by-signal": _signal,
    "nan-loss": _nan,
    "rank-died": _died,
    "collective-mismatch": _mismatch,
}
