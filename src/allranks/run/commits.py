"""Committed checkpoints: which there are, and whether they are complete.

A checkpoint is written into a hidden folder, its files are synced and checksummed, and one rename
makes it `checkpoints/step-N`: it is there completely, or not at all. Its `checkpoint.json` has
everything except the tensors.

A process that lost the run to a newer attempt may have been suspended, and wake up, between any two
lines of this file. So what it writes has names of its own, and what it wants to replace or delete
is first renamed, and put back if the run has a newer holder by then. That one never loses anything.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from allranks.machine.allotted import cpus_allotted
from allranks.run import claims, files
from allranks.run.events import to_json

MANIFEST = "checkpoint.json"
VERSION = 2  # of the manifest; version 1, without a checksum of its own, is still read
BLOCK_BYTES = 1 << 25  # that one thread checks: also a single large file keeps all of them busy
CHUNK_BYTES = 1 << 20
MAX_THREADS = 16  # reading from a disk gets no faster with more


class NewerVersionError(ValueError):
    """A newer allranks has written the manifest."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed checkpoint."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """The content of `checkpoint.json`; raises ValueError if it was changed since."""
        try:
            read = json.loads(files.read_bytes(self.path / MANIFEST))
            content = read if isinstance(read, dict) else {}
            expected = with_checksum(content)["crc32"]
        except OSError as error:
            raise ValueError(f"{MANIFEST}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ValueError(f"{MANIFEST} is not JSON") from None
        version = content.get("v")
        if version not in (1, VERSION):
            known = f"this allranks knows versions 1 to {VERSION}"
            is_later = isinstance(version, int) and version > VERSION
            kind = NewerVersionError if is_later else ValueError
            raise kind(f"{MANIFEST} is of version {version}: {known}")
        if content.get("crc32", expected if version == 1 else None) != expected:
            raise ValueError(f"{MANIFEST} does not have the checksum that it was written with")
        if not isinstance(content.get("files"), dict) or not content["files"]:
            raise ValueError(f"{MANIFEST} lists no files")
        return content

    def is_of_a_newer_allranks(self) -> bool:
        """Whether it may be complete, but too new for us to read."""
        try:
            self.manifest()
        except NewerVersionError:
            return True
        except ValueError:
            pass
        return False

    def damage(self) -> str | None:
        """What is wrong with it, or None. Reads every byte."""
        try:
            manifest = self.manifest()
            if self.path.name != f"step-{manifest['step']}":
                return f"{MANIFEST} is of step {manifest['step']}"
            for name, expected in manifest["files"].items():
                path = self.path / name
                if path.name != name or (path.exists() and not path.is_file()):
                    return f"{name} is not one of its files"
                num_bytes = path.stat().st_size
                if num_bytes != expected["bytes"]:
                    return f"{name} has {num_bytes} bytes, but {expected['bytes']} were written"
            found = checksums([self.path / name for name in manifest["files"]])
            for (name, expected), value in zip(manifest["files"].items(), found, strict=True):
                if value != expected["crc32"]:
                    return f"{name} does not have the checksum that it was written with"
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
        if (match := re.fullmatch(r"step-([0-9]+)", path.name))
    ]
    return sorted(found, key=lambda commit: -commit.step)


def _in_order_of_use(folder: Path) -> list[Commit]:
    """All committed checkpoints, those of the run's newest holder first, whatever their step.

    An older holder may have committed a later step after it lost the run.
    """

    def holder(commit: Commit) -> float:
        try:
            claim = commit.manifest().get("claim")
        except ValueError:
            return math.inf  # cannot be used, and must be reported
        return claim if isinstance(claim, int) else -1

    return sorted(commits(folder), key=holder, reverse=True)  # then by step: sorting is stable


def newest_whole(folder: Path) -> tuple[Commit | None, list[str]]:
    """The newest undamaged checkpoint, and a line about each damaged one that is newer."""
    damaged: list[str] = []
    for commit in _in_order_of_use(folder):
        problem = commit.damage()
        if problem is None:
            return commit, damaged
        damaged.append(f"{commit.path.name} is damaged: {problem}")
    return None, damaged


def checksums(paths: Sequence[Path]) -> list[str]:
    """CRC-32 of files, against damaged bytes, not against forgery. Uses several threads."""
    blocks = [
        (path, start) for path in paths for start in range(0, path.stat().st_size or 1, BLOCK_BYTES)
    ]
    found = dict.fromkeys(paths, 0)
    threads = min(cpus_allotted(), MAX_THREADS, len(blocks))
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="checksum") as pool:
        for (path, _), (value, num_bytes) in zip(blocks, pool.map(_checksum, blocks), strict=True):
            found[path] = _times(_after(num_bytes), found[path]) ^ value
    return [f"{found[path]:08x}" for path in paths]


def _checksum(block: tuple[Path, int]) -> tuple[int, int]:
    """CRC-32 of a block of a file, and its number of bytes."""
    path, start = block
    value = num_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(buffer[: BLOCK_BYTES - num_bytes]):
            value = zlib.crc32(buffer[:count], value)
            num_bytes += count
    return value, num_bytes


# A CRC-32 is a polynomial modulo another one, its bits reversed. Where more bytes follow, that of
# the bytes before is multiplied by x to the power of their bits; see zlib's crc32_combine.


@cache
def _after(num_bytes: int) -> int:
    """What the checksum of the bytes before is multiplied by, if so many bytes follow."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the power of 8
    while num_bytes:
        if num_bytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        num_bytes >>= 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def with_checksum(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the CRC-32 of the rest of it, whatever its layout."""
    content = json.loads(to_json(manifest))  # as it will be read
    content.pop("crc32", None)
    text = json.dumps(content, sort_keys=True)
    return {**content, "crc32": f"{zlib.crc32(text.encode()):08x}"}


def writing_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is committed.

    Each holder has its own: one that lost the run, and wakes up, must not touch another's.
    """
    return folder / f".step-{step}.{_name(claims.own())}.writing"


def seal(path: Path, crc32: int | None = None) -> dict[str, Any]:
    """Sync a written file to disk; return its entry for the manifest (`crc32`: if known)."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    value = checksums([path])[0] if crc32 is None else f"{crc32:08x}"
    return {"bytes": path.stat().st_size, "crc32": value}


def commit(folder: Path, step: int, manifest: Mapping[str, Any], *, keep: int) -> Commit:
    """Make the written checkpoint of `step` the newest one, and delete all but `keep` of them.

    Raises if the run has a newer holder. None of a later step is deleted: only a holder that was
    believed lost can have left one, and the next attempt sorts them out.
    """
    claim, writing, final = claims.own(), writing_folder(folder, step), folder / f"step-{step}"
    content = with_checksum({**manifest, "v": VERSION, "claim": claim})
    with (writing / MANIFEST).open("w") as file:
        file.write(to_json(content, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(writing)
    holders = folder.parent / "claims"
    claims.raise_if_lost(holders, claim)  # after the sync, which may take minutes
    try:
        writing.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        claims.raise_if_lost(holders, claim)
        _drop(final, claim)  # by an older holder, which went on after it had lost the run
        writing.rename(final)
    _sync_folder(folder)
    claims.raise_if_lost(holders, claim)
    older = [old for old in commits(folder) if old.step < step and not old.is_of_a_newer_allranks()]
    for old in reversed(older[max(keep, 1) - 1 :]):
        _drop(old.path, claim)
    return Commit(path=final, step=step)


def clean(folder: Path, *, claim: int | None, chosen: str = "") -> None:
    """Remove what killed attempts left half written or half deleted.

    Also remove damaged checkpoints that are newer than the `chosen` one, from which the holder of
    `claim` goes on: it reports them once, and they do not count as kept. Those of a newer allranks
    stay.
    """
    for path in folder.glob(".step-*"):
        match = re.match(r"\.step-[0-9]+\.([0-9]+)\.", path.name)
        is_old = claim is None or match is None or int(match[1]) <= claim
        if is_old and not _put_back(path):
            shutil.rmtree(path, ignore_errors=True)
    for commit in _in_order_of_use(folder) if chosen else []:
        if commit.path.name == chosen:
            break
        if commit.damage() is not None and not commit.is_of_a_newer_allranks():
            _drop(commit.path, claim)


def _put_back(path: Path) -> bool:
    """Rename back a checkpoint that an older holder renamed before it was killed."""
    match = re.fullmatch(r"\.(step-[0-9]+)\.([0-9]+)\.[0-9a-f]+\.deleting", path.name)
    if match is None or path.with_name(match[1]).exists():
        return False
    with suppress(OSError, ValueError):
        claim = Commit(path, 0).manifest().get("claim")
        if isinstance(claim, int) and claim > int(match[2]):
            path.rename(path.with_name(match[1]))
            return True
    return False


def _drop(path: Path, claim: int | None) -> None:
    """Delete a checkpoint, or raise and leave it if the run has a newer holder than `claim`."""
    # Renamed first: an interrupted deletion must not leave half a checkpoint.
    doomed = path.with_name(f".{path.name}.{_name(claim)}.{secrets.token_hex(4)}.deleting")
    path.rename(doomed)
    try:
        claims.raise_if_lost(path.parents[1] / "claims", claim)
    except BaseException:
        with suppress(OSError):  # the newer holder has made one with this name in the meantime
            doomed.rename(path)
        raise
    shutil.rmtree(doomed, ignore_errors=True)


def _name(claim: int | None) -> str:
    return "own" if claim is None else str(claim)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
