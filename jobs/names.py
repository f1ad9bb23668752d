"""Names of nodes and blobs: what they may look like.

No name becomes a path as it is, so these rules serve people and addresses: `trainer_1:model.*.weight`
must be readable as node, blob and leaf without a second thought.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType

from torchrelay.errors import UsageError

MAX_BLOB_NAME_BYTES = 1024
"""Bytes of UTF-8 that a blob name may have."""

RANDOM_STATES = "rng"
"""The blob that holds the random states of a node; no user's blob may have this name."""

GRADIENTS = "@grad"
"""The blob that holds the gradients of a node; no user's blob can have this name."""

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
_ADDRESS_CHARACTERS = ":*?[]@"


def check_node_name(name: str) -> str:
    """Return `name` if a node may be called so; raises UsageError with the rule otherwise."""
    if isinstance(name, str) and _NODE.fullmatch(name):
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a node: use up to 63 letters, digits and . _ : - "
        "beginning with a letter or digit, such as 'trainer_0'"
    )


def check_blob_name(name: str) -> str:
    """Return `name` if a blob may be called so; raises UsageError with the rule otherwise."""
    problem = _blob_name_problem(name)
    if problem is None:
        return name
    raise UsageError(f"{name!r} cannot be the name of a blob: {problem}")


def check_address(name: str) -> str:
    """Return `name` if it is a blob's name, or `node:name` for the blob of one node; raises UsageError."""
    node, colon, blob = name.rpartition(":")  # a blob's name has no colon, a node's may have
    if colon:
        check_node_name(node)
    check_blob_name(blob)
    return name


def check_blob_names(names: Iterable[str], containers: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check each name, and that none is reserved or a dotted prefix of another; raises UsageError.

    Leaves are addressed `blob.leaf`, so with both `a` and `a.b` nobody could tell whose `a.b.c` is. Objects
    that lie in a container are an exception: `containers` has its name by theirs.
    """
    given = list(names)
    if not _all_plain(given):
        for name in given:
            check_blob_name(name)
    known = set(given)
    if RANDOM_STATES in known or any(map(str.startswith, given, repeat(f"{RANDOM_STATES}."))):
        _refuse_mixed(known, containers)
    depths = set(map(str.count, given, repeat(".")))
    if len(depths) > 1 and not known.isdisjoint(_prefixes(given)):  # of one depth, none is in another
        _refuse_mixed(known, containers)


def _prefixes(names: Iterable[str]) -> set[str]:
    """What lies before any dot of any name. Very many names have few such prefixes between them."""
    found = {""}
    while names := set(map(itemgetter(0), map(str.rpartition, names, repeat(".")))) - found:
        found |= names
    return found


def _all_plain(names: Sequence[object]) -> bool:
    """Whether all consist of printable ASCII without the characters of addresses, as nearly every name."""
    try:
        text = "".join(names)  # type: ignore[arg-type]
    except TypeError:  # no text
        return False
    sizes = set(map(len, names))  # type: ignore[arg-type]
    return (
        text.isascii()
        and text.isprintable()
        and not any(character in text for character in _ADDRESS_CHARACTERS)
        and min(sizes, default=1) > 0
        and max(sizes, default=1) <= MAX_BLOB_NAME_BYTES
    )


def _refuse_mixed(known: Collection[str], containers: Mapping[str, str]) -> None:
    """Say by UsageError which name it is."""
    for name in sorted(known):
        if name == RANDOM_STATES or name.startswith(f"{RANDOM_STATES}."):
            raise UsageError(f"blob name {name!r} is reserved for random states: choose another name")
        shorter = next((prefix for prefix in dotted_prefixes(name) if prefix in known), None)
        if shorter is not None and shorter != containers.get(name):
            raise UsageError(
                f"blob {shorter!r} is a dotted prefix of blob {name!r}, so the addresses of their "
                f"leaves would mix: rename one of them, for instance to {name.replace('.', '_')!r}"
            )


def dotted_prefixes(name: str) -> list[str]:
    """Return the proper prefixes of `name` that end before a dot: `a.b.c` has `a` and `a.b`."""
    found, at = [], name.find(".")
    while at >= 0:
        found.append(name[:at])
        at = name.find(".", at + 1)
    return found


def _blob_name_problem(name: object) -> str | None:
    if _all_plain([name]):
        return None
    if not isinstance(name, str):
        return f"it is a {type(name).__name__}, names are str"
    if not name:
        return "it is empty"
    found = sorted(set(name) & set(_ADDRESS_CHARACTERS))
    if found:
        return f"it has {' '.join(found)}, which addresses such as 'trainer_1:model.*' need for themselves"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "it has control characters or halves of surrogate pairs"
    if len(name.encode()) > MAX_BLOB_NAME_BYTES:
        return f"it has {len(name.encode())} bytes, more than {MAX_BLOB_NAME_BYTES}"
    return None
