"""How many samples a batch has, and whether that is certain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NODES = 256  # of a backward graph that are looked at
ITEMS = "the items of its data set are already batches, counted by their first dimension"
REARRANGED = "its own collate function changes the length of batches"


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; if it has none, the length of the batch."""
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    try:
        return len(batch)
    except TypeError:
        return 0


def num_kept(batch: Any, samples: int) -> int:
    """How many of `samples` a script's own collate function has put into a batch.

    Fewer only if all its tensors are shorter and equally long. If there is one tensor per sample,
    or the samples are in another dimension or concatenated, `samples` is the best answer.
    """
    shapes = [tensor.shape for tensor in itertools.islice(tensors(batch), samples)]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or len(shapes) == samples or any(samples in shape for shape in shapes):
        return samples
    kept = int(lengths.pop())
    return kept if kept == 0 or 1 < kept < samples else samples


def is_empty(batch: Any) -> bool:
    """Whether a batch has tensors and all of them are empty."""
    found = list(tensors(batch))
    return bool(found) and all(0 in tensor.shape for tensor in found)


def tensors(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors in nested lists, tuples, mappings and plain objects, in order."""
    if hasattr(batch, "shape") and hasattr(batch, "dim"):
        yield batch
    elif depth == 0 or isinstance(batch, str | bytes):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value, depth - 1)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value, depth - 1)
    elif hasattr(batch, "items") or hasattr(batch, "__dict__"):
        values = batch.data if isinstance(getattr(batch, "data", None), Mapping) else vars(batch)
        for value in list(values.values()):
            yield from tensors(value, depth - 1)


def has_length(batch: Any, samples: int) -> bool:
    """Whether a batch that was collated from this many samples shows that number somewhere."""
    shapes = [tensor.shape for tensor in tensors(batch)]
    if not shapes or any(len(shape) > 0 and shape[0] == samples for shape in shapes):
        return True
    if samples and len(shapes) % samples == 0:  # the same number of tensors for each sample
        return True
    # Sequences first: all have their samples in the same dimension.
    is_multiple = bool(samples) and any(len(s) > 0 and s[0] % samples == 0 for s in shapes)
    dims = range(1, min(map(len, shapes)))
    return not is_multiple and any(all(s[dim] == samples for s in shapes) for dim in dims)


def has_labels(batch: Any, samples: int) -> bool:
    """Whether a batch that was never collated has a label for each row: then rows are samples."""
    shapes = [tensor.shape for tensor in tensors(batch)]
    is_even = all(len(shape) > 0 and shape[0] == samples for shape in shapes)
    return is_even and {min(len(shape), 2) for shape in shapes} == {1, 2}


def is_nested(batch: Any) -> bool:
    """Whether a batch of one sample looks like a sample that is itself a batch."""
    shapes = [tensor.shape for tensor in tensors(batch)]
    if not shapes or min(map(len, shapes)) < 2 or max(map(len, shapes)) < 3:
        return False
    return len({shape[1] for shape in shapes}) == 1 and shapes[0][1] > 1


def graph_lengths(roots: Any) -> tuple[int, frozenset[int]] | None:
    """What a backward pass shows of its batch: the length that the loss is over, and all lengths.

    None if it shows nothing, as with a loss that is a single number throughout.
    """
    roots = roots if isinstance(roots, list | tuple) else (roots,)
    nodes = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    shapes: list[tuple[int, ...]] = []
    for node in nodes:  # grows: the nearest come first
        shapes += [tuple(map(int, one.shape)) for one in getattr(node, "_input_metadata", ())]
        if len(nodes) < MAX_NODES:
            nodes += [before for before, _ in node.next_functions if before is not None]
    first = next((shape[0] for shape in shapes if shape), 0)
    return (first, frozenset(itertools.chain(*shapes))) if first > 1 else None


def place_of(batch: Any, length: int) -> tuple[int, int] | None:
    """Where a batch shows its length: which tensor and dimension; (-1, 0): it is a list."""
    shapes = [tensor.shape for tensor in tensors(batch)]
    if isinstance(batch, list | tuple) and len(batch) == length and len(shapes) % length == 0:
        return -1, 0
    for dim in range(max(map(len, shapes), default=0)):
        for number, shape in enumerate(shapes):
            if dim < len(shape) and shape[dim] == length:
                return number, dim
    return None


def length_at(batch: Any, place: tuple[int, int]) -> int:
    number, dim = place
    if number < 0:
        return len(batch)
    tensor = next(itertools.islice(tensors(batch), number, None), None)
    return int(tensor.shape[dim]) if tensor is not None and tensor.dim() > dim else 0
