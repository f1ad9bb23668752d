"""Cutting the entries of a shard into files of bounded size and bounded header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.names import Key, encode_name, format_key
from torchrelay.checkpoint.disk.shard import (
    ALIGNMENT,
    Part,
    ShardEntry,
    ShardIdentity,
    cost_limit,
    entry_cost,
    know_all,
    ordered,
)
from torchrelay.errors import BlobError


@dataclass(frozen=True)
class ShardLimits:
    """Bytes of data and of header below which one file stays.

    safetensors refuses headers above 100 MB. An entry that alone reaches `data_bytes` gets a file
    of its own.
    """

    data_bytes: int = 64 << 30
    header_bytes: int = 50_000_000


DEFAULT_LIMITS = ShardLimits()


def cut(
    identity: ShardIdentity,
    entries: Sequence[ShardEntry],
    values: Mapping[str, Json],
    aliases: Mapping[str, Key],
    limits: ShardLimits,
    values_text: bytes | None = None,
) -> list[Part]:
    """The parts of a shard, at least one; values lie in part 1, an alias beside its target.

    `values_text` is the canonical JSON of the values, where somebody has made it already.

    Raises BlobError for a key that occurs twice, an alias without target, or values that alone are
    too much for a header.
    """
    know_all(entries)
    by_target = _aliases_by_target(entries, aliases)
    text = canonical.dumps(dict(values), within=1) if values_text is None else values_text
    fixed = _fixed_cost(identity, text)
    if fixed >= limits.header_bytes:
        largest = max(values, key=lambda name: len(canonical.dumps(values[name])), default=identity.job)
        raise BlobError(
            f"the values of {identity.node} need {fixed} bytes: keep large ones such as {largest} in tensors"
        )
    parts: list[Part] = []
    for chosen in _runs(ordered(entries), by_target, fixed, limits):
        here = {alias: target for entry in chosen for alias, target in by_target.get(entry.text, ())}
        first = (values, text) if not parts else ({}, None)
        parts.append(Part(identity, len(parts) + 1, tuple(chosen), here, *first))
    return parts


def _runs(
    entries: Sequence[ShardEntry],
    by_target: Mapping[str, Sequence[tuple[str, str]]],
    fixed: int,
    limits: ShardLimits,
) -> list[list[ShardEntry]]:
    if not by_target and _fit_together(entries, fixed, limits):
        return [list(entries)]
    runs: list[list[ShardEntry]] = [[]]
    data, header = 0, fixed
    for entry in entries:
        cost = entry_cost(entry) + sum(_text_cost(pair) for pair in by_target.get(entry.text, ()))
        if runs[-1] and (data + entry.nbytes >= limits.data_bytes or header + cost >= limits.header_bytes):
            runs.append([])
            data, header = 0, fixed
        runs[-1].append(entry)
        data, header = data + entry.nbytes, header + cost
    return runs


def _fit_together(entries: Sequence[ShardEntry], fixed: int, limits: ShardLimits) -> bool:
    """Whether one file holds all without a closer look."""
    header = fixed + cost_limit(entries)
    return header < limits.header_bytes and sum([entry.nbytes for entry in entries]) < limits.data_bytes


def _aliases_by_target(
    entries: Sequence[ShardEntry], aliases: Mapping[str, Key]
) -> dict[str, list[tuple[str, str]]]:
    keys = {entry.text for entry in entries}
    if len(keys) != len(entries):
        texts = [entry.text for entry in entries]
        raise BlobError(f"{next(text for text in texts if texts.count(text) > 1)} occurs twice in one shard")
    found: dict[str, list[tuple[str, str]]] = {}
    for name, target in sorted(aliases.items()):
        alias, text = encode_name(name), format_key(target)
        if text not in keys or alias in keys:
            raise BlobError(f"{name} cannot be an alias of {text} in this shard")
        found.setdefault(text, []).append((alias, text))
    return found


def _fixed_cost(identity: ShardIdentity, values: bytes) -> int:
    """An upper bound of what a header holds beside its entries."""
    said = canonical.dumps([identity.job, identity.node, identity.group, identity.try_name])
    return _quoted_bytes(said) + _quoted_bytes(values) + ALIGNMENT


def _text_cost(pair: tuple[str, str]) -> int:
    return _quoted_bytes(canonical.dumps({pair[0]: {"alias_of": pair[1]}}))


def _quoted_bytes(text: bytes) -> int:
    """What JSON, which has no control characters, takes within the JSON of the header."""
    return len(text) + text.count(b'"') + text.count(b"\\") + 2
