"""Stores a checkpoint's tensors as plain bytes, for torch's distributed checkpoints (DCP).

DCP plans which rank writes and reads which part of which tensor, on any layout. Its own files are
pickles in zip archives: writing them holds Python's interpreter lock, for which the training loop
would wait, and reading them is only as safe as unpickling.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
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
                data = _bytes_of(tensor)
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    checksum = zlib.crc32(chunk, checksum)
                    _write_all(file, chunk)
                info = _StorageInfo(name, offset, len(data))
                results.append(WriteResult(item.index, len(data), info))
                offset += len(data)
        self.checksums[name] = checksum
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()  # a buffer, which NumPy does not declare
    return memoryview(array)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


class TensorReader(FileSystemReader):
    """Reads tensors, and nothing else, from the files that the manifest lists."""

    def __init__(self, path: Path, files: dict[str, Any]) -> None:
        super().__init__(path)
        self._files = files
        self._chunks: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            dtype, size = self._chunks[request.storage_index]
            if info.length != math.prod(size) * dtype.itemsize:
                raise self._unusable(f"{request.storage_index.fqn} has {info.length} bytes")
            stored = _read(Path(self.path) / info.relative_path, info.offset, info.length)
            tensor = stored.view(dtype).reshape(size)
            part = narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)
            target = planner.resolve_tensor(request).detach()
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


def _read(path: Path, offset: int, num_bytes: int) -> Tensor:
    content = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes == 0:
        return content
    array: Any = content.numpy()
    view = memoryview(array)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while view:
            count = file.readinto(view)
            if not count:
                raise ValueError(f"{path} ends early")
            view = view[count:]
    return content


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
