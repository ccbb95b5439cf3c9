"""What an hour on a GPU costs: list prices from prices.yaml, and the user's own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from allranks.errors import AllranksError
from allranks.machine.gpus import find_gpu, plain_name

EXAMPLE = "h100=2.5"


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per hour for one GPU (or CPU rank)."""

    gpu: str
    usd_per_hour: float
    source: str
    date: str | None  # when it was read there; None if unknown


@cache
def list_prices() -> tuple[Price, ...]:
    """The prices of prices.yaml, each with where it was read and when."""
    return tuple(read_prices(Path(__file__).with_name("prices.yaml")))


def find_price(
    name: str, memory_bytes: int | None = None, own: Sequence[Price] = ()
) -> Price | None:
    """The price of a GPU by NVML's name for it, or of `CPU`; None if it is not known.

    The user's `own` prices come first; of several that match, the most specific.
    """
    gpu = find_gpu(name, memory_bytes)
    fitting = [price for price in own if _fits(price.gpu, name, gpu.name if gpu else "")]
    if fitting:
        return max(fitting, key=lambda price: len(_words(price.gpu)))
    return next((price for price in list_prices() if gpu and price.gpu == gpu.name), None)


def _fits(key: str, name: str, catalogue_name: str) -> bool:
    """Whether every word of a user's key (`h100`, `a100 80gb`) is one of the GPU's name."""
    wanted, known = _words(key), _words(name) | _words(catalogue_name)
    # A slice of a GPU is not the whole of it.
    return bool(wanted) and wanted <= known and ("mig" in known) == ("mig" in wanted)


def _words(name: str) -> set[str]:
    return set(plain_name(name).split())


def parse_price(text: str) -> Price:
    """A price as typed: `h100=2.5`."""
    gpu, equals, amount = text.partition("=")
    if not equals or not gpu.strip():
        raise AllranksError(f"--price {text} is not GPU=DOLLARS", fix=f"write --price {EXAMPLE}")
    return Price(gpu.strip(), _dollars(amount, f"--price {text}"), "--price", None)


def read_prices(path: Path) -> list[Price]:
    """Prices from a YAML file: `h100: 2.5`, or `h100: {usd_per_hour: 2.5, source: …, date: …}`."""
    fix = 'write a line for each GPU, such as "h100: 2.5"'
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise AllranksError(
            f"cannot read {path}: {error.strerror}", fix="name a YAML file after --prices"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = str(error).splitlines()[0]
        raise AllranksError(f"{path} is not YAML: {where}", fix=fix) from None
    if not isinstance(content, Mapping):
        raise AllranksError(f"{path} has no prices", fix=fix)
    return [_from_file(str(gpu), value, path) for gpu, value in content.items()]


def _from_file(gpu: str, value: Any, path: Path) -> Price:
    where = f"{path}: {gpu}"
    if not isinstance(value, Mapping):
        return Price(gpu, _dollars(value, where), str(path), None)
    unknown = sorted(set(map(str, value)) - {"usd_per_hour", "source", "date"})
    if unknown or "usd_per_hour" not in value:
        what = f"unknown key {unknown[0]}" if unknown else "usd_per_hour is missing"
        raise AllranksError(
            f"{where}: {what}",
            fix=f"write {gpu}: {{usd_per_hour: 2.5, source: my cloud, date: 2026-11-15}}",
        )
    date = value.get("date")
    source = str(value.get("source", path))
    return Price(
        gpu, _dollars(value["usd_per_hour"], where), source, None if date is None else str(date)
    )


def _dollars(value: Any, where: str) -> float:
    text = re.sub(r"^\$", "", str(value).strip())
    try:
        dollars = float(text)
    except ValueError:
        dollars = math.nan
    if not (math.isfinite(dollars) and dollars >= 0) or isinstance(value, bool):
        raise AllranksError(
            f"{where}: {value} is not a price in dollars per hour", fix=f"write {EXAMPLE}"
        )
    return dollars
