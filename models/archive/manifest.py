"""Archive files: manifest and members, with tensors verified as they are read.

    manifest.json            format, kind ("states" or "package"), tensors by member, ties, plain values
    model.safetensors        states of the model, tied states once
    aux.safetensors          tensors inside the plain values
    constants.safetensors    packages only, like program.json and source/...

The manifest is the last member, because it holds the digests of all tensors. It is protected by the CRC of
its zip member.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.files.publish import Where, as_written, fetched, publish
from torchrelay.checkpoint.format import canonical_json, dtypes
from torchrelay.checkpoint.format.canonical_json import Fields, check_stamp, stamp
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, ElementType, block_count, block_digests
from torchrelay.checkpoint.format.shard.reads import PLAIN, each
from torchrelay.checkpoint.format.value_decoding import decode, references
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.checkpoint.storage.local import MODE
from torchrelay.checkpoint.storage.open import shown
from torchrelay.errors import BlobError, DamagedError, FormatError
from torchrelay.jobs.runtime import check_file
from torchrelay.metadata.zip_reader import ZipMembers, name_fits, open_zip
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    import torch


HEADER_LIMIT = 100_000_000
PARAMETER, BUFFER, OTHER = "parameter", "buffer", "other"
_DIMENSIONS, _ELEMENTS = 64, 2**58
ROLES = (PARAMETER, BUFFER, OTHER)


@dataclass(frozen=True)
class ArchiveEntry:
    """A stored tensor: logical `element` type and `shape`, and xxh3-128 `digests` per MiB.

    `role` is parameter, buffer and so on; `trainable` is whether a parameter had gradients.
    """

    element: ElementType
    shape: tuple[int, ...]
    role: str = OTHER
    trainable: bool = False
    digests: bytes = b""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.element.nbytes(self.shape)

    def to_json(self) -> Json:
        """Return the form in the manifest."""
        return {
            "dtype": self.element.name,
            "shape": list(self.shape),
            "role": self.role,
            "trainable": self.trainable,
            "digests": base64.b64encode(self.digests).decode("ascii"),
        }


def _entry_from_json(fields: Fields) -> ArchiveEntry:
    """Parse the form in the manifest; raises DamagedError."""
    shape = fields.items("shape")
    whole = len(shape) <= _DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)
    # Even for empty tensors torch multiplies the other sizes.
    possible = whole and math.prod(size for size in shape if size) < _ELEMENTS
    if not possible or fields.text("role") not in ROLES:
        raise fields.wrong("shape")
    element = dtypes.by_name(fields.text("dtype"))
    try:
        digests = base64.b64decode(fields.text("digests"), validate=True)
    except (binascii.Error, ValueError):
        raise fields.wrong("digests") from None
    entry = ArchiveEntry(element, tuple(shape), fields.text("role"), fields.flag("trainable"), digests)
    if len(digests) != block_count(entry.nbytes) * SIZE:
        raise fields.wrong("digests")
    return entry


def _places_in(
    header: bytes, data: int, nbytes: int, entries: Mapping[str, ArchiveEntry], what: str
) -> dict[str, int]:
    """Return the offset of each tensor in the member at `data`; DamagedError if its header differs."""
    found = canonical_json.loads(header, what=what, limit_bytes=HEADER_LIMIT)
    if not isinstance(found, dict):
        raise DamagedError(f"{what}: its header is not an object")
    found.pop("__metadata__", None)
    if set(found) != set(entries):
        odd = sorted(set(found) ^ set(entries))[0]
        raise DamagedError(f"{what}: manifest and header do not have the same tensors ({odd[:100]!r})")
    placed = {
        name: _place(found[name], entry, data, nbytes, f"{what} ({name})") for name, entry in entries.items()
    }
    end = 0
    for name in sorted((one for one in placed if entries[one].nbytes), key=lambda one: placed[one]):
        if placed[name] < end:  # otherwise an archive could expand beyond its size
            raise DamagedError(f"{what} ({name}): its bytes overlap those of another tensor")
        end = placed[name] + entries[name].nbytes
    return placed


def _place(said: Json, entry: ArchiveEntry, data: int, nbytes: int, what: str) -> int:
    shape = list(entry.element.stored_shape(entry.shape))
    match said:
        case {"dtype": code, "shape": stored, "data_offsets": [int(start), int(stop)]}:
            fits = code == entry.element.code and stored == shape and stop - start == entry.nbytes
            if fits and start >= 0 and data + stop <= nbytes:
                return data + start
    raise DamagedError(f"{what}: the header does not match the manifest")


@dataclass(frozen=True)
class TensorToStore:
    """A tensor to store; it is copied only when written."""

    tensor: torch.Tensor
    role: str = OTHER
    trainable: bool = False


ALIGNMENT = 64
_PADDING_ID = 0xD935
"""The zip extra field that other tools use for alignment."""
_LONG = 1 << 30
"""Members from this size on have zip64 sizes, which take bytes of the header."""
_LONG_FIELD = 20


def add_member(archive: zipfile.ZipFile, name: str, nbytes: int, pieces: Iterable[memoryview]) -> None:
    """Write an uncompressed, aligned member; equal content gives equal archives."""
    if not name_fits(name):
        raise BlobError(f"{name[:100]!r} is not a valid member name of an archive")
    info = zipfile.ZipInfo(name)  # 1980, the earliest date of zip
    info.external_attr = 0o100644 << 16
    long = nbytes >= _LONG
    taken = archive.start_dir + 30 + len(name) + 4 + (_LONG_FIELD if long else 0)
    padding = -taken % ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=long) as member:
        for piece in pieces:
            member.write(piece)


def write_tensors(archive: zipfile.ZipFile, member: str, tensors: Mapping[str, TensorToStore]) -> Json:
    """Write a member and return its part of the manifest; raises BlobError for unsupported tensors."""
    entries = {}
    for name, one in tensors.items():
        element = dtypes.logical_dtype(one.tensor.dtype, name)
        dtypes.check_dense(one.tensor, name)
        entries[name] = ArchiveEntry(element, tuple(one.tensor.shape), one.role, one.trainable)
    if "__metadata__" in entries:
        raise BlobError("invalid tensor name '__metadata__' in a safetensors file: rename it")
    # Larger item sizes first, so that all are aligned.
    order = sorted(entries.items(), key=lambda item: (-item[1].element.itemsize, item[0]))
    described = (
        (name, one.element.code, one.element.stored_shape(one.shape), one.nbytes) for name, one in order
    )
    header = dtypes.safetensors_header(described, {"format": "pt"}, ALIGNMENT)
    if len(header) > HEADER_LIMIT:
        raise BlobError(f"{len(entries)} tensors are too many for one file")
    digests = dict.fromkeys(entries, b"")

    def pieces() -> Iterator[memoryview]:
        yield memoryview(header)
        for name, _ in order:
            memory = dtypes.stored_bytes(tensors[name].tensor, name)
            for at in range(0, len(memory), BLOCK):
                block = memory[at : at + BLOCK]
                digests[name] += block_digests(block)
                yield block

    add_member(archive, member, len(header) + sum(entry.nbytes for entry in entries.values()), pieces())
    return {name: replace(entry, digests=digests[name]).to_json() for name, entry in entries.items()}


class StoredTensors:
    """The tensors of one member, read on request."""

    def __init__(self, archive: ZipMembers, member: str, said: Fields) -> None:
        self._archive, self._member = archive, member
        self.entries: dict[str, ArchiveEntry] = {}
        for name, one in said.values.items():
            if not isinstance(one, dict):
                raise DamagedError(f"{said.what} is damaged: a tensor is not described")
            self.entries[name] = _entry_from_json(Fields(one, f"{said.what} ({name})"))
        found = archive.members.get(member)
        if found is None:
            raise DamagedError(f"{archive.what}: has no member {member!r}")
        length = bytearray(8)
        archive.read_into(member, 0, memoryview(length))
        nbytes = int.from_bytes(length, "little")
        what = f"{archive.what}: {member}"
        if nbytes > min(HEADER_LIMIT, len(found) - 8):
            raise DamagedError(f"{what}: its header does not fit the member")
        header = bytearray(nbytes)
        archive.read_into(member, 8, memoryview(header))
        self._places = _places_in(bytes(header), 8 + nbytes, len(found), self.entries, what)

    def read(self, name: str) -> torch.Tensor:
        """Read a new tensor to the CPU, verifying every byte; raises DamagedError with member and tensor."""
        import torch

        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=dtypes.torch_dtype(entry.element))
        self.read_all([name], [dtypes.memory_of(tensor)])
        return tensor

    def read_all(self, names: Sequence[str], memories: Sequence[Memory]) -> None:
        """Read tensors into memory of their exact sizes and verify them; see `read`."""
        self._verify(names, lambda number, at, nbytes: memoryview(memories[number])[at : at + nbytes])

    def check(self, names: Sequence[str]) -> None:
        """Verify tensors without keeping them; see `read`."""
        mine = threading.local()

        def scratch(number: int, at: int, nbytes: int) -> memoryview:
            if not hasattr(mine, "memory"):
                mine.memory = memoryview(bytearray(BLOCK))
            memory: memoryview = mine.memory
            return memory[:nbytes]

        self._verify(names, scratch)

    def read_range(self, name: str, start: int, memory: memoryview) -> None:
        """Read a tensor's bytes from `start` on into memory, verifying every block; see `read`."""
        nbytes, stop = self.entries[name].nbytes, start + len(memory)
        block = memoryview(bytearray(BLOCK))
        for at in range(start // BLOCK * BLOCK, stop, BLOCK):
            end = min(at + BLOCK, nbytes)
            if start <= at and end <= stop:
                self._verified(name, at, memory[at - start : end - start])
                continue
            self._verified(name, at, block[: end - at])
            first, last = max(start, at), min(stop, end)
            memory[first - start : last - start] = block[first - at : last - at]

    def _verify(self, names: Sequence[str], place: Callable[[int, int, int], memoryview]) -> None:
        """Hash each block while it is in the CPU cache; the CRC of the zip is not checked."""
        sizes = [self.entries[name].nbytes for name in names]
        blocks = [
            (number, at, min(BLOCK, nbytes - at))
            for number, nbytes in enumerate(sizes)
            for at in range(0, nbytes, BLOCK)
        ]

        def verify(block: tuple[int, int, int]) -> None:
            self._verified(names[block[0]], block[1], place(*block))

        each(verify, blocks, sum(sizes), PLAIN.threads)

    def _verified(self, name: str, at: int, memory: memoryview) -> None:
        self._archive.read_into(self._member, self._places[name] + at, memory)
        index = at // BLOCK * SIZE
        if block_digests(memory) != self.entries[name].digests[index : index + SIZE]:
            raise DamagedError(
                f"{self._archive.what}: {name!r} in {self._member} is damaged: its bytes have changed"
            )


MANIFEST = "manifest.json"
MODEL, AUX, CONSTANTS = "model", "aux", "constants"
STATES, PACKAGE = "states", "package"
MEMBER_LIMIT = 256 << 20
"""Largest size of a member that is read as a whole; also checked when writing."""
ABOUT = "torchrelay archive"


@dataclass(frozen=True)
class States:
    """All states of a model, ready for storing."""

    tensors: Mapping[str, TensorToStore]
    ties: Mapping[str, str]
    """Names of states to the name that holds the shared tensor."""
    extra: Mapping[str, Json]
    """States other than tensors, as typed values."""
    order: tuple[str, ...]
    """Names of all states in the model's order."""


@dataclass(frozen=True)
class Contents:
    """Contents of an archive: states, aux values with their tensors, and the rest of a package."""

    kind: str
    states: States
    aux: tuple[Json, Mapping[str, TensorToStore]]
    constants: Mapping[str, TensorToStore] | None = None
    package: Json = None
    signature: Json = None
    """Signature of the model of a state archive, if it was compiled."""
    members: Mapping[str, bytes] = field(default_factory=dict)


def write_contents(where: Where, contents: Contents, *, overwrite: bool) -> str:
    """Write an archive and return its path; raises UsageError, BlobError, StorageError."""

    def write(temporary: Path) -> None:
        with temporary.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            os.fchmod(file.fileno(), MODE)
            groups = {MODEL: contents.states.tensors, AUX: contents.aux[1], CONSTANTS: contents.constants}
            said = {
                group: write_tensors(archive, f"{group}.safetensors", tensors)
                for group, tensors in groups.items()
                if tensors is not None
            }
            manifest = canonical_json.dumps(_manifest(contents, said))
            for name, data in {**contents.members, MANIFEST: manifest}.items():
                if len(data) > MEMBER_LIMIT:
                    raise BlobError(f"{name} has {len(data)} bytes, more than the limit of {MEMBER_LIMIT}")
                add_member(archive, name, len(data), [memoryview(data)])

    return str(publish(as_written(where, _WANTED), write, overwrite=overwrite))


_WANTED = "an archive, such as 'model.zip'"


def _manifest(contents: Contents, tensors: Json) -> Json:
    optional = {"package": contents.package, "signature": contents.signature}
    return {
        "about": ABOUT,
        "format": stamp(),
        "kind": contents.kind,
        "tensors": tensors,
        "ties": dict(contents.states.ties),
        "extra": dict(contents.states.extra),
        "order": list(contents.states.order),
        "aux": contents.aux[0],
        **{key: value for key, value in optional.items() if value is not None},
    }


class ArchiveFile:
    """An open archive with a checked manifest; see `open_archive_file`."""

    def __init__(self, members: ZipMembers) -> None:
        self.what, self._members = members.what, members
        if MANIFEST not in members.members:
            raise FormatError(f"{self.what} is a zip archive of another kind: it has no {MANIFEST}")
        found = canonical_json.loads(
            members.read(MANIFEST, MEMBER_LIMIT), what=f"{self.what}: {MANIFEST}", limit_bytes=MEMBER_LIMIT
        )
        if not isinstance(found, dict) or found.get("about") != ABOUT:
            raise FormatError(
                f"{self.what} is an archive of another kind: its {MANIFEST} is not torchrelay's"
            )
        check_stamp(found.get("format"), what=self.what)
        self.fields = Fields(found, f"{self.what}: {MANIFEST}")
        self.kind = self.fields.text("kind")
        ties = self.fields.fields("ties")
        self.ties = {key: ties.text(key) for key in ties.values}
        self.extra: dict[str, Json] = dict(self.fields.fields("extra").values)
        self._groups: dict[str, StoredTensors] = {}
        states = self.tensors(MODEL).entries
        if wrong := [name for name, first in self.ties.items() if first not in states or name in states]:
            raise DamagedError(f"{self.fields.what}: {wrong[0]!r} is tied to a missing state")
        self.order = self.fields.texts("order")
        if sorted(self.order) != sorted([*states, *self.ties, *self.extra]):
            raise self.fields.wrong("order")

    def tensors(self, group: str) -> StoredTensors:
        """Return the tensors of a member; raises DamagedError."""
        if group not in self._groups:
            said = self.fields.fields("tensors").fields(group)
            self._groups[group] = StoredTensors(self._members, f"{group}.safetensors", said)
        return self._groups[group]

    def read(self, member: str) -> bytes:
        """Read another member; raises DamagedError."""
        return self._members.read(member, MEMBER_LIMIT)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all members."""
        return tuple(self._members.members)

    def states(self) -> dict[str, torch.Tensor]:
        """All states in the model's order; tied names share a tensor, other values are in `extra`."""
        stored = self.tensors(MODEL)
        found = {name: stored.read(name) for name in stored.entries}
        names = [name for name in self.order if name not in self.extra]
        return {name: found[self.ties.get(name, name)] for name in names}

    def aux(self) -> dict[str, Json]:
        """The aux values by name in their order, with their tensors."""
        said = self.fields.fields("aux")
        trees = said.fields("values").values
        names = said.texts("names")
        if sorted(names) != sorted(trees):
            raise said.wrong("names")
        stored = self.tensors(AUX)
        wanted = dict.fromkeys(name for tree in trees.values() for name in references(tree))
        if unknown := [name for name in wanted if name not in stored.entries]:
            raise DamagedError(f"{self.fields.what}: missing tensor {unknown[0][:100]!r}")
        made = {name: stored.read(name) for name in wanted}
        return {name: decode(trees[name], tensor=lambda one: made[str(one)]) for name in names}


@contextmanager
def open_archive_file(where: Where) -> Iterator[ArchiveFile]:
    """Open an archive; UsageError, FormatError for a foreign file, DamagedError, StorageError."""
    place = as_written(where, _WANTED)
    with fetched(place, _WANTED) as path:
        check_file(path, _WANTED)
        with open_zip(path, str(path) if place == path else shown(str(place))) as members:
            yield ArchiveFile(members)
