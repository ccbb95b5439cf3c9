"""What to train: the protocol that users' own tasks and the bundled ones implement."""

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

    A sample is a pair `(inputs, targets)`; a batch is such a pair, collated. The loop calls
    `model(inputs)`, then `loss(outputs, targets)`, on any number of ranks: a task need not know
    how many there are.
    """

    # Job keys that this task sets unless the job file does. A literal dict: it is read from the
    # source, without importing the module and torch with it.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Training samples, if their number is fixed: tables that are made without torch show it.
    num_samples: ClassVar[int | None] = None
    # Whether a sample's loss depends on the others in its batch, as contrastive losses do. Batches
    # that are too small are then left so: otherwise they are padded, to keep their shape.
    couples_samples: ClassVar[bool] = False
    # How many ranks cut each matrix: set before tensor_parallel_plan is called.
    tp = 1

    def model(self) -> nn.Module:
        """Return a freshly initialised model, on the CPU."""
        raise NotImplementedError

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return map-style data sets: `train`, and optionally `val` and `test`."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return one loss per sample, shape `[batch]`, or `(losses, weights)`."""
        raise NotImplementedError

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Return more values per sample, to be averaged over a whole data set."""
        return {}

    def transform(self, sample: Any, generator: Generator) -> Any:
        """Augment one training sample, drawing random numbers from `generator` only."""
        return sample

    def has_transform(self) -> bool:
        """Whether `transform` does anything; if not, whole batches are fetched in one call."""
        return type(self).transform is not Task.transform

    def stage(self, local: Callable[[Path], Path]) -> None:
        """Replace each data path with `local(path)`, its copy on this node (for `data.stage`)."""

    def blocks(self, model: nn.Module) -> list[nn.Module] | None:
        """The model as a chain of modules, each fed the one before; None if it is not a chain."""
        return None

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Submodule name -> `ParallelStyle`, as `parallelize_module` takes it; None if unknown."""
        return None
