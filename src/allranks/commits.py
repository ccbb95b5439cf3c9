"""Committed checkpoints: which there are and whether they are whole. No torch.

A checkpoint is written into a hidden folder, its files are synced and checksummed, and one rename
makes it `checkpoints/step-N`: it is there whole, or not at all. `checkpoint.json` in it says
everything but the tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks import claims
from allranks.events import to_json

MANIFEST = "checkpoint.json"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed checkpoint."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """The content of `checkpoint.json`; raises ValueError if it cannot be read."""
        try:
            content = json.loads((self.path / MANIFEST).read_bytes())
        except OSError as error:
            raise ValueError(f"{MANIFEST}: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{MANIFEST} is not JSON") from None
        files = content.get("files") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not files:
            raise ValueError(f"{MANIFEST} lists no files")
        return dict(content)

    def damage(self) -> str | None:
        """What is wrong with it, or None. Reads every byte."""
        try:
            for name, expected in self.manifest()["files"].items():
                path = self.path / name
                if path.name != name or (path.exists() and not path.is_file()):
                    return f"{name} is not a file of it"
                num_bytes = path.stat().st_size
                if num_bytes != expected["bytes"]:
                    return f"{name} has {num_bytes} bytes, {expected['bytes']} were written"
                if checksum(path) != expected["crc32"]:
                    return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{Path(error.filename or '').name}: {error.strerror}"
        except (ValueError, KeyError, TypeError) as error:
            return str(error) or f"{MANIFEST} is incomplete"
        return None


def commits(folder: Path) -> list[Commit]:
    """All committed checkpoints in `folder`, newest first."""
    found = [
        Commit(path=path, step=int(match[1]))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", path.name))
    ]
    return sorted(found, key=lambda commit: -commit.step)


def newest_whole(folder: Path) -> tuple[Commit | None, list[str]]:
    """The newest undamaged checkpoint, and a line about each damaged one that is newer."""
    damaged: list[str] = []
    for commit in commits(folder):
        problem = commit.damage()
        if problem is None:
            return commit, damaged
        damaged.append(f"{commit.path.name} is damaged: {problem}")
    return None, damaged


def checksum(path: Path) -> str:
    """CRC-32 of a file: it guards against torn and rotten bytes, not against forgery."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def writing_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is committed.

    Each holder of a run has its own: one that lost the run, and wakes up, must not touch another's.
    """
    return folder / f".step-{step}.{os.environ.get(claims.VARIABLE, 'own')}.writing"


def seal(path: Path, crc32: int | None = None) -> dict[str, Any]:
    """Sync a written file to disk; its entry for the manifest (`crc32`: if known already)."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    value = checksum(path) if crc32 is None else f"{crc32:08x}"
    return {"bytes": path.stat().st_size, "crc32": value}


def commit(folder: Path, step: int, manifest: dict[str, Any], *, keep: int) -> Commit:
    """Make the written checkpoint of `step` the newest one, and drop those beyond `keep`."""
    writing = writing_folder(folder, step)
    with (writing / MANIFEST).open("w") as file:
        file.write(to_json(manifest, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(writing)
    final = folder / f"step-{step}"
    if final.exists():  # a damaged one that this run trained past again
        _drop(final)
    writing.rename(final)
    _sync_folder(folder)
    for old in commits(folder):
        if old.step > step:  # damaged ones that the training went back behind
            _drop(old.path)
    for old in commits(folder)[max(keep, 1) :]:
        _drop(old.path)
    return Commit(path=final, step=step)


def clean(folder: Path) -> None:
    """Remove what a killed attempt left half written or half deleted."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _drop(path: Path) -> None:
    # Renamed first: a deletion that is interrupted must not leave a torn checkpoint behind.
    doomed = path.with_name(f".{path.name}.deleting")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
