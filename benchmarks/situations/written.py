"""Runs whose events are written: hardware that cannot be slowed down to order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from situations.table import Situation

WRITTEN: dict[str, tuple[Situation, Callable[[Path], Path]]] = {}
