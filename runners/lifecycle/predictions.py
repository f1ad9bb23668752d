"""Predictions in the order of the input, from any number of ranks, into one file or URL.

Each rank writes what it predicted of an epoch to a part beside the file, in ascending order; rank 0 merges
them by index. Memory holds one row per rank.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.storage.urls import is_url, open_file_system
from torchrelay.errors import UsageError

Row = dict[str, Any]
FORMATS = ("jsonl", "csv")


def rows_of(predicted: Any, count: int, what: str) -> list[Row]:
    """A row per sample of what a model predicted: of a tensor `prediction`, of a mapping its names.

    Raises UsageError where there is not one per sample.
    """
    columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
    listed = {name: _listed(value) for name, value in columns.items()}
    for name, values in listed.items():
        if values is None or len(values) != count:
            raise UsageError(
                f"{what}: predictions of {count} samples must be tensors with a row for each, {name!r} is "
                f"{_described(columns[name])}: give the model a method predict(self, outputs, batch)"
            )
    return [{name: values[at] for name, values in listed.items() if values} for at in range(count)]


def format_of(path: str, wanted: str | None) -> str:
    """The format that was asked for, else that of the name's ending, else JSON lines."""
    return wanted or ("csv" if path.lower().endswith(".csv") else "jsonl")


class PredictionFile:
    """The file of one profile; rank 0 writes it, all ranks write parts. `merge` is called per epoch."""

    def __init__(self, path: str, form: str, rank: int, ranks: int) -> None:
        self.path, self.form, self.rank, self.ranks = path, form, rank, ranks
        self._system, self._root = _opened(path)
        self._columns: list[str] | None = None
        self._out: Any = None

    def part(self) -> Any:
        """Open this rank's part of an epoch; write rows to it by `put`."""
        return self._system.open(self._part(self.rank), "w", encoding="utf-8", newline="\n")

    def merge(self, constant: Row) -> None:
        """On rank 0, when all parts are closed: append their rows, `constant` in front of each."""
        with _all_of(
            [self._system.open(self._part(one), "r", encoding="utf-8") for one in range(self.ranks)]
        ) as parts:
            for _, row in heapq.merge(*(map(_decoded, part) for part in parts), key=itemgetter(0)):
                self._write({**constant, **row})
        for one in range(self.ranks):
            self._system.rm(self._part(one))

    def close(self) -> None:
        """On rank 0: the file appears whole."""
        if self._out is None:
            self._open()
        self._out.close()
        self._system.mv(f"{self._root}.part", self._root)

    def _part(self, rank: int) -> str:
        return f"{self._root}.rank{rank}.part"

    def _open(self) -> None:
        self._out = self._system.open(f"{self._root}.part", "w", encoding="utf-8", newline="")

    def _write(self, row: Row) -> None:
        if self._out is None:
            self._open()
        if self.form == "jsonl":
            self._out.write(json.dumps(row) + "\n")
            return
        writer = csv.writer(self._out, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(self._columns)
        writer.writerow([_cell(row.get(name)) for name in self._columns])


class _all_of:  # noqa: N801 - a context manager
    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files

    def __enter__(self) -> Sequence[Any]:
        return self._files

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def put(part: Any, index: int, row: Row) -> None:
    """Write a row of a part."""
    part.write(json.dumps([index, row]) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a small file or URL whole."""
    system, root = _opened(path)
    with system.open(root, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _opened(path: str) -> tuple[Any, str]:
    if is_url(path):
        return open_file_system(path, "the place of results")
    import fsspec

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return fsspec.filesystem("file"), path


def _decoded(line: str) -> tuple[int, Row]:
    index, row = json.loads(line)
    return index, {"index": index, **row}


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist() if value.dim() else None
    return list(value) if isinstance(value, (list, tuple)) else None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.40}"


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value
