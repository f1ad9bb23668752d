"""One archive as a whole: its manifest, and the members that the manifest tells of.

    manifest.json            format, kind ("states" or "package"), tensors by member, ties, plain values
    model.safetensors        states of the model, tied ones once
    aux.safetensors          tensors inside of the plain values
    constants.safetensors    packages only, as program.json and source/...

The manifest is the last member, since it holds the digests of all tensors. Its own bytes have the CRC that
every member of a zip has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields, Json, check_stamp, stamp
from torchrelay.checkpoint.format.value_decoding import decode, references
from torchrelay.errors import BlobError, DamagedError, FormatError
from torchrelay.metadata.zip_reader import ZipMembers, open_zip
from torchrelay.models.archive.tensors import Outgoing, StoredTensors, write_tensors
from torchrelay.models.archive.zip_writer import Chunk, Where, ZipWriter, fetched, write_archive
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
MODEL, AUX, CONSTANTS = "model", "aux", "constants"
STATES, PACKAGE = "states", "package"
MEMBER_LIMIT = 256 << 20
"""Bytes of a member that is read as a whole; whoever writes one checks it, too."""
ABOUT = "torchrelay archive"


@dataclass(frozen=True)
class Contents:
    """What goes into an archive. `ties` are names of states that share the tensor of another name."""

    kind: str
    tensors: Mapping[str, Mapping[str, Outgoing]]
    ties: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)
    """States that are no tensors, as typed values."""
    aux: Json = field(default_factory=lambda: {"names": [], "values": {}})
    order: tuple[str, ...] = ()
    """The names of all states as the model has them."""
    package: Json = None
    signature: Json = None
    """What goes in and out of the model of a state archive, where it was compiled."""
    members: Mapping[str, bytes] = field(default_factory=dict)


def write_contents(where: Where, contents: Contents, *, overwrite: bool) -> str:
    """Write an archive; returns where it lies. Raises UsageError, BlobError, StorageError."""

    def fill(writer: ZipWriter) -> None:
        said = {
            group: write_tensors(writer, f"{group}.safetensors", tensors)
            for group, tensors in contents.tensors.items()
        }
        for name, data in {
            **contents.members,
            MANIFEST: canonical_json.dumps(_manifest(contents, said)),
        }.items():
            if len(data) > MEMBER_LIMIT:
                raise BlobError(f"{name} has {len(data)} bytes, more than the {MEMBER_LIMIT} that are read")
            writer.add(name, [Chunk(memoryview(data))])

    return write_archive(where, fill, overwrite=overwrite)


def _manifest(contents: Contents, said: Json) -> Json:
    found = {
        "about": ABOUT,
        "format": stamp(),
        "kind": contents.kind,
        "tensors": said,
        "ties": dict(contents.ties),
        "extra": dict(contents.extra),
        "order": list(contents.order),
        "aux": contents.aux,
    }
    for key, said_of_it in (("package", contents.package), ("signature", contents.signature)):
        found.update({} if said_of_it is None else {key: said_of_it})
    return found


class ArchiveFile:
    """An open archive, its manifest checked; see `open_archive_file`."""

    def __init__(self, members: ZipMembers) -> None:
        self.what, self._members = members.what, members
        if MANIFEST not in members.members:
            raise FormatError(f"{self.what} is a zip archive of something else: it has no {MANIFEST}")
        found = canonical_json.loads(
            members.read(MANIFEST, MEMBER_LIMIT),
            what=f"{self.what}: {MANIFEST}",
            limit_bytes=MEMBER_LIMIT,
        )
        if not isinstance(found, dict) or found.get("about") != ABOUT:
            raise FormatError(f"{self.what} is an archive of something else: its {MANIFEST} is not ours")
        check_stamp(found.get("format"), what=self.what)
        self.fields = Fields(found, f"{self.what}: {MANIFEST}")
        self.kind = self.fields.text("kind")
        self.ties = _texts(self.fields.fields("ties"))
        self.extra: dict[str, Json] = dict(self.fields.fields("extra").values)
        self._groups: dict[str, StoredTensors] = {}
        states = self.tensors(MODEL).entries
        if wrong := [name for name, first in self.ties.items() if first not in states or name in states]:
            raise DamagedError(f"{self.fields.what}: {wrong[0]!r} is tied to no state")
        self.order = self.fields.texts("order")
        if sorted(self.order) != sorted([*states, *self.ties, *self.extra]):
            raise self.fields.wrong("order")

    def tensors(self, group: str) -> StoredTensors:
        """The tensors of a member; raises DamagedError."""
        if group not in self._groups:
            said = self.fields.fields("tensors").fields(group)
            self._groups[group] = StoredTensors(self._members, f"{group}.safetensors", said)
        return self._groups[group]

    def read(self, member: str, limit_bytes: int) -> bytes:
        """Another member; raises DamagedError."""
        return self._members.read(member, limit_bytes)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all members."""
        return tuple(self._members.members)

    def states(self) -> dict[str, torch.Tensor]:
        """All states in the model's order, tied names with one tensor; what is no tensor is in `extra`."""
        stored = self.tensors(MODEL)
        found = {name: stored.read(name) for name in stored.entries}
        names = [name for name in self.order if name not in self.extra]
        return {name: found[self.ties.get(name, name)] for name in names}

    def aux(self) -> dict[str, Json]:
        """The plain values by name in their order, with their tensors."""
        said = self.fields.fields("aux")
        trees = said.fields("values").values
        names = said.texts("names")
        if sorted(names) != sorted(trees):
            raise said.wrong("names")
        stored = self.tensors(AUX)
        wanted = dict.fromkeys(name for tree in trees.values() for name in references(tree))
        if unknown := [name for name in wanted if name not in stored.entries]:
            raise DamagedError(f"{self.fields.what}: there is no tensor {unknown[0][:100]!r}")
        made = {name: stored.read(name) for name in wanted}
        return {name: decode(trees[name], tensor=lambda one: made[str(one)]) for name in names}


@contextmanager
def open_archive_file(where: Where) -> Iterator[ArchiveFile]:
    """Open an archive of ours.

    Raises UsageError, FormatError for a foreign file, DamagedError, StorageError.
    """
    with fetched(where) as (path, shown), _named(path, shown), open_zip(path) as members:
        yield ArchiveFile(members)


@contextmanager
def _named(path: str, shown: str) -> Iterator[None]:
    """Errors of what was fetched tell where it came from."""
    try:
        yield
    except (DamagedError, FormatError) as error:
        if path == shown:
            raise
        raise type(error)(str(error).replace(path, shown)) from None


def _texts(fields: Fields) -> dict[str, str]:
    return {key: fields.text(key) for key in fields.values}
