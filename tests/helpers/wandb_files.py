"""Reads the file that W&B writes offline, record by record, without W&B's own upload."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD, _BLOCK = 7, 32768


def awaited(path: Path, rows: int, timeout_secs: float = 60) -> list[dict[str, Any]]:
    """The histories once there are so many, or all that came in time.

    W&B's own process writes the file, a moment after `finish` has returned.
    """
    end = time.monotonic() + timeout_secs
    while len(found := histories(path)) < rows and time.monotonic() < end:
        time.sleep(0.05)
    return found


def histories(path: Path) -> list[dict[str, Any]]:
    """What was logged, in the order of the file; `_step` is W&B's axis."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            found.append({"_step": record.history.step.num, **row})
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log behind a head of 7 bytes: checksum, length and type, then the bytes."""
    at, whole = _HEAD, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
