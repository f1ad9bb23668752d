"""The rules by which the replicas of a box share its writing; they are part of the disk format.

A rule looks at nothing but the leaf and the box, so neither writers nor readers have to ask anybody. Mesh
layouts name theirs. What rule 1 does not bound is how small pieces become: thousands of replicas made
thousands of them of a box of 1 MiB, and whoever read it had to find them all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torchrelay.checkpoint.disk.boxes import Bounds

RULE = 2
"""The one by which this version writes."""
KNOWN = frozenset((1, 2))
SPLIT_BYTES = 1 << 20
"""Replicas divide a box of at least so many bytes, by rule 2 into pieces of about as many."""


class Among(NamedTuple):
    """The replicas of a leaf's boxes: their rule and number, and the one that the leaf's name chooses."""

    rule: int
    replicas: int
    owner: int
    item_bytes: int

    @classmethod
    def of(cls, name: str, replicas: int, item_bytes: int, rule: int) -> Among:
        """Those of leaf `name`."""
        return cls(rule, replicas, owner(name, replicas), item_bytes)


class Division(NamedTuple):
    """Chunks of a box, each of `rows` indices of its first dimension, the last perhaps of fewer.

    Replica `first` stores the first one, those behind it, around the end, the others.
    """

    rows: int
    chunks: int
    first: int


def owner(name: str, replicas: int) -> int:
    """The replica that a leaf's name chooses."""
    if replicas == 1:
        return 0
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % replicas


def division(lengths: Sequence[int], among: Among) -> Division:
    """How the replicas of a box of these lengths share it."""
    rows = lengths[0] if lengths else 1
    nbytes = math.prod(lengths) * among.item_bytes
    if among.rule == 1:
        divided = nbytes >= SPLIT_BYTES and rows >= among.replicas
        most, first = (among.replicas, 0) if divided else (1, among.owner)
    else:
        most, first = min(among.replicas, rows, nbytes // SPLIT_BYTES), among.owner
    chunk = -(-rows // max(most, 1))
    return Division(chunk, -(-rows // chunk), first)


def share(box: Bounds, replica: int, among: Among) -> Bounds | None:
    """What one of the replicas of a box stores of it; None for nothing."""
    if among.replicas == 1:
        return box
    rows, chunks, first = division([stop - start for start, stop in box], among)
    number = (replica - first) % among.replicas
    if number >= chunks:
        return None
    if chunks == 1:
        return box
    start, stop = box[0]
    return ((start + number * rows, min(start + (number + 1) * rows, stop)), *box[1:])


def writing_replicas(boxes: Sequence[Sequence[int]], among: Among) -> list[range]:
    """The numbers of the replicas that store something of boxes of these lengths."""
    found: set[int] = set()
    for _, chunks, first in {division(lengths, among) for lengths in boxes}:
        found.update((first + number) % among.replicas for number in range(chunks))
    runs = groupby(enumerate(sorted(found)), lambda placed: placed[1] - placed[0])
    return [range(one[0][1], one[-1][1] + 1) for one in (list(run) for _, run in runs)]


def first_share(boxes: Sequence[Sequence[int]], among: Among) -> int:
    """The most elements that a replica stores of boxes of these lengths, if all first chunks are its own."""
    return sum(division(lengths, among).rows * math.prod(lengths[1:]) for lengths in boxes)
