"""Validate names on disk (files, keys), suggest similar names, and pack columns of names and numbers.

A user's string never becomes a path: node, group, position and attempt are validated here, and paths are
built from the validated parts. A tensor key is the leaf's name with `%`, `@` and control characters
percent-encoded (as UTF-8), followed by the form of what is stored:

    model.weight                    the whole leaf
    model.weight@[0:4,2:6]          a box of it
    model.weight@flat[1024:2048]    a range of its elements in row-major order, stored 1-D

A packed column is a list whose items are numbers, or `[start, step, count]` for a run of them; names pack to
strings, or `[prefix, first, count]` for prefix<first>, prefix<first + 1>, ...
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from operator import eq, sub
from typing import Generic, TypeVar
from urllib.parse import quote, unquote_to_bytes

from torchrelay.checkpoint.format.position import Position
from torchrelay.errors import BlobError, DamagedError, UsageError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import Json, dataclass

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}", re.ASCII)
GROUP = re.compile(r"[a-z][a-z_]*", re.ASCII)
ATTEMPT_NAME = re.compile(r"e([0-9]{8})(?:s([0-9]{6,9}))?-[0-9a-f]{6,32}", re.ASCII)
_MARK = re.compile(r"[^\s-]\S{0,62}")
SHARD_SUFFIX = ".safetensors"

_SHARD_FILE = re.compile(
    r"(?P<node>[^/]+)\.(?P<position>[0-9]+(?:\+[0-9]+)?)\.(?P<group>[a-z][a-z_]*)"
    r"(?:\.(?P<part>[2-9]|[1-9][0-9]{1,5}))?\.safetensors",
    re.ASCII,
)
_INTERVAL = r"(?:0|[1-9][0-9]{0,18}):(?:0|[1-9][0-9]{0,18})"
_FORM = re.compile(rf"(?P<flat>flat)?\[(?P<ranges>{_INTERVAL}(?:,{_INTERVAL})*)\]")
_FORMS = 1 << 10
"""Number of cached forms of pieces: a file has few forms for many leaves."""
_METADATA = "__metadata__"
LONGEST_NAME = 4096
"""Maximum characters of the name of a leaf or a blob."""
UPSTREAM = "upstream."
"""Prefix of the names of blobs of upstream runs."""
LINEAGE = f"{UPSTREAM}lineage"
"""The blob with their records."""


@dataclass(frozen=True)
class Whole:
    """A leaf that is stored whole under its own name."""

    name: str


@dataclass(frozen=True)
class Box:
    """A box of a leaf: one half-open interval of indices per dimension, at least one dimension."""

    name: str
    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Flat:
    """Elements [start, stop) of a leaf in row-major order."""

    name: str
    start: int
    stop: int


Key = Whole | Box | Flat


def format_key(key: Key) -> str:
    """The text of a key in a shard; raises BlobError for an invalid name."""
    return encode_name(key.name) + suffix_of(key)


def suffix_of(key: Key) -> str:
    """The suffix after the encoded name in the text of a key; raises BlobError for invalid intervals."""
    if isinstance(key, Whole):
        return ""
    flat = isinstance(key, Flat)
    intervals = ((key.start, key.stop),) if isinstance(key, Flat) else key.intervals
    form = _written(intervals, flat)
    if form is None:
        raise BlobError(f"{key.name}: invalid intervals of indices {intervals}")
    return f"@{form}"


def format_keys(keys: Sequence[Key]) -> Sequence[str]:
    """The texts of many keys, mostly plain names; raises as `format_key` does."""
    names = [key.name for key in keys]
    if set(map(type, keys)) <= {Whole} and all_plain(names):
        return names
    return list(map(format_key, keys))


def parse_key(text: str) -> Key:
    """Read a key; accepts only results of `format_key`, else raises DamagedError."""
    encoded, at, form = text.partition("@")
    read = _read(form) if at else None
    if not encoded or (at and read is None):
        raise DamagedError(f"invalid tensor key {text!r}")
    name = encoded
    if not is_plain(encoded):
        name = decode_name(encoded)
        try:
            written = encode_name(name)
        except BlobError as error:
            raise DamagedError(f"invalid tensor key {text!r}: {error}") from None
        if written != encoded:
            raise DamagedError(f"invalid tensor key {text!r}: its name would be written {written!r}")
    if read is None:
        return Whole(name)
    flat, intervals = read
    return Flat(name, *intervals[0]) if flat else Box(name, intervals)


def is_plain(name: str) -> bool:
    """Whether the key of a whole leaf of this name is the name itself, as usual."""
    return _holds_plain(name) and name not in ("", _METADATA)


def all_plain(found: Collection[str]) -> bool:
    """`is_plain` for all of these at once."""
    return _holds_plain("".join(found)) and none_reserved(found)


def none_reserved(found: Collection[str]) -> bool:
    """Whether none is a reserved text."""
    return "" not in found and _METADATA not in found


def _holds_plain(text: str) -> bool:
    """Whether a key holds a text unencoded: ASCII, as nearly every name."""
    return text.isascii() and text.isprintable() and "%" not in text and "@" not in text


@lru_cache(maxsize=_FORMS)
def _written(intervals: tuple[tuple[int, int], ...], flat: bool) -> str | None:
    """The suffix after the `@` of a key; None for invalid intervals."""
    if not intervals or any(not 0 <= start <= stop for start, stop in intervals):
        return None
    text = ",".join(f"{start}:{stop}" for start, stop in intervals)
    return f"flat[{text}]" if flat else f"[{text}]"


@lru_cache(maxsize=_FORMS)
def _read(form: str) -> tuple[bool, tuple[tuple[int, int], ...]] | None:
    """Whether a form is flat, and its intervals; None for a text that `_written` does not write."""
    match = _FORM.fullmatch(form)
    if match is None:
        return None
    pairs = (text.split(":") for text in match["ranges"].split(","))
    intervals = tuple((int(start), int(stop)) for start, stop in pairs)
    flat = match["flat"] is not None
    good = _written(intervals, flat) == form and not (flat and len(intervals) > 1)
    return (flat, intervals) if good else None


def encode_name(name: str) -> str:
    """Percent-encode characters that a key cannot hold; raises BlobError."""
    if is_plain(name):
        return name
    if not name:
        raise BlobError("a leaf needs a name, not an empty string")
    if name == _METADATA:  # the one key that safetensors reserves
        return "%5F" + name[1:]
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise BlobError(f"{name!r} has a lone surrogate: leaf names must be valid Unicode") from None
    return "".join(quote(c) if c in "%@" or unicodedata.category(c) == "Cc" else c for c in name)


def decode_name(text: str) -> str:
    """Undo `encode_name`; raises DamagedError for text that is not UTF-8 after decoding."""
    if "%" not in text:
        return text
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeError:
        raise DamagedError(f"invalid encoded name {text!r}") from None


@dataclass(frozen=True)
class ShardName:
    """The parts of a shard's file name, without percent-encoding."""

    node: str
    position: Position
    group: str
    part: int = 1


def shard_file_name(name: ShardName) -> str:
    """`<node>.<position>.<group>[.<part>].safetensors`, from validated parts (UsageError)."""
    check_node(name.node)
    check_group(name.group)
    if name.part < 1:
        raise UsageError(f"part {name.part} of {name.node}: parts are counted from 1")
    part = f".{name.part}" if name.part > 1 else ""
    return f"{name.node}.{name.position}.{name.group}{part}{SHARD_SUFFIX}"


def parse_shard_file_name(text: str) -> ShardName:
    """Parse a shard's file name; raises DamagedError for any other name."""
    match = _SHARD_FILE.fullmatch(text)
    if match is None:
        raise DamagedError(f"invalid file name of a shard {text!r}")
    try:
        position = Position.parse(match["position"])
        node = check_node(decode_name(match["node"]))
    except UsageError as error:
        raise DamagedError(f"invalid file name of a shard {text!r}: {error}") from None
    return ShardName(node, position, match["group"], int(match["part"] or 1))


def check_node(name: str) -> str:
    """Return a node name that can be part of a path; raises UsageError for any other."""
    if NODE.fullmatch(name) is None:
        raise UsageError(
            f"invalid node name {name!r}: use 1 to 63 of A-Z a-z 0-9 . _ : -, a letter or digit first"
        )
    return name


def check_group(name: str) -> str:
    """Return a valid name of a group of shards; raises UsageError for any other."""
    if GROUP.fullmatch(name) is None:
        raise UsageError(f"invalid group name {name!r}: use lower-case letters and '_', a letter first")
    return name


def check_attempt(name: str) -> str:
    """Return a valid name of an attempt's directory; raises DamagedError for any other."""
    if ATTEMPT_NAME.fullmatch(name) is None:
        raise DamagedError(f"invalid attempt name {name!r}: expected e<epoch>[s<step>]-<nonce>")
    return name


def check_mark_name(name: str) -> str:
    """Return a valid new name of a tag or pin; raises UsageError. Existing names are not checked."""
    if not (_MARK.fullmatch(name) and name.isprintable()):
        raise UsageError(
            f"{name!r:.80} cannot name a tag or pin: up to 63 printable characters, no spaces, "
            "not beginning with '-'"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: the closest names, or what exists."""
    known = [one for one in known if not one.startswith(GRADIENTS)]  # which users do not ask for by name
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    some = ", ".join(map(repr, sorted(known)[:8]))
    return f"; available: {some or 'none'}{', ...' if len(known) > 8 else ''}"


DATA = "data"
MANIFEST = "manifest.json"
STATS = "stats.json"


def attempt_directory(attempt_name: str) -> str:
    """The directory of an attempt; raises DamagedError for an invalid name."""
    return f"{DATA}/{check_attempt(attempt_name)}"


def manifest_path(attempt_name: str) -> str:
    """The path of an attempt's manifest."""
    return f"{attempt_directory(attempt_name)}/{MANIFEST}"


def stats_path(attempt_name: str) -> str:
    """The path of an attempt's timings."""
    return f"{attempt_directory(attempt_name)}/{STATS}"


def position_of(attempt_name: str) -> Position:
    """The position of an attempt."""
    match = ATTEMPT_NAME.fullmatch(check_attempt(attempt_name))
    epoch, step = match.groups() if match else ("0", None)
    return Position(int(epoch), int(step or 0))


T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R")


def first_of_each(keys: Iterable[K], rows: Iterable[R]) -> dict[K, R]:
    """Every key of the rows with the first row that has it, in order."""
    found: dict[K, R] = {}
    for key, row in zip(keys, rows, strict=True):
        if key not in found:
            found[key] = row
    return found


class Recent(Generic[T]):
    """Caches the last `size` results, newest first; threads may compute one twice."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: tuple[T, ...] = ()

    def get(self, fits: Callable[[T], bool], make: Callable[[], T]) -> T:
        """A cached result that matches, else a new one. Errors of `make` are not cached."""
        for one in self._kept:
            if fits(one):
                return one
        made = make()
        self._kept = (made, *self._kept[: self._size - 1])
        return made


LIMIT = 1 << 22
"""Maximum of items that a column may unpack to: a small file cannot claim much memory."""
_SHORTEST_RUN = 4
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})")


def pack_numbers(numbers: Sequence[int]) -> list[Json]:
    """Fold runs of four and more numbers; raises BlobError for more than a reader unpacks."""
    _check_count(numbers)
    count = len(numbers)
    if count >= _SHORTEST_RUN and numbers[2] - numbers[1] == (step := numbers[1] - numbers[0]):
        first = numbers[0]
        run = range(first, first + step * count, step) if step else [first] * count
        if list(numbers) == list(run):  # the usual case of columns of many rows
            return [[first, step, count]]
    steps = list(map(sub, numbers[1:], numbers))
    equal = bytes(map(eq, steps[1:], steps))  # from here on, three numbers or more are a run
    packed: list[Json] = []
    start = 0
    while (begin := equal.find(1, start)) >= 0:
        stop = equal.find(0, begin)
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
    """The numbers; raises DamagedError for an invalid packed column."""

    def run(start: Json, step: Json, count: int) -> Iterable[int] | None:
        if type(start) is not int or type(step) is not int:
            return None
        return range(start, start + step * count, step) if step else [start] * count

    return _unpacked(packed, what, int, run)


def pack_names(names: Sequence[str]) -> list[Json]:
    """Fold runs of equal prefixes and rising numbers; raises BlobError as `pack_numbers` does."""
    _check_count(names)
    numbered = bytes(map(str.isdigit, [name[-1:] for name in names]))
    packed: list[Json] = []
    start = 0
    while (begin := numbered.find(1, start)) >= 0:
        packed += names[start:begin]
        match, stop = _NUMBERED.fullmatch(names[begin]), begin + 1
        while match and stop < len(names) and names[stop] == f"{match[1]}{int(match[2]) + stop - begin}":
            stop += 1
        if match and stop - begin >= _SHORTEST_RUN:
            packed.append([match[1], int(match[2]), stop - begin])
            start = stop
        else:
            packed.append(names[begin])
            start = begin + 1
    packed += names[start:]
    return packed


def unpack_names(packed: Json, what: str) -> tuple[str, ...]:
    """The names; raises DamagedError for an invalid packed column."""

    def run(prefix: Json, first: Json, count: int) -> Iterable[str] | None:
        if type(prefix) is not str or type(first) is not int or first < 0:
            return None
        return (f"{prefix}{number}" for number in range(first, first + count))

    return _unpacked(packed, what, str, run)


def _unpacked(
    packed: Json, what: str, kind: type[T], run: Callable[[Json, Json, int], Iterable[T] | None]
) -> tuple[T, ...]:
    wrong = DamagedError(f"{what} is damaged: invalid column of a manifest")
    if not isinstance(packed, list) or len(packed) > LIMIT:
        raise wrong
    if set(map(type, packed)) <= {kind}:
        return tuple(packed)
    found: list[T] = []
    for item in packed:
        if type(item) is kind:
            found.append(item)
            continue
        if not isinstance(item, list) or len(item) != 3:
            raise wrong
        first, second, count = item
        sound = type(count) is int and 0 < count <= LIMIT - len(found)
        if not sound or (part := run(first, second, count)) is None:
            raise wrong
        found.extend(part)
    return tuple(found)


def _check_count(items: Sequence[object]) -> None:
    if len(items) > LIMIT:
        raise BlobError(
            f"the epoch has {len(items)} leaves or pieces, more than the {LIMIT} that a manifest may "
            "list: stack small tensors into larger ones"
        )
