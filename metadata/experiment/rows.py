"""`torchrelay.metric_rows`: what a run measured, a row per epoch, in separate streams.

`train` and `val` are the parts of the run's metrics below these names; `test` is its test results. Values
that a program keeps one by one lie in `values.jsonl`; a line of it makes older lines of that stream from its
epoch on obsolete, so what a crash made happen twice counts once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.experiment.results import results
from torchrelay.metadata.files import append_line, read_lines
from torchrelay.metadata.run_directory import RunDirectory

VALUES = "values.jsonl"
STREAMS = ("train", "val", "test")


def metric_rows(run: str | os.PathLike[str], stream: str) -> list[dict[str, Any]]:
    """Rows `{"epoch": 3, "loss": 0.5, ...}` of a run directory, in the order of the epochs.

    `stream` is `train`, `val`, `test`, or whatever stands before the `/` in names of metrics. Names kept
    value by value have lists. Of epochs that a rewind or a crash replaced only the replacement is told.
    Raises UsageError where there is no run.
    """
    path = Path(run)
    if not path.is_dir():
        raise UsageError(f"there is no run directory {path}")
    if stream == "test":
        return [_test_row(one) for one in results(path)]
    lines = RunDirectory(path).metrics()
    rows = {line["epoch"]: _below(line.get("metrics", {}), stream) for line in lines}
    for epoch, values in _values(path, stream).items():
        if epoch in rows:
            rows[epoch] |= values
    return [{"epoch": epoch, **row} for epoch, row in sorted(rows.items()) if row]


def append_values(run: Path, epoch: int, stream: str, values: Mapping[str, list[float | str]]) -> None:
    """Keep the values of an epoch one by one; raises StorageError."""
    append_line(run / VALUES, {"epoch": epoch, "stream": stream, "values": values})


def _test_row(result: Mapping[str, Any]) -> dict[str, Any]:
    code = result.get("code_id")
    return {
        "epoch": result.get("epoch"),
        "code": code[:12] if isinstance(code, str) else None,
        **(result.get("metrics") or {}),
        **(result.get("values") or {}),
    }


def _below(metrics: Any, stream: str) -> dict[str, Any]:
    found = metrics.items() if isinstance(metrics, dict) else ()
    return {name.removeprefix(f"{stream}/"): one for name, one in found if name.startswith(f"{stream}/")}


def _values(run: Path, stream: str) -> dict[int, dict[str, Any]]:
    kept: dict[int, dict[str, Any]] = {}
    for line in read_lines(run / VALUES):
        epoch, values = line.get("epoch"), line.get("values")
        if line.get("stream") != stream or type(epoch) is not int or not isinstance(values, dict):
            continue
        kept = {known: one for known, one in kept.items() if known < epoch} | {epoch: values}
    return kept
