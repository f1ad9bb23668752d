"""Cutting the entries of a shard into files of bounded size and bounded header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.names import Key, encode_name, format_key
from torchrelay.checkpoint.disk.shard import ALIGNMENT, Part, ShardIdentity, cost_limit, entry_cost
from torchrelay.checkpoint.disk.shard_entries import Entries
from torchrelay.errors import BlobError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class ShardLimits:
    """Bytes of data and of header below which one file stays.

    safetensors refuses headers above 100 MB. An entry that alone reaches `data_bytes` gets a file
    of its own, and part 1 has all values, at most `values_bytes` of them.
    """

    data_bytes: int = 64 << 30
    header_bytes: int = 50_000_000
    values_bytes: int = 1 << 62


DEFAULT_LIMITS = ShardLimits()


def cut(
    identity: ShardIdentity,
    entries: Entries,
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
    by_target = _aliases_by_target(entries, aliases)
    text = canonical.dumps(dict(values), within=1) if values_text is None else values_text
    fixed = _fixed_cost(identity, text)
    if fixed >= limits.values_bytes:
        largest = max(values, key=lambda name: len(canonical.dumps(values[name])), default=identity.job)
        raise BlobError(
            f"the values of {identity.node} need {fixed} bytes: keep large ones such as {largest} in tensors"
        )
    parts: list[Part] = []
    for chosen in _runs(entries.ordered(), by_target, fixed, fixed - _quoted_bytes(text), limits):
        here = {
            alias: text for text in (chosen.keys if by_target else ()) for alias in by_target.get(text, ())
        }
        first = (values, text) if not parts else ({}, None)
        parts.append(Part(identity, len(parts) + 1, chosen, here, *first))
    return parts


def _runs(
    entries: Entries, by_target: Mapping[str, Sequence[str]], first: int, others: int, limits: ShardLimits
) -> list[Entries]:
    if not by_target and _fit_together(entries, first, limits):
        return [entries]
    begins, data, header = [0], 0, first
    for number, (key, form) in enumerate(zip(entries.keys, entries.forms, strict=True)):
        cost = entry_cost(key, form, entries.pieces.get(key, {}))
        cost += sum(_text_cost(alias, key) for alias in by_target.get(key, ()))
        full = data + form.nbytes >= limits.data_bytes or header + cost >= limits.header_bytes
        if full and number > begins[-1]:
            begins.append(number)
            data, header = 0, others
        data, header = data + form.nbytes, header + cost
    return [entries.among(range(*edges)) for edges in pairwise([*begins, len(entries)])]


def _fit_together(entries: Entries, fixed: int, limits: ShardLimits) -> bool:
    """Whether one file holds all without a closer look."""
    return fixed + cost_limit(entries) < limits.header_bytes and sum(entries.sizes) < limits.data_bytes


def _aliases_by_target(entries: Entries, aliases: Mapping[str, Key]) -> dict[str, list[str]]:
    """The encoded names of tied leaves, by the key that holds their bytes."""
    keys = set(entries.keys)
    if len(keys) != len(entries):
        twice = next(key for key, times in Counter(entries.keys).items() if times > 1)
        raise BlobError(f"{twice} occurs twice in one shard")
    found: dict[str, list[str]] = {}
    for name, target in sorted(aliases.items()):
        alias, text = encode_name(name), format_key(target)
        if text not in keys or alias in keys:
            raise BlobError(f"{name} cannot be an alias of {text} in this shard")
        found.setdefault(text, []).append(alias)
    return found


def _fixed_cost(identity: ShardIdentity, values: bytes) -> int:
    """An upper bound of what a header holds beside its entries."""
    said = canonical.dumps([identity.job, identity.node, identity.group, identity.try_name])
    return _quoted_bytes(said) + _quoted_bytes(values) + ALIGNMENT


def _text_cost(alias: str, target: str) -> int:
    return _quoted_bytes(canonical.dumps({alias: {"alias_of": target}}))


def _quoted_bytes(text: bytes) -> int:
    """What JSON, which has no control characters, takes within the JSON of the header."""
    return len(text) + text.count(b'"') + text.count(b"\\") + 2
