"""Packed columns of stored tables, and answers that are remembered.

A packed column is a list whose items are numbers, or `[start, step, count]` for a run of them;
names pack to strings, or `[prefix, first, count]` for prefix<first>, prefix<first + 1>, ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from operator import eq, sub
from typing import Any, Generic, TypeVar

from torchrelay.errors import BlobError, DamagedError

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R")


def first_of_each(keys: Iterable[K], rows: Iterable[R]) -> dict[K, R]:
    """Every key of the rows with the first row that has it, in their order."""
    found: dict[K, R] = {}
    for key, row in zip(keys, rows, strict=True):
        if key not in found:
            found[key] = row
    return found


class Recent(Generic[T]):
    """Keeps the last `size` answers, newest first; each must itself tell what it was the answer to.

    Several threads may ask: an answer may then be made twice, and one of both is kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: tuple[T, ...] = ()

    def get(self, fits: Callable[[T], bool], make: Callable[[], T]) -> T:
        """A kept answer that fits, else a new one. What `make` raises is not kept."""
        for one in self._kept:
            if fits(one):
                return one
        made = make()
        self._kept = (made, *self._kept[: self._size - 1])
        return made


Json = Any
LIMIT = 1 << 22
"""More items than any column may unpack to: no small file claims a lot of memory. Writers check it, too."""
_SHORTEST_RUN = 4
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})")


def pack_numbers(numbers: Sequence[int]) -> list[Json]:
    """Numbers with their runs of four and more folded; raises BlobError for more than a reader unpacks."""
    _check_count(numbers)
    if len(numbers) >= _SHORTEST_RUN and _one_run(numbers):  # as columns of many rows mostly are
        return [[numbers[0], numbers[1] - numbers[0], len(numbers)]]
    steps = list(map(sub, numbers[1:], numbers))
    goes_on = bytes(map(eq, steps[1:], steps))  # from here on, three numbers or more are a run
    packed: list[Json] = []
    start = 0
    while (begin := goes_on.find(1, start)) >= 0:
        stop = goes_on.find(0, begin)
        stop = len(numbers) if stop < 0 else stop + 2
        packed += numbers[start:begin]
        if stop - begin >= _SHORTEST_RUN:
            packed.append([numbers[begin], steps[begin], stop - begin])
            start = stop
        else:
            packed.append(numbers[begin])
            start = begin + 1
    packed += numbers[start:]
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
    """Names with runs of equal prefixes and rising numbers folded; raises BlobError as `pack_numbers`."""
    _check_count(names)
    numbered = bytes(map(str.isdigit, [name[-1:] for name in names]))
    packed: list[Json] = []
    start = 0
    while (begin := numbered.find(1, start)) >= 0:
        packed += names[start:begin]
        match = _NUMBERED.fullmatch(names[begin])
        stop = _run_end(names, begin, match[1], int(match[2])) if match else begin
        if match and stop - begin >= _SHORTEST_RUN:
            packed.append([match[1], int(match[2]), stop - begin])
            start = stop
        else:
            packed.append(names[begin])
            start = begin + 1
    packed += names[start:]
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


def _check_count(items: Sequence[object]) -> None:
    if len(items) > LIMIT:
        raise BlobError(
            f"the epoch has {len(items)} leaves or pieces, more than the {LIMIT} that a manifest may list: "
            "stack small tensors into larger ones, or leave some out with exclude="
        )


def _one_run(numbers: Sequence[int]) -> bool:
    first, step, count = numbers[0], numbers[1] - numbers[0], len(numbers)
    if numbers[2] - numbers[1] != step:
        return False
    return list(numbers) == (list(range(first, first + step * count, step)) if step else [first] * count)


def _run_end(names: Sequence[str], start: int, prefix: str, first: int) -> int:
    """The end of the run that begins at `start`."""
    stop = start + 1
    while stop < len(names) and names[stop] == f"{prefix}{first + stop - start}":
        stop += 1
    return stop


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
