"""The shard files of an epoch, opened one by one and only if they are what the manifest says.

Opening proves: size and SHA-256 of the header, whose file it is, and that it holds exactly the keys,
dtypes and shapes that the manifest's layouts put there (at least these, in a file of an earlier try).
What it holds need not be checked again where another process of the same proof has done so: the header has
the same SHA-256, and so the same bytes.
Whatever reads through a ShardSet reads proved headers and verified blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.layouts import alike, holding
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest, ShardRow, position_of, shard_path
from torchrelay.checkpoint.format.names import all_plain
from torchrelay.checkpoint.format.shard.layout import ShardIdentity
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, ShardHeader, read_header
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

Json = Any
Holder = tuple[int, int, str]
"""(try, node, group), numbers as in the manifest: whose files."""


@dataclass(frozen=True)
class HeldFiles:
    """All parts of one holder's file."""

    headers: tuple[ShardHeader, ...]

    def with_key(self, key: str) -> ShardHeader:
        """The part that holds a key; opening has made sure that one does: a file of one part is not asked."""
        if len(self.headers) == 1:
            return self.headers[0]
        return next(header for header in self.headers if key in header.entries)

    @property
    def values(self) -> Mapping[str, Json]:
        """Typed values by leaf name."""
        return self.headers[0].values


class ShardSet:
    """Opens the files of one manifest, each once."""

    def __init__(self, storage: Storage, manifest: Manifest, *, escape: str = "") -> None:
        self.storage = storage
        self.manifest = manifest
        self._escape = escape
        self.opened: dict[Holder, HeldFiles] = {}
        self._vouched: Collection[Holder] = ()

    def open(self, holder: Holder) -> HeldFiles:
        """Open and prove the files of a holder; raises DamagedError, FormatError or StorageError."""
        if holder not in self.opened:
            vouched = holder in self._vouched
            found = HeldFiles(tuple(self._header(row, vouched) for row in self.manifest.files[holder]))
            if not vouched:
                self._check_content(holder, found)
            self.opened[holder] = found
        return self.opened[holder]

    def vouch(self, holders: Collection[Holder]) -> None:
        """Say that files of this manifest were opened by somebody: what their headers hold is right."""
        self._vouched = holders

    def forget(self) -> None:
        """Let go of what was opened, for many headers are large; asked for again it is opened again."""
        self.opened.clear()

    def check_sizes(self, holder: Holder) -> None:
        """Only look whether the files are there and as long as they were; raises DamagedError."""
        for row in self.manifest.files[holder]:
            path = shard_path(self.manifest, row, escape=self._escape)
            size = self.storage.stat(path)
            if size != row.nbytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {row.nbytes}"
                raise DamagedError(f"{path} {found}")

    @property
    def header_bytes(self) -> int:
        """Bytes of all headers that were opened."""
        opened = (row for holder in self.opened for row in self.manifest.files[holder])
        return sum(row.header_bytes for row in opened)

    def _header(self, row: ShardRow, vouched: bool) -> ShardHeader:
        path = shard_path(self.manifest, row, escape=self._escape)
        expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
        header = read_header(self.storage, path, expected, vouched=vouched)
        try_name = self.manifest.tries[row.source]
        node, job = self.manifest.world.names[row.node], self.manifest.job_name
        identity = ShardIdentity(job, position_of(try_name), node, row.group, try_name)
        if (header.content.identity, header.content.part) != (identity, row.part):
            raise DamagedError(f"{path} is another shard: {header.content.identity}")
        return header

    def _agrees(self, holder: Holder, found: HeldFiles) -> bool:
        """Whether one file holds exactly what it should, asked by columns; False says nothing."""
        rows = self.manifest.whole_rows(*holder)
        if rows is None or len(found.headers) > 1:
            return False
        leaves = list(map(self.manifest.leaves.__getitem__, rows))
        tensors = [leaf for leaf in leaves if leaf.kind == "tensor"]
        entries, keys = found.headers[0].entries, [leaf.name for leaf in tensors]
        if not all_plain(keys) or not len(set(keys)) == len(keys) == len(entries):
            return False
        if not all(map(entries.__contains__, keys)):
            return False
        forms = entries.forms(keys)
        return (
            [form.dtype for form in forms] == [leaf.dtype for leaf in tensors]
            and [form.shape for form in forms] == [leaf.shape for leaf in tensors]
            and found.values.keys() == {leaf.name for leaf in leaves if leaf.kind == "value"}
        )

    def _check_content(self, holder: Holder, found: HeldFiles) -> None:
        if self._agrees(holder, found):
            return
        tensors, values = self._expected(holder)
        stored = {key: entries for entries in [one.entries for one in found.headers] for key in entries}
        path = found.headers[0].path
        if len(stored) != sum(len(header.entries) for header in found.headers):
            raise DamagedError(f"{path} and its parts hold a key twice")
        for key, leaf in tensors.items():
            if key not in stored:
                raise DamagedError(f"{path} does not hold {key}, which the manifest puts there")
            form = stored[key].form(key)
            if form.dtype != leaf.dtype or form.shape != leaf.shape:
                raise DamagedError(
                    f"{path}: {key} is {form.dtype}{list(form.shape)}, "
                    f"the manifest has {leaf.dtype}{list(leaf.shape)}"
                )
        if missing := sorted(values - found.values.keys()):
            raise DamagedError(f"{path} does not hold the value {missing[0]}")
        odd = sorted((stored.keys() - tensors.keys()) | (found.values.keys() - values))
        if odd and holder[0] == 0:
            raise DamagedError(f"{path} holds {odd[0]}, which the manifest does not know")

    def _expected(self, holder: Holder) -> tuple[dict[str, LeafRow], set[str]]:
        tensors: dict[str, LeafRow] = {}
        values: set[str] = set()
        for row, keys in self.manifest.stored_keys(*holder):
            leaf = self.manifest.leaves[row]
            if leaf.kind == "value":
                values.add(leaf.name)
            else:
                tensors.update(dict.fromkeys(keys, leaf))
        return tensors, values


def holders_of(manifest: Manifest, rows: Sequence[int]) -> Iterator[Holder]:
    """Whose files hold the bytes of leaf rows, each once; rows of values in the manifest need none."""
    seen: set[Holder] = set()
    looked_at: set[tuple[object, ...]] = set()
    for row in rows:
        leaf = manifest.leaves[row]
        layout = manifest.layouts[leaf.layout]
        form = alike(layout, leaf)
        place = (leaf.layout, leaf.source, leaf.group, row if form is None else form)
        if leaf.alias_of is not None or row in manifest.values or place in looked_at:
            continue
        looked_at.add(place)
        for nodes in holding(layout, row, leaf):
            if (leaf.source, leaf.group, nodes) in looked_at:  # one set of thousands, of very many leaves
                continue
            looked_at.add((leaf.source, leaf.group, nodes))
            for node in sorted(nodes):
                holder = (leaf.source, node, leaf.group)
                if holder not in seen:
                    seen.add(holder)
                    yield holder
