"""PaddleRec's text lines of slots, `click:1 wide:0.2 wide:0.7 C1:17`, read without a class of the user's.

`sparse_slots` names slots of whole numbers, `dense_slots` slots of numbers with their sizes, `wide:2` or
`image:[2,3]`. A sample is a dict of tensors by slot; words of other slots are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import Dataset

_DENSE = re.compile(r"(?P<name>[^:]+):\[?(?P<sizes>[1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)\]?")
_NONE = "#"
"""What PaddleRec's files write for no slots."""
Sample = dict[str, torch.Tensor]


class SlotReader:
    """Reads the slots that a dataset names. A slot that is not in a line is filled with `padding`, or 0."""

    def __init__(self, dataset: Dataset) -> None:
        self._key = f"dataset.{dataset.name}"
        self._padding = dataset.padding or 0.0
        self._sparse = [one for one in (dataset.sparse_slots or "").split() if one != _NONE]
        self._dense = dict(self._sized(one) for one in (dataset.dense_slots or "").split() if one != _NONE)
        if both := sorted(set(self._sparse) & set(self._dense)):
            raise UsageError(f"{self._key}: {', '.join(both)} is in sparse_slots and dense_slots: keep one")

    def read(self, path: str) -> Iterator[Sample]:
        """A sample for each line that is not blank. Raises UsageError naming file and line."""
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._sample(line.split(), f"{self._key}: {path}, line {number}")

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """Slots of a batch; sparse ones as long as the longest of them, `padding` behind the others."""
        found: Sample = {}
        for name in self._sparse:
            listed = [one[name] for one in samples]
            longest = max(map(len, listed))
            found[name] = torch.full((len(listed), longest), int(self._padding), dtype=torch.int64)
            for row, one in zip(found[name], listed, strict=True):
                row[: len(one)] = one
        return {**found, **{name: torch.stack([one[name] for one in samples]) for name in self._dense}}

    def _sized(self, word: str) -> tuple[str, tuple[int, ...]]:
        said = _DENSE.fullmatch(word)
        if said is None:
            raise UsageError(
                f"{self._key}.dense_slots: {word!r} is no slot with its size: write `wide:4` or `wide:[2,2]`"
            )
        return said["name"], tuple(int(one) for one in said["sizes"].split(","))

    def _sample(self, words: Sequence[str], place: str) -> Sample:
        values: dict[str, list[Any]] = {name: [] for name in (*self._sparse, *self._dense)}
        for word in words:
            name, colon, text = word.rpartition(":")
            if not colon:
                raise UsageError(f"{place}: {word!r:.40} is no `slot:value`")
            if name in values:
                values[name].append(_number(text, dense=name in self._dense, place=place, word=word))
        sample = {name: torch.tensor(values[name] or [int(self._padding)]) for name in self._sparse}
        for name, shape in self._dense.items():
            listed = values[name] or [self._padding] * math.prod(shape)
            if len(listed) != math.prod(shape):
                raise UsageError(f"{place}: {name} has {len(listed)} values, not {math.prod(shape)}")
            sample[name] = torch.tensor(listed, dtype=torch.float32).reshape(shape)
        return sample


def _number(text: str, *, dense: bool, place: str, word: str) -> float:
    try:
        return float(text) if dense else int(text)
    except ValueError:
        kind = "a number" if dense else "a whole number"
        raise UsageError(f"{place}: the value of {word!r:.40} is not {kind}") from None
