"""Norms of weights at sampled epochs and of their change between them, of a bounded number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.manifest.position import Entry
from torchrelay.checkpoint.inspect.contents import (
    CAN_BE_BAD,
    CHUNK_BYTES,
    Buffer,
    Epoch,
    Item,
    Source,
    open_epoch,
    parts,
)
from torchrelay.checkpoint.inspect.diff import Comparison
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.run_data import LeafNorm, Limits, Norms, spread

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspect.statistics import Moments

_MOST_LEAVES = 128
_FEWEST_EPOCHS = 2


def norms_of(storage: Storage, line: Sequence[Entry], limits: Limits) -> Norms:
    """Of the parameters in whole, healthy epochs of a line. Never raises for what lies there."""
    if limits.norm_bytes <= 0:
        return Norms(left_out="weights were not read, as asked for")
    whole = [entry for entry in line if entry.position.boundary and entry.healthy]
    if not whole:
        return Norms()
    try:
        return _read(storage, whole, limits)
    except (RelayError, OSError) as error:  # numpy is missing, or files are damaged or away
        return Norms(left_out=str(error))


def _read(storage: Storage, whole: Sequence[Entry], limits: Limits) -> Norms:
    newest = open_epoch(storage, whole[-1])
    budget = limits.norm_bytes
    names = _fitting(newest, budget, min(_FEWEST_EPOCHS, len(whole)))
    size = sum(newest.items[name].leaf.nbytes for name in names)
    if not names:
        return Norms(left_out=_too_few(newest, whole, budget))
    epochs = min(limits.normed_epochs, len(whole), (budget // max(1, size) + 1) // 2)
    chosen = spread(whole, epochs) if epochs > 1 else [whole[-1]]
    rows, read = _rows(storage, chosen, names)
    return Norms(tuple(rows), read, _said(newest, names))


def _cost(size: int, epochs: int) -> int:
    """The first epoch is read once for itself, then both of each pair."""
    return size * (2 * epochs - 1)


def _fitting(epoch: Epoch, budget: int, epochs: int) -> list[str]:
    """Parameters spread over the model; where these are too many bytes, as many as fit, the small ones."""
    names = spread(_parameters(epoch), _MOST_LEAVES)
    size, fitting = 0, set[str]()
    for name in sorted(names, key=lambda name: epoch.items[name].leaf.nbytes):
        size += epoch.items[name].leaf.nbytes
        if _cost(size, epochs) <= budget:
            fitting.add(name)
    return [name for name in names if name in fitting]


def _parameters(epoch: Epoch) -> list[str]:
    return [
        name
        for name, item in epoch.items.items()
        if item.tensor
        and item.leaf.role == "parameter"
        and item.leaf.dtype in CAN_BE_BAD
        and not epoch.gone(item)
    ]


def _said(epoch: Epoch, names: Sequence[str]) -> str | None:
    every = len(_parameters(epoch))
    return f"{len(names)} of {every} parameters were looked at" if len(names) < every else None


def _too_few(epoch: Epoch, whole: Sequence[Entry], budget: int) -> str | None:
    sizes = [epoch.items[name].leaf.nbytes for name in _parameters(epoch)]
    if not sizes:
        return "the newest epoch has no parameters to look at"
    need = _cost(min(sizes), min(_FEWEST_EPOCHS, len(whole)))
    least, most = human_bytes(need), human_bytes(budget)
    return f"no weight fits into the {most} that may be read: the smallest needs {least}"


def _rows(storage: Storage, chosen: Sequence[Entry], names: Sequence[str]) -> tuple[list[LeafNorm], int]:
    before = open_epoch(storage, chosen[0])
    rows, read = _first(before, chosen[0].position.epoch, names)
    known = {row.leaf: row for row in rows}
    for entry in chosen[1:]:
        epoch = open_epoch(storage, entry)
        for name in names:
            row, nbytes = _next(before, epoch, entry.position.epoch, name, known.get(name))
            read += nbytes
            if row is not None:
                known[name] = row
                rows.append(row)
        before = epoch
    return rows, read


def _first(epoch: Epoch, number: int, names: Sequence[str]) -> tuple[list[LeafNorm], int]:
    there = [name for name in names if name in epoch.items and not epoch.gone(epoch.items[name])]
    found = {name: _moments(epoch, epoch.items[name]) for name in there}
    rows = [
        LeafNorm(number, name, one.elements, one.norm, None, one.nan + one.inf) for name, one in found.items()
    ]
    return rows, sum(epoch.items[row.leaf].leaf.nbytes for row in rows)


def _moments(epoch: Epoch, item: Item) -> Moments:
    """By the item itself: to look hundreds of names up as patterns in a large model takes a minute."""
    from torchrelay.checkpoint.inspect.statistics import joined, moments_of, steps

    buffer, width, dtype = Buffer(), item.leaf.item_bytes, str(item.leaf.dtype)
    stretches = (
        buffer.filled(epoch, part, start, min(start + CHUNK_BYTES, part.nbytes))
        for part in parts(epoch, item)
        for start in range(0, part.nbytes, CHUNK_BYTES)
    )
    return joined(moments_of(chunk) for data in stretches for chunk in steps(data, width, dtype))


def _next(
    before: Epoch, epoch: Epoch, number: int, name: str, known: LeafNorm | None
) -> tuple[LeafNorm | None, int]:
    """A leaf at the next epoch, compared with the one before where it is of the same form."""
    one, other = before.items.get(name), epoch.items.get(name)
    if other is None or epoch.gone(other):
        return None, 0
    if one is None or one.form != other.form or before.gone(one) or known is None:
        rows, read = _first(epoch, number, [name])
        return (rows[0] if rows else None), read
    change = Comparison(Source(before), Source(epoch), one, other).change(whole=True)
    if not change.compared:  # digests say that nothing changed, so nothing was read
        return LeafNorm(number, name, known.elements, known.norm, 0.0, known.nonfinite), 0
    bad = change.nan_b + change.inf_b
    return (
        LeafNorm(number, name, other.leaf.elements, change.norm_b, change.norm_difference, bad),
        2 * other.leaf.nbytes,
    )
