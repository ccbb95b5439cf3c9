"""Stores a checkpoint's tensors as plain bytes, for torch's distributed checkpoints (DCP).

DCP plans which rank writes and reads which part of which tensor, on any layout. Its own files are
pickles in zip archives: writing them holds Python's interpreter lock, for which the training loop
would wait, and reading them is only as safe as unpickling.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from allranks.errors import AllranksError

CHUNK_BYTES = 1 << 24


class TensorWriter(FileSystemWriter):
    """Writes one file per rank, tensor after tensor, and computes its checksum."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)
        self.checksums: dict[str, int] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        offset = checksum = 0
        with (Path(self.path) / name).open("wb", buffering=0) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)  # only tensors are saved
                checksum = write_tensor(file, tensor, checksum)
                info = _StorageInfo(name, offset, tensor.nbytes)
                results.append(WriteResult(item.index, tensor.nbytes, info))
                offset += tensor.nbytes
        self.checksums[name] = checksum
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def write_tensor(file: io.FileIO, tensor: Tensor, checksum: int = 0) -> int:
    """Write a tensor's bytes; the CRC-32 of these and what it was of before."""
    data = _bytes_of(tensor.detach().contiguous())
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        while chunk:
            chunk = chunk[file.write(chunk) :]
    return checksum


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # a buffer, which NumPy does not declare
    return memoryview(array)


class TensorReader(FileSystemReader):
    """Reads parts of tensors, and nothing else, from the files that the manifest lists."""

    def __init__(self, path: Path, files: dict[str, Any]) -> None:
        super().__init__(path)
        self._files = files
        self._chunks: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {}
        self._metadata: Metadata | None = None

    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every stored tensor, by name."""
        return {
            name: (entry.properties.dtype, tuple(entry.size))
            for name, entry in self.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)  # which was checked
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:  # DCP asks for it at every load
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise self._unusable(".metadata is not a checkpoint's")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # other kinds would be unpickled
                raise self._unusable(f"{name} is not a tensor")
        for index, info in metadata.storage_data.items():
            if info.relative_path not in self._files:
                raise self._unusable(f".metadata names {info.relative_path}, an unknown file")
            self._chunks[index] = _chunk(metadata, index)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ExitStack() as opened:
            files: dict[str, io.FileIO] = {}
            for request in plan.items:
                info = self.storage_data[request.storage_index]
                dtype, size = self._chunks[request.storage_index]
                if info.length != math.prod(size) * dtype.itemsize:
                    raise self._unusable(f"{request.storage_index.fqn} has {info.length} bytes")
                name = info.relative_path
                if name not in files:
                    file = (Path(self.path) / name).open("rb", buffering=0)
                    files[name] = opened.enter_context(file)
                target = planner.resolve_tensor(request).detach()
                is_plain = target.is_cpu and target.dtype == dtype and target.is_contiguous()
                part = target if is_plain else torch.empty(request.lengths, dtype=dtype)
                read_part(files[name], info.offset, size, request.storage_offsets, part)
                if not is_plain:
                    target.copy_(part)
                planner.commit_tensor(request, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _unusable(self, why: str) -> AllranksError:
        return AllranksError(f"{self.path}: {why}", fix="use another checkpoint", exit_code=1)


def _chunk(metadata: Metadata, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
    """Type and shape of a part of a tensor, as it was written."""
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    sizes = [chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset]
    return entry.properties.dtype, sizes[0] if sizes else entry.size


def read_part(
    file: io.FileIO, offset: int, size: Sequence[int], starts: Sequence[int], part: Tensor
) -> None:
    """Fill `part` with what a stored tensor of `size` has from index `starts` on.

    Nothing else is read: whole rows lie together, and what is cut out of rows is read run by run.
    `part` is contiguous, and on the CPU.
    """
    cut = [dim for dim in range(part.dim()) if part.size(dim) != size[dim]]
    outer = cut[-1] if cut else 0  # from this dim on, what the part has lies together
    strides = [math.prod(size[dim + 1 :]) for dim in range(part.dim())]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    content = _bytes_of(part)
    place, num_bytes = 0, math.prod(part.shape[outer:]) * part.itemsize
    for index in itertools.product(*map(range, part.shape[:outer])):
        begin = first + sum(number * stride for number, stride in zip(index, strides, strict=False))
        run = content[place : place + num_bytes]
        _read_all(file, run, offset + begin * part.itemsize)
        place += num_bytes


def _read_all(file: io.FileIO, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file.fileno(), [data], offset)
        if not count:
            raise ValueError(f"{file.name!r} ends early")
        data, offset = data[count:], offset + count


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, a pickle, and admits only the plain data classes that torch puts there."""

    allowed = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self.allowed:
            return super().find_class(module, name)
        raise AllranksError(
            f"the checkpoint's .metadata asks for {module}.{name}, which no checkpoint contains",
            fix="do not trust this checkpoint; use another one",
            exit_code=1,
        )
