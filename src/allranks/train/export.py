"""Writes a checkpoint's weights as a safetensors file, which other tools read without allranks.

The format is eight bytes with the length of a header, the header as JSON, and the tensors as plain
bytes, one after another: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from allranks.errors import AllranksError
from allranks.run.commits import Commit, commits, newest_whole
from allranks.run.folder import RunDir, no_readable_checkpoint
from allranks.train.checkpoint import read_into
from allranks.train.storage import TensorReader, write_tensor

TYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(run: RunDir, path: Path, step: int | None = None) -> dict[str, Any]:
    """Write the weights of a run's newest checkpoint, or of one step; return what was written."""
    if path.exists():
        raise AllranksError(f"{path} exists already", fix="remove it, or write to another file")
    if not path.parent.is_dir():
        raise AllranksError(f"{path.parent} is not a folder", fix=f"mkdir -p {path.parent}")
    commit, remarks = choose(run, step)
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # FILE is there whole or not at all
    try:
        with partial.open("wb", buffering=0) as file:
            num_tensors = write(commit, file)
            os.fsync(file.fileno())
        num_bytes = partial.stat().st_size
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return {
        "run": run.name,
        "run_dir": str(run.path.absolute()),
        "step": commit.step,
        "file": str(path.absolute()),
        "bytes": num_bytes,
        "tensors": num_tensors,
        "remarks": remarks,
    }


def choose(run: RunDir, step: int | None) -> tuple[Commit, list[str]]:
    """The checkpoint to export, and a line about each damaged one that is newer."""
    job = run.job()
    if job.get("command"):
        last = f", {job['last']}" if job.get("last") else ""
        raise AllranksError(
            f"run {run.name} trained a script, which writes its own files",
            fix=f"use the checkpoint that the script has written{last}",
        )
    found = commits(run.checkpoints)
    if not found:
        is_over = run.state() in ("finished", "failed", "stopped")
        raise AllranksError(
            f"run {run.name} has no checkpoint" + ("" if is_over else " yet"),
            fix=f"allranks resume {run.reference}, and let it save one"
            if is_over
            else "wait until it has saved one (checkpoint.every), or stop it, which saves one",
        )
    if step is None:
        newest, damaged = newest_whole(run.checkpoints)
        if newest is None:
            raise no_readable_checkpoint(run, damaged)
        return newest, damaged
    steps = ", ".join(str(commit.step) for commit in found)
    for commit in found:
        if commit.step == step:
            problem = commit.damage()
            if problem is None:
                return commit, []
            raise AllranksError(
                f"{commit.path.name} of run {run.name} is damaged: {problem}",
                fix=f"choose another of its checkpoints: --step {steps}",
                exit_code=1,
            )
    raise AllranksError(
        f"run {run.name} has no checkpoint of step {step}", fix=f"choose one of: {steps}"
    )


def write(commit: Commit, file: io.FileIO) -> int:
    """Write the model's tensors under the names of its state dict, and return their number.

    One tensor at a time is in memory. Tied weights are written under each of their names.
    """
    manifest = commit.manifest()
    reader = TensorReader(commit.path, manifest["files"])
    kinds = {
        name.removeprefix("model."): kind
        for name, kind in reader.kinds().items()
        if name.startswith("model.")
    }
    stored = {name: name for name in kinds} | manifest.get("tied", {})
    # Wide types first, so that all tensors are aligned, and can be used where they are mapped.
    names = sorted(stored, key=lambda name: (-kinds[stored[name]][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = kinds[stored[name]]
        if dtype not in TYPES:
            raise AllranksError(
                f"{name} is of type {dtype}, which safetensors files cannot hold",
                fix="convert it in the model, or leave it out of the state dict: persistent=False",
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        dtype, shape = kinds[stored[name]]
        tensor = torch.empty(shape, dtype=dtype)
        read_into({f"model.{stored[name]}": tensor}, reader)
        write_tensor(file, tensor)
    return len(names)
