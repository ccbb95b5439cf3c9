"""The forms in which SLURM writes numbers, times, lists and resources. Nothing here raises."""

from __future__ import annotations

import re

NOT_SET = {"", "(null)", "N/A", "n/a", "NONE", "None", "UNLIMITED", "ALL", "INFINITE", "infinite"}


def parse_fields(line: str) -> dict[str, str]:
    """The Key=value of one line of scontrol -o; values may hold spaces, the first of a key wins."""
    fields: dict[str, str] = {}
    parts = re.split(r"(?:^|\s)([A-Za-z][\w:/]*)=", line)
    for key, value in zip(parts[1::2], parts[2::2], strict=True):
        fields.setdefault(key, value.strip())
    return fields


def parse_time(text: str) -> int | None:
    """Seconds of 1-02:03:04, 02:03:04, 03:04 or minutes alone; None for no limit or no time."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", text.strip())
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None or len(given) == 3:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*given, 0)[:2]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def tres_gpus(text: str) -> int:
    """The GPUs in cpu=4,mem=1G,gres/gpu=2,gres/gpu:a100=2: typed ones are counted in both."""
    counts = re.findall(r"gres/gpu(:[^=,\s]*)?=(\d{1,9})", text)
    untyped = sum(int(number) for kind, number in counts if not kind)
    return untyped or sum(int(number) for kind, number in counts if kind)


def names(text: str | None) -> tuple[str, ...]:
    """A comma list of SLURM's; empty where nothing is set, or everything is allowed."""
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part not in NOT_SET))


def number_of(text: str | None) -> int:
    match = re.match(r"\s*(\d{1,15})", text or "")
    return int(match[1]) if match else 0


def parse_gres(text: str) -> list[tuple[str, str | None, int]]:
    """The generic resources of a node: the kind, the type if it has one, and how many.

    `gpu:a100:4(S:0-1),shard:16`, also as used (`gpu:a100:1(IDX:0,2)`) and as asked for by a job
    (`gres/gpu:2`, `gres:gpu:2`).
    """
    text = re.sub(r"\([^)]*\)?", "", text.replace("(null)", ""))  # may hold commas
    found: list[tuple[str, str | None, int]] = []
    for part in text.split(","):
        kind, *words = re.sub(r"^gres[:/]", "", part.strip()).split(":")
        words = [word for word in words if word != "no_consume"]
        number = 1
        if words and (match := re.fullmatch(r"([0-9]{1,12})([KkMm]?)", words[-1])):
            number = int(match[1]) * {"k": 1024, "m": 1024**2}.get(match[2].lower(), 1)
            words.pop()
        if kind and kind not in NOT_SET:
            found.append((kind, ":".join(words) or None, number))
    return found
