r"""The list of leaves that a blob file's metadata hold, taken out of the header as text and understood there.

    \":leaves\":{\"leaves\":[[\"name\",\"name\",\"tensor\"],[...]],\"sha256\":\"...\"}

Of a file of nothing but tensors that are blobs by themselves it says little that the entries do not say:
their order and one role. Each row is compared with what it must be, so nothing else passes. Of any other list
nothing is said here: the metadata are decoded with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import field

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.text_windows import windows
from torchrelay.records import dataclass

LEAVES = ":leaves"
"""The value that is the list; no blob can have that name."""
_BEFORE = f'\\"{LEAVES}\\":{{\\"leaves\\":['.encode()
_AFTER = b'],\\"sha256\\":\\"'
_OPEN, _BETWEEN, _CLOSE = '[\\"', '\\"],[\\"', '\\"]'
_COMMA = '\\",\\"'


@dataclass(frozen=True)
class ListedLeaves:
    """The numbers of all entries, in the order of the leaves, each a blob by itself in the same role."""

    role: str
    numbers: Sequence[int]
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """What stands in place of the rows when the metadata are decoded; no file can know it."""

    @property
    def place(self) -> bytes:
        """The mark as the text of the metadata has it."""
        return f'\\"{self.mark}\\"'.encode()


def place_of_rows(header: bytes, start: int, stop: int) -> range | None:
    """Where in the metadata the rows are of the first list that looks so; None where there is none."""
    at = header.find(_BEFORE, start, stop) + len(_BEFORE)
    end = header.find(_AFTER, at, stop) if at >= len(_BEFORE) else -1
    return range(at, end) if end >= 0 else None


def understood(header: bytes, rows: range, numbers: Mapping[str, int]) -> ListedLeaves | None:
    """What rows say of the entries of these names, which hold no quotes or escapes; None where it is more.

    Raises ValueError for what is no UTF-8.
    """
    role = (
        header[max(rows.start, rows.stop - 100) : rows.stop].decode("utf-8", "replace").rpartition(_COMMA)[2]
    )
    role = role.removesuffix(_CLOSE)
    first, last = _OPEN.encode(), (role + _CLOSE).encode()
    inner = range(rows.start + len(first), rows.stop - len(_CLOSE))
    if not (
        header.startswith(first, *_ends(rows)) and header.endswith(last, *_ends(rows)) and role.isalpha()
    ):
        return None
    found: list[int | None] = []
    for text in windows(header, inner, _BETWEEN.encode()):
        blobs = _blobs(text, role)
        if blobs is None:
            return None
        found += map(numbers.get, blobs)
    known = [number for number in found if number is not None]
    return ListedLeaves(role, known) if len(found) == len(set(known)) == len(numbers) else None


def _ends(part: range) -> tuple[int, int]:
    return part.start, part.stop


def _blobs(text: str, role: str) -> list[str] | None:
    """The blobs of rows in this role, of which each is its only leaf; None for other rows.

    What stands between two commas ends a row and has the name of the next one.
    """
    first, *rest = text.split(_COMMA)
    blobs, opened, ended = rest[0::2], rest[1::2], role + _BETWEEN
    expected = [*map(ended.__add__, blobs[1:]), role]
    return blobs if blobs and first == blobs[0] and opened == expected else None


def was_cut(values: Json, names: Set[str], mark: str) -> bool:
    """Whether it was the list of the file that was taken out, for the mark; that list is empty from now on.

    And that no value has the name of an entry, so that a row means the entry.
    """
    if not isinstance(values, dict) or not isinstance(found := values.get(LEAVES), dict):
        return False
    if found.get("leaves") != [mark] or not names.isdisjoint(values):
        return False
    found["leaves"] = []
    return True
