"""`torchrelay ls`: the committed epochs of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.disk import manifest_disk
from torchrelay.checkpoint.disk.manifest import Manifest
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.live import HEALTHY, Entry
from torchrelay.checkpoint.storage import Storage
from torchrelay.runners.commands.command_line_output import Output, human_bytes, human_number
from torchrelay.runners.commands.command_line_place import locate

_COLUMNS = ("epoch", "branch", "world", "bytes", "state", "metrics", "try")


@dataclass(frozen=True)
class EpochLine:
    """One committed epoch as `ls` shows it; what only a readable manifest tells is None without one."""

    entry: Entry
    states: tuple[str, ...]
    tags: tuple[str, ...]
    world_size: int | None
    nbytes: int | None
    metrics: Mapping[str, float]

    def json(self) -> dict[str, Any]:
        """As an object of `ls --json`; a metric that JSON has no number for is text."""
        return {
            "epoch": self.entry.position.epoch,
            "step": self.entry.position.step,
            "branch": self.entry.branch,
            "try": self.entry.try_name,
            "world_size": self.world_size,
            "bytes": self.nbytes,
            "states": list(self.states),
            "tags": list(self.tags),
            "metrics": {name: _finite(value) for name, value in self.metrics.items()},
        }

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        metrics = " ".join(f"{name}={human_number(value)}" for name, value in sorted(self.metrics.items()))
        return (
            str(self.entry.position),
            str(self.entry.branch),
            "?" if self.world_size is None else str(self.world_size),
            human_bytes(self.nbytes),
            ", ".join((*self.states, *self.tags)) or "ok",
            metrics,
            self.entry.try_name,
        )


def ls(chosen: argparse.Namespace, output: Output) -> int:
    """List epochs; reads the log and the manifests, no shard."""
    place = locate(chosen.path)
    view = place.log()
    lines = [_line(place.storage, view, entry, abandoned=True) for entry in view.abandoned()]
    lines += [_line(place.storage, view, entry) for entry in view.line()]  # the newest is the last line
    for notice in view.notices:
        output.notice(notice)
    if output.json:
        output.value(_json(view, lines))
    elif lines:
        output.table(_COLUMNS, [line.cells() for line in lines])
    else:
        output.line(f"no epoch is committed in {chosen.path}")
    return 0


def _line(storage: Storage, view: LogView, entry: Entry, *, abandoned: bool = False) -> EpochLine:
    manifest = _manifest(storage, entry)
    states = ["abandoned"] if abandoned else []
    if entry.health != HEALTHY:
        states.append(entry.health)
    elif manifest is None:
        states.append("manifest unreadable")
    if not entry.resumable:
        states.append("not resumable")
    return EpochLine(
        entry,
        tuple(states),
        tuple(f"{mark.kind}:{mark.name}" for mark in view.marks if mark.target == entry.key),
        None if manifest is None else len(manifest.world.nodes),
        None if manifest is None else own_bytes(manifest),
        {} if manifest is None else manifest.facts.metrics,
    )


def _manifest(storage: Storage, entry: Entry) -> Manifest | None:
    try:
        return manifest_disk.read(storage, entry)
    except OSError:  # `verify` says what is wrong with it
        return None


def own_bytes(manifest: Manifest) -> int:
    """Bytes of the shards of the epoch's own try; what it refers to in earlier tries is not counted."""
    return sum(shard.nbytes for shard in manifest.shards if shard.source == 0)


def _json(view: LogView, lines: list[EpochLine]) -> dict[str, Any]:
    return {
        "job": view.job_name,
        "uuid": view.job_uuid,
        "branch": view.current.id,
        "epochs": [line.json() for line in lines],
        "notices": list(view.notices),
    }


def _finite(value: float) -> float | str:
    return value if value - value == 0 else str(value)
