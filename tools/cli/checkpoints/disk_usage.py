"""`torchrelay ckpt du`: where the bytes lie: by epoch, by group, by blob; what is shared, what could go."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.inspect.repair import TryUse, Usage, usage_of
from torchrelay.checkpoint.load.info import largest, read_table
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import StorageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import Place, locate
from torchrelay.tools.cli.arguments import Add, add_place

_BLOBS = 10


def add_du(add: Add) -> None:
    """Define `ckpt du`."""
    add_place(add("du", "say where the bytes lie: by epoch, by group, by blob, shared, orphaned", du))


def du(chosen: argparse.Namespace, output: Output) -> int:
    """List all files and say whose they are; reads the log and one manifest."""
    place = locate(chosen.path)
    view = place.log()
    usage = usage_of(place.storage, view)
    blobs = _largest_blobs(place, view)
    for notice in view.notices:
        output.notice(notice)
    if output.json:
        output.value(_json(view, usage, blobs))
        return 0
    if usage.tries:
        groups = sorted(usage.by_group)
        columns = ("epoch", "branch", "bytes", *groups, "referred to by", "frees", "try")
        tries = sorted(usage.tries, key=_place_in_line)
        output.table(columns, [_cells(one, groups) for one in tries], spare=("try",))
    for name, nbytes in blobs.items():
        output.line(f"newest epoch, blob {name}: {human_bytes(nbytes)}")
    for line in _sums(view, usage):
        output.line(line)
    return 0


def _largest_blobs(place: Place, view: LogView) -> Mapping[str, int]:
    """Of the newest epoch, on one node; empty where its manifest cannot be read, which `verify` tells."""
    newest = view.newest(boundary=True)
    try:
        sizes = {} if newest is None else dict(read_table(place.storage, newest).sizes)
    except StorageError:
        return {}
    chosen = largest(sizes, list(sizes), _BLOBS)
    return dict(sorted(((name, sizes[name]) for name in chosen), key=lambda one: (-one[1], one[0])))


def _place_in_line(one: TryUse) -> tuple[bool, Position, int, str]:
    """Epochs by number, then by branch; behind them what is none."""
    entry = one.entry
    if entry is None:
        return (True, Position(0), 0, one.name)
    return (False, entry.position, entry.branch, one.name)


def _cells(one: TryUse, groups: list[str]) -> tuple[str, ...]:
    entry = one.entry
    return (
        one.standing if entry is None else str(entry.position),
        "-" if entry is None else str(entry.branch),
        human_bytes(one.bytes),
        *(human_bytes(one.groups.get(group, 0)) for group in groups),
        str(one.needed_by) if one.needed_by else "-",
        human_bytes(one.frees),
        one.name,
    )


def _sums(view: LogView, usage: Usage) -> list[str]:
    groups = ", ".join(f"{group} {human_bytes(size)}" for group, size in sorted(usage.by_group.items()))
    live, shared, free = (human_bytes(n) for n in (usage.total("live"), usage.shared, usage.freed_by_last))
    lines = [
        f"live: {live} in {len(view.entries)} epochs{f' ({groups})' if groups else ''}",
        f"shared: {shared} in epochs that newer ones refer to",
        f"retention: keeping the newest epoch alone (keep_last=1) would free {free}",
    ]
    if retired := usage.total("retired"):
        lines.append(
            f"retired, not deleted yet: {human_bytes(retired)}; torchrelay ckpt repair finishes that"
        )
    if orphans := usage.total("orphan"):
        busy = "" if view.released else ", unless the job that writes there is saving"
        lines.append(
            f"orphans: {human_bytes(orphans)}{busy}; torchrelay ckpt repair --delete-orphans deletes them"
        )
    return lines


def _json(view: LogView, usage: Usage, blobs: Mapping[str, int]) -> dict[str, object]:
    return {
        "live_bytes": usage.total("live"),
        "retired_bytes": usage.total("retired"),
        "orphan_bytes": usage.total("orphan"),
        "shared_bytes": usage.shared,
        "keep_last_1_frees_bytes": usage.freed_by_last,
        "groups": dict(sorted(usage.by_group.items())),
        "largest_blobs": dict(blobs),
        "tries": [_try_json(one) for one in usage.tries],
        "notices": list(view.notices),
    }


def _try_json(one: TryUse) -> dict[str, object]:
    entry = one.entry
    return {
        "try": one.name,
        "standing": one.standing,
        "epoch": None if entry is None else entry.position.epoch,
        "step": None if entry is None else entry.position.step,
        "branch": None if entry is None else entry.branch,
        "bytes": one.bytes,
        "groups": dict(one.groups),
        "needed_by": one.needed_by,
        "frees_bytes": one.frees,
    }
