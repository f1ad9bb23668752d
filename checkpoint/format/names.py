"""Names on disk: path parts, shard file names, keys of tensors; suggestions for wrong ones.

No user string becomes a path: node, group, position and try are validated here, and paths are
rebuilt from the validated parts. A tensor key is the leaf's name with `%`, `@` and control
characters percent-encoded (as UTF-8), followed by the form of what is stored:

    model.weight                    the whole leaf
    model.weight@[0:4,2:6]          a box of it
    model.weight@flat[1024:2048]    a range of its elements in row-major order, stored 1-D
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.errors import BlobError, DamagedError, UsageError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import dataclass

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}", re.ASCII)
GROUP = re.compile(r"[a-z][a-z_]*", re.ASCII)
TRY = re.compile(r"e[0-9]{8}(?:s[0-9]{6,9})?-[0-9a-f]{6,32}", re.ASCII)
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
"""Forms of pieces that are remembered: a file has few, of very many leaves."""
_METADATA = "__metadata__"
LONGEST_NAME = 4096
"""Characters of the name of a leaf or a blob."""


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
    """The text of a key in a shard; raises BlobError for a name that cannot be one."""
    return encode_name(key.name) + suffix_of(key)


def suffix_of(key: Key) -> str:
    """What the text of a key has behind its encoded name, which is not looked at; raises BlobError."""
    if isinstance(key, Whole):
        return ""
    flat = isinstance(key, Flat)
    intervals = ((key.start, key.stop),) if isinstance(key, Flat) else key.intervals
    form = _written(intervals, flat)
    if form is None:
        raise BlobError(f"{key.name}: {intervals} are no intervals of indices")
    return f"@{form}"


def format_keys(keys: Sequence[Key]) -> Sequence[str]:
    """The texts of very many keys, nearly all of which are plain names; raises as `format_key` does."""
    names = [key.name for key in keys]
    if set(map(type, keys)) <= {Whole} and all_plain(names):
        return names
    return list(map(format_key, keys))


def parse_key(text: str) -> Key:
    """Read a key back; only what `format_key` writes is accepted, anything else is a DamagedError."""
    encoded, at, form = text.partition("@")
    read = _read(form) if at else None
    if not encoded or (at and read is None):
        raise DamagedError(f"{text!r} is no tensor key")
    name = encoded if is_plain(encoded) else _decoded_name(encoded, text)
    if read is None:
        return Whole(name)
    flat, intervals = read
    return Flat(name, *intervals[0]) if flat else Box(name, intervals)


def _decoded_name(encoded: str, key: str) -> str:
    name = decode_name(encoded)
    try:
        written = encode_name(name)
    except BlobError as error:
        raise DamagedError(f"{key!r} is no tensor key: {error}") from None
    if written != encoded:
        raise DamagedError(f"{key!r} is no tensor key: its name would be written {written!r}")
    return name


def is_plain(name: str) -> bool:
    """Whether a whole leaf of this name has it as its key, as nearly all have."""
    return holds_plain(name) and name not in ("", _METADATA)


def all_plain(found: Collection[str]) -> bool:
    """Whether all are plain, at once."""
    return holds_plain("".join(found)) and none_kept(found)


def none_kept(found: Collection[str]) -> bool:
    """Whether none is a text that no key can be."""
    return "" not in found and _METADATA not in found


def holds_plain(text: str) -> bool:
    """Whether a key holds all of a text as it is: ASCII, which nearly every name consists of."""
    return text.isascii() and text.isprintable() and "%" not in text and "@" not in text


@lru_cache(maxsize=_FORMS)
def _written(intervals: tuple[tuple[int, int], ...], flat: bool) -> str | None:
    """What follows the `@` of a key; None for what are no intervals."""
    if not intervals or any(not 0 <= start <= stop for start, stop in intervals):
        return None
    text = ",".join(f"{start}:{stop}" for start, stop in intervals)
    return f"flat[{text}]" if flat else f"[{text}]"


@lru_cache(maxsize=_FORMS)
def _read(form: str) -> tuple[bool, tuple[tuple[int, int], ...]] | None:
    """Whether a form is flat, and its intervals; None for any that `_written` does not write."""
    match = _FORM.fullmatch(form)
    if match is None:
        return None
    intervals = tuple(_interval(text) for text in match["ranges"].split(","))
    flat = match["flat"] is not None
    good = _written(intervals, flat) == form and not (flat and len(intervals) > 1)
    return (flat, intervals) if good else None


def _interval(text: str) -> tuple[int, int]:
    start, stop = text.split(":")
    return int(start), int(stop)


def encode_name(name: str) -> str:
    """Percent-encode what a leaf's name may hold and a key may not; raises BlobError."""
    if is_plain(name):
        return name
    if not name:
        raise BlobError("a leaf needs a name, not an empty string")
    if name == _METADATA:  # the one key that safetensors keeps for itself
        return "%5F" + name[1:]
    try:
        return "".join(_percent(c) if c in "%@" or unicodedata.category(c) == "Cc" else c for c in name)
    finally:
        _check_unicode(name)


def decode_name(text: str) -> str:
    """Undo `encode_name`; raises DamagedError for text that is not UTF-8 behind its percent signs."""
    if "%" not in text:
        return text
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeError:
        raise DamagedError(f"{text!r} is no encoded name") from None


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8"))


def _check_unicode(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise BlobError(f"{name!r} has a lone surrogate: leaf names must be valid Unicode") from None


@dataclass(frozen=True)
class ShardName:
    """The parts of a shard's file name, as they are before any percent-encoding."""

    node: str
    position: Position
    group: str
    part: int = 1


def shard_file_name(name: ShardName, *, escape: str = "") -> str:
    """`<node>.<position>.<group>[.<part>].safetensors`, from validated parts (UsageError).

    `escape` lists characters that the store cannot have in a file name (`:` on some).
    """
    check_node(name.node)
    check_group(name.group)
    if name.part < 1:
        raise UsageError(f"part {name.part} of {name.node}: parts are counted from 1")
    node = "".join(_percent(c) if c in escape else c for c in name.node)
    part = f".{name.part}" if name.part > 1 else ""
    return f"{node}.{name.position}.{name.group}{part}{SHARD_SUFFIX}"


def parse_shard_file_name(text: str) -> ShardName:
    """Read a shard's file name back; raises DamagedError for any other name."""
    match = _SHARD_FILE.fullmatch(text)
    if match is None:
        raise DamagedError(f"{text!r} is no shard's file name")
    try:
        position = Position.parse(match["position"])
        node = check_node(decode_name(match["node"]))
    except UsageError as error:
        raise DamagedError(f"{text!r} is no shard's file name: {error}") from None
    return ShardName(node, position, match["group"], int(match["part"] or 1))


def check_node(name: str) -> str:
    """Give back a node name that may be part of a path; raises UsageError for any other."""
    if NODE.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is no node name: use 1 to 63 of A-Z a-z 0-9 . _ : -, a letter or digit first"
        )
    return name


def check_group(name: str) -> str:
    """Give back the name of a group of shards; raises UsageError for what is none."""
    if GROUP.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no group name: use lower-case letters and '_', a letter first")
    return name


def check_try(name: str) -> str:
    """Give back the name of a try directory; raises DamagedError for what is none."""
    if TRY.fullmatch(name) is None:
        raise DamagedError(f"{name!r} is not the name of a try: e<epoch>[s<step>]-<nonce> is expected")
    return name


def check_mark_name(name: str) -> str:
    """A name that a tag or pin may get; UsageError for any other. What is there is read whatever it is."""
    if not (_MARK.fullmatch(name) and name.isprintable()):
        raise UsageError(
            f"{name!r:.80} cannot name a tag or pin: up to 63 printable characters, no spaces, "
            "not beginning with '-'"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: what was probably meant, or what there is."""
    known = [one for one in known if not one.startswith(GRADIENTS)]  # which nobody asks for by name
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    some = ", ".join(map(repr, sorted(known)[:8]))
    return f"; there {'is' if len(known) == 1 else 'are'} {some or 'none'}{', ...' if len(known) > 8 else ''}"
