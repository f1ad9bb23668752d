"""The default metadata handler: one file of JSON lines beside the checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.metadata.files import append_line, read_lines
from torchrelay.metadata.handler import Holder
from torchrelay.metadata.notes import holder_json
from torchrelay.metadata.same_place import SamePlace
from torchrelay.metadata.stats import NodeStats

FILE_NAME = "metadata.jsonl"


class FileMetadataHandler:
    """Writes what it is told as JSON lines; it does not decide where a run resumes."""

    decides = False

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / FILE_NAME
        self._nodes: list[str] = []
        self._holder: dict[str, Any] = {}
        self._place = SamePlace(self.path.parent)

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Remember the nodes, so that each epoch's line says who took part."""
        self._nodes = list(node_names)

    def opened(self, holder: Holder) -> None:
        """From now on each line says whose it is; indexes are made again from that."""
        self._holder = holder_json(holder)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """Give the user's wish back: the log decides, not this file."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Note that an epoch was acknowledged; readers take the last line of an epoch."""
        self._append({"kind": "epoch", "epoch": epoch, "nodes": self._nodes})

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Note the seconds of an action."""
        details = stats.to_json() if isinstance(stats, NodeStats) else {}
        self._append({"kind": action, "secs": dict(stats), **details})

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the directory can be written now."""
        return os.access(self.path.parent, os.W_OK | os.X_OK)

    def epochs(self) -> list[int]:
        """The epochs noted so far, in order, without repetitions."""
        lines = [line for line in read_lines(self.path) if line.get("kind") == "epoch"]
        return sorted({line["epoch"] for line in lines if type(line.get("epoch")) is int})

    def _append(self, line: dict[str, Any]) -> None:
        self._place.check()
        append_line(self.path, {"time": round(time.time(), 3), **self._holder, **line})
