"""Columns of a manifest in few bytes: arithmetic runs of whole numbers, numbered names.

A packed column is a list whose items are numbers, or `[start, step, count]` for a run of them;
names pack to strings, or `[prefix, first, count]` for prefix<first>, prefix<first + 1>, ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchrelay.errors import DamagedError

Json = Any
LIMIT = 1 << 22
"""More items than any column may unpack to: no small file claims a lot of memory."""
_SHORTEST_RUN = 4
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})")


def pack_numbers(numbers: Sequence[int]) -> list[Json]:
    """Numbers with their runs of four and more folded."""
    packed: list[Json] = []
    start = 0
    last = len(numbers) - _SHORTEST_RUN
    while start < len(numbers):
        if start > last or numbers[start + 2] - (middle := numbers[start + 1]) != middle - numbers[start]:
            packed.append(numbers[start])
            start += 1
            continue
        stop = _run_end(numbers, start)
        if stop - start >= _SHORTEST_RUN:
            packed.append([numbers[start], numbers[start + 1] - numbers[start], stop - start])
        else:
            stop = start + 1
            packed.append(numbers[start])
        start = stop
    return packed


def unpack_numbers(packed: Json, what: str) -> tuple[int, ...]:
    """The numbers again; raises DamagedError for anything that is no packed column."""
    if set(map(type, _items(packed, what))) <= {int}:
        return tuple(packed)
    found: list[int] = []
    for item in packed:
        if type(item) is int:
            found.append(item)
            continue
        start, step, count = _run(item, len(found), what)
        if type(start) is not int or type(step) is not int:
            raise _wrong(what)
        found.extend([start] * count if step == 0 else range(start, start + step * count, step))
    return tuple(found)


def pack_names(names: Sequence[str]) -> list[Json]:
    """Names with runs of equal prefixes and rising numbers folded."""
    packed: list[Json] = []
    start = 0
    while start < len(names):
        match = _NUMBERED.fullmatch(names[start]) if names[start][-1:].isdigit() else None
        stop = start + 1
        while match and stop < len(names) and names[stop] == f"{match[1]}{int(match[2]) + stop - start}":
            stop += 1
        if match and stop - start >= _SHORTEST_RUN:
            packed.append([match[1], int(match[2]), stop - start])
        else:
            stop = start + 1
            packed.append(names[start])
        start = stop
    return packed


def unpack_names(packed: Json, what: str) -> tuple[str, ...]:
    """The names again; raises DamagedError for anything that is no packed column."""
    if set(map(type, _items(packed, what))) <= {str}:
        return tuple(packed)
    found: list[str] = []
    for item in packed:
        if isinstance(item, str):
            found.append(item)
            continue
        prefix, first, count = _run(item, len(found), what)
        if not isinstance(prefix, str) or type(first) is not int or first < 0:
            raise _wrong(what)
        found.extend(f"{prefix}{number}" for number in range(first, first + count))
    return tuple(found)


def _run_end(numbers: Sequence[int], start: int) -> int:
    """The end of the run that begins at `start`; stretches of doubling length are compared at once."""
    stop, ahead = start + 1, 16
    if stop == len(numbers):
        return stop
    first, step = numbers[start], numbers[stop] - numbers[start]
    while (more := list(numbers[stop : stop + ahead])) and more == _run_items(
        first + step * (stop - start), step, len(more)
    ):
        stop, ahead = stop + len(more), ahead * 2
    while stop < len(numbers) and numbers[stop] == first + step * (stop - start):
        stop += 1
    return stop


def _run_items(first: int, step: int, count: int) -> list[int]:
    return list(range(first, first + step * count, step)) if step else [first] * count


def _items(packed: Json, what: str) -> list[Json]:
    if not isinstance(packed, list) or len(packed) > LIMIT:
        raise _wrong(what)
    return packed


def _run(item: Json, before: int, what: str) -> tuple[Json, Json, int]:
    if not isinstance(item, list) or len(item) != 3:
        raise _wrong(what)
    start, step, count = item
    if type(count) is not int or not 0 < count <= LIMIT - before:
        raise _wrong(what)
    return start, step, count


def _wrong(what: str) -> DamagedError:
    return DamagedError(f"{what} is damaged: it is no column of a manifest")
