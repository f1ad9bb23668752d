"""A batch that unpacks like what the dataset gave, and knows its place in the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Batch(tuple[Any, ...]):
    """The collated fields of a rank's samples: `for x, y in loader` works, `batch.weight` too.

    `data` is the collated object as it came, `weight` what this rank's mean loss is multiplied by (see
    `epoch_steps.Step.weight`), `indices` the dataset's indices as an int64 tensor, and `count` their
    number. A rank that has no sample in a step still gets one to run forward and backward with, as
    DDP needs: `count` is then 0, `indices` empty and `weight` 0.0.
    A dataset whose samples are no tuples gives batches of one field: `for (x,) in loader`.
    """

    data: Any
    weight: float
    indices: Tensor
    count: int  # type: ignore[assignment]  # of samples; nobody counts equal tensors with tuple.count


class MappingBatch(dict[Any, Any]):
    """The same for a dataset whose samples are mappings: `batch["image"]` and `batch.weight`."""

    data: Any
    weight: float
    indices: Tensor
    count: int


def make_batch(data: Any, *, weight: float, indices: Tensor) -> Batch | MappingBatch:
    """Wrap collated `data`; the tensors in it are not copied."""
    batch: Batch | MappingBatch
    if isinstance(data, Mapping):
        batch = MappingBatch(data)
    else:
        batch = Batch(data if isinstance(data, (tuple, list)) else (data,))
    batch.data, batch.weight, batch.indices, batch.count = data, weight, indices, len(indices)
    return batch
