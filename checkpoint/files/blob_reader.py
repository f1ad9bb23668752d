"""Read one blob file: a shard with its own list of leaves.

The file is a shard as `format/shard/header.py` describes it, of node `blobs` at position 0. Instead of a
manifest it has one more value, `:leaves` (not a valid blob name): `{"leaves": [[leaf, blob, role], ...],
"sha256": ...}`. The digest covers all leaves and values, so that a changed header is detected.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import compress
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.files.publish import as_written
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Near
from torchrelay.checkpoint.format.mesh_geometry import whole
from torchrelay.checkpoint.format.names import all_plain, encode_name
from torchrelay.checkpoint.format.shard.entries import LEAVES, METADATA_KEY, EntryForm, WrittenRows
from torchrelay.checkpoint.format.shard.header import LENGTH_LIMIT
from torchrelay.checkpoint.format.shard.reader import ShardHeader, read_header
from torchrelay.checkpoint.format.shard.reads import ReadOptions, ReadRequest, ThreadMemory, verifies
from torchrelay.checkpoint.format.value_decoding import references
from torchrelay.checkpoint.load.reads.boxes import BoxPlan, BoxRead
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, ReadPlan, check_portions
from torchrelay.checkpoint.load.verify import seen_twice
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, LeafSpec, Role
from torchrelay.checkpoint.storage.base import Memory, Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import object_at
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.jobs.runtime import check_file, undisturbed
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    pass

_AT_ONCE = 512
"""Rows that are hashed with one call, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class BlobFile:
    """An open blob file; its header was verified, no tensor was read."""

    path: Path | str
    """Its path; text for a URL."""
    specs: BlobLeaves
    """Every leaf by its name, in the order in which the blobs were given."""
    header: ShardHeader
    verify: bool = True
    """Whether every block that is read is verified."""

    @cached_property
    def values(self) -> dict[str, Json]:
        """The values in their typed form."""
        return {name: json for name, json in self.header.values.items() if name != LEAVES}

    @cached_property
    def inner(self) -> dict[str, str]:
        """The tensors inside values with the name of that value; raises DamagedError for a missing one."""
        found: dict[str, str] = {}
        for name, json in self.values.items():
            for leaf in references(json):
                found.setdefault(leaf, name)
        if missing := [leaf for leaf in found if leaf not in self.specs]:
            raise DamagedError(f"{self.path}: the value {found[missing[0]]} has no tensor {missing[0]}")
        return found

    def same_content(self, one: str, other: str) -> bool:
        """Whether two stored tensors of one form have the same bytes, by the header."""
        entries = self.header.entries
        return entries[self.specs.key_of(one)].digests == entries[self.specs.key_of(other)].digests

    @property
    def options(self) -> ReadOptions:
        """How the file is read."""
        return ReadOptions(verify=self.verify)

    @property
    def is_remote(self) -> bool:
        """Whether reads go over a network, request by request."""
        return self.header.is_remote

    def plan(self, reads: Iterable[LeafRead]) -> ReadPlan:
        """Plan the reads of all destinations. Raises DamagedError."""
        straight: list[tuple[ShardHeader, ReadRequest]] = []
        boxes: list[BoxRead] = []
        for read in reads:
            spec = self.specs[read.leaf]
            memory = read.destination.cast("B")
            if read.target is None:
                request = ReadRequest(self.specs.key_of(read.leaf), 0, spec.nbytes, memory)
                straight.append((self.header, request))
            else:
                own, whole_leaf = spec.alias_of or spec.name, Near((0,), ("",), ((False, whole(spec.shape)),))
                form = (spec.dtype, spec.shape, spec.nbytes, "", spec.group, 0)
                leaf = LeafRow(own, spec.blob, "tensor", spec.role, *form)
                boxes.append(BoxRead(leaf, whole_leaf, read.target, memory))
        return ReadPlan(straight, BoxPlan(boxes, lambda leaf, node, key: self.header))

    def check_keys(self, keys: Sequence[str]) -> int:
        """Verify all blocks of entries, or only that the file is unchanged; returns the number of bytes."""
        if not self.verify:
            self.header.check_in_place()
            return 0
        return check_portions(self.header.checks_whole(keys, ThreadMemory()), self.options)

    def fill_memories(self, keys: Sequence[str], memories: Sequence[Memory]) -> None:
        """Fill memory of exactly their sizes with whole entries; raises DamagedError or StorageError."""
        seen_twice(lambda: self.header.read_whole(keys, memories, self.options))
        if not self.verify:
            self.header.check_in_place()


@undisturbed()
def open_blob_file(where: str | os.PathLike[str], *, verify: str = "full") -> BlobFile:
    """Open a file of `save_blobs`; reads and verifies its header.

    `verify="headers"` trusts the tensor bytes of the storage. Raises UsageError for a missing file,
    DamagedError if it is truncated or changed, FormatError for any other file.
    """
    verifying = verifies(verify)
    path, storage, name = _found(where)
    try:
        header = read_header(storage, name)
    except (DamagedError, FormatError) as error:
        if not _of_others(storage, name):
            raise
        raise FormatError(
            f"{path} was not written by save_blobs: open it with safetensors, or convert it by "
            "import_checkpoint(..., format='safetensors')"
        ) from error
    said = header.values.get(LEAVES)
    if said is None:
        raise FormatError(f"{path} was not written by save_blobs; for an epoch of a run use open_checkpoint")
    try:
        leaves = BlobLeaves(header, said["leaves"])
        file = BlobFile(path, leaves, header, verifying)
        sealed = leaves.seal(file.values)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: its list of leaves does not fit the rest of the file") from error
    if said.get("sha256") != sealed:
        raise DamagedError(f"{path}: the header is not the one that was saved")
    return file


def _found(where: str | os.PathLike[str]) -> tuple[Path | str, Storage, str]:
    """The shown name of an existing file, its storage, and its name there."""
    path = as_written(where, "a file of save_blobs")
    if isinstance(path, str):
        storage, name = object_at(path, "the blob file")
        if storage.stat(name) is None:
            raise UsageError(f"{storage.url}/{name} does not exist: give a file of save_blobs")
        return f"{storage.url}/{name}", storage, name
    check_file(path, "a file of save_blobs")
    return path, LocalStorage(path.parent), path.name


def _of_others(storage: Storage, name: str) -> bool:
    """Whether this is a safetensors file without metadata of torchrelay."""
    try:
        length = int.from_bytes(storage.read_range(name, 0, 8), "little")
        if not 2 <= length <= min(LENGTH_LIMIT, (storage.stat(name) or 0) - 8):
            return False
        said = canonical_json.loads(
            storage.read_range(name, 8, length), what="header", limit_bytes=LENGTH_LIMIT
        )
    except (OSError, DamagedError, FormatError):
        return False
    metadata = said.get("__metadata__", {}) if isinstance(said, dict) else None
    return isinstance(metadata, dict) and METADATA_KEY not in metadata


def seal(rows: Iterable[Sequence[str]], values: Mapping[str, Json]) -> str:
    """SHA-256 of all that a header states of leaves (see `tensor_rows`, `row`; in batches) and values."""
    hashed, comma = hashlib.sha256(b"[["), ""
    for some in rows:
        hashed.update(f"{comma}{','.join(some)}".encode())
        comma = ","
    hashed.update(b"],%b]" % canonical_json.dumps_read(dict(values)))
    return hashed.hexdigest()


def slices(count: int) -> Iterator[slice]:
    """Slices of so many leaves."""
    return (slice(at, at + _AT_ONCE) for at in range(0, count, _AT_ONCE))


def row(one: LeafSpec) -> str:
    """The sealed text of a leaf, in canonical JSON; raises UsageError for what has none."""
    said = [one.name, one.blob, one.role._value_, one.kind, one.dtype, one.shape, one.alias_of]
    return canonical_json.dumps(said).decode()


def openings(names: Sequence[str], blobs: Sequence[str], roles: Iterable[str]) -> list[str]:
    """Name, blob and role of leaves, in canonical JSON without the last bracket; UsageError for non-text."""
    words = canonical_json.words(names)
    if names == blobs:
        return [f'[{name},{name},"{role}"' for name, role in zip(words, roles, strict=True)]
    others = canonical_json.words(blobs)
    return [f'[{name},{blob},"{role}"' for name, blob, role in zip(words, others, roles, strict=True)]


def tensor_rows(opened: Iterable[str], forms: Sequence[EntryForm]) -> list[str]:
    """The rows of very many tensors without aliases, most of which share their form."""
    return list(map(add, opened, _row_ends(forms)))


def _row_ends(forms: Sequence[EntryForm]) -> Iterator[str]:
    """The part of each row that depends on the form."""
    known = {id(form): form for form in forms}
    ends = {
        key: f',"tensor",{canonical_json.dumps([form.dtype, list(form.shape)]).decode()[1:-1]},null]'
        for key, form in known.items()
    }
    return map(ends.__getitem__, map(id, forms))


class BlobLeaves(Mapping[str, LeafSpec]):
    """The leaves of a blob file by name; specs are made on demand."""

    def __init__(self, header: ShardHeader, said: WrittenRows | Sequence[Sequence[str]]) -> None:
        """Of rows of leaf, blob and role; TypeError or ValueError for others."""
        self._header = header
        self._made: dict[str, LeafSpec] = {}
        entries, values = header.entries.keys(), header.values.keys()
        self._plain: Set[str] = entries
        self._written = isinstance(said, WrittenRows)
        if isinstance(said, WrittenRows):
            self._names = self._blobs = said.names
            self._roles = [said.role] * len(said)
        else:
            columns = map(list, zip(*said, strict=True)) if said else ([], [], [])
            self._names, self._blobs, self._roles = columns
        own = self._numbers.keys()
        if len(own) < len(said):
            raise ValueError("a leaf occurs twice")
        if self._blobs != self._names and not set(map(type, self._blobs)) <= {str}:
            raise TypeError("the name of a blob must be text")
        own_entries = entries >= own and own.isdisjoint(values)
        plain = (own_entries and header.entries.all_plain) or all_plain(self._names)
        self._all_plain = plain and own_entries
        if not self._all_plain:
            self._plain = entries - values if plain else set()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return dict(zip(self._names, range(len(self._names)), strict=True))

    def __getitem__(self, name: str) -> LeafSpec:
        found = self._made.get(name)
        if found is None:
            number, header = self._numbers[name], self._header
            of = (name, self._blobs[number], _ROLES[self._roles[number]], MAIN_GROUP)
            if name in self._plain:
                form = header.entries.form(name)
                found = LeafSpec(*of, "tensor", form.dtype, form.shape, form.nbytes)
            elif name in header.values:
                found = LeafSpec(*of, "value", None, (), 0)
            else:
                key = header.aliases.get(name)
                entry = header.entries[key or encode_name(name)]
                alias = None if key is None else entry.key.name
                found = LeafSpec(*of, "tensor", entry.dtype.name, entry.shape, entry.nbytes, alias)
            self._made[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def plain_blobs(self, among: Collection[str]) -> list[str]:
        """Those of these blobs that are one tensor, whose name is its key."""
        if self._all_plain and self._blobs == self._names and set(self._roles) <= _BLOBS:
            here = self._names
            return here if here == list(among) else [name for name in here if name in among]
        times, able = Counter(self._blobs), self._plain & set(among)
        return [
            name
            for name, blob, role in zip(self._names, self._blobs, self._roles, strict=True)
            if blob == name and role in _BLOBS and name in able and times[name] == 1
        ]

    def key_of(self, name: str) -> str:
        """The key under which the bytes of a leaf are stored."""
        return encode_name((self[name].alias_of or name) if name in self._header.aliases else name)

    def seal(self, values: Mapping[str, Json]) -> str:
        """`seal` of these leaves; raises KeyError, TypeError or ValueError for malformed ones."""
        if not set(self._roles) <= _ROLES.keys():
            raise ValueError("a leaf has an unknown role")
        forms = self._header.entries.forms(self._names) if self._all_plain else []
        return seal((self._rows(some, forms) for some in slices(len(self._names))), values)

    def _rows(self, some: slice, forms: Sequence[EntryForm]) -> list[str]:
        columns = self._names[some], self._blobs[some], self._roles[some]
        if self._all_plain and self._written:
            names, _, roles = columns
            both = zip(names, roles, _row_ends(forms[some]), strict=True)
            return [f'["{name}","{name}","{role}"{end}' for name, role, end in both]
        if self._all_plain:
            return tensor_rows(openings(*columns), forms[some])
        here = [name in self._plain for name in columns[0]]
        names, blobs, roles = (list(compress(column, here)) for column in columns)
        rows = iter(tensor_rows(openings(names, blobs, roles), self._header.entries.forms(names)))
        return [next(rows) if own else row(self[name]) for name, own in zip(columns[0], here, strict=True)]


_ROLES = {str(role): role for role in Role}
_BLOBS = frozenset((str(Role.TENSOR), str(Role.PARAMETER)))
