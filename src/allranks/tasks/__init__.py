"""What to train: the protocol that a task of the user's own, and every bundled one, fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.utils.data import Dataset

BUNDLED = ("spiral", "digits", "language")


class Task:
    """A model, its data and its loss. Write it as a dataclass: its fields are the job's `options`.

    A sample is a pair `(inputs, targets)`; a batch is the same pair, collated. The loop calls
    `model(inputs)`, then `loss(outputs, targets)`, on any number of ranks: nothing here needs to
    know how many there are.
    """

    # Job keys that this task sets where the job file does not. A literal dict: it is read
    # from the source, without importing the module (and torch with it).
    defaults: ClassVar[Mapping[str, Any]] = {}
    # How many there are to train on, if that is always the same: for tables made without torch.
    num_samples: ClassVar[int | None] = None

    def model(self) -> nn.Module:
        """A freshly initialised model, on the CPU."""
        raise NotImplementedError

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Map-style data sets of `(inputs, targets)`: `train`, and optionally `val` and `test`."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """One loss per sample, shape `[batch]`; or `(losses, weights)`, weighted by tokens say."""
        raise NotImplementedError

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Further values per sample, averaged over the whole of an evaluated dataset."""
        return {}

    def transform(self, sample: Any, generator: Generator) -> Any:
        """Change one training sample at random, drawing from `generator` alone."""
        return sample

    def has_transform(self) -> bool:
        """Whether `transform` does anything: without one, whole batches are fetched at once."""
        return type(self).transform is not Task.transform

    def stage(self, local: Callable[[Path], Path]) -> None:
        """Replace each path of the data by `local(path)`: `data.stage: local` asks for it."""

    def blocks(self, model: nn.Module) -> list[nn.Module] | None:
        """The model as a chain of modules, each fed the one before; None if it is not a chain."""
        return None

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Submodule name -> `ParallelStyle`, as `parallelize_module` takes it; None if unknown."""
        return None
