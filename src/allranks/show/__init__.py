"""How things are shown: numbers, tables, console, safe text, secrets left out."""

from __future__ import annotations

from pathlib import Path

PALETTE = Path(__file__).with_name("palette.css")  # the colours of every page
