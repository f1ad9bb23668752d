"""Loading parts of one epoch into objects, tensors and values, without a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from torchrelay.checkpoint.asynchronous.gate import gate
from torchrelay.checkpoint.disk import values
from torchrelay.checkpoint.disk.dtypes import by_name, memory_of, torch_dtype
from torchrelay.checkpoint.disk.manifest import LeafRow, Manifest
from torchrelay.checkpoint.disk.mesh import Mesh
from torchrelay.checkpoint.disk.shard_entries import form_of
from torchrelay.checkpoint.disk.value_decoding import references
from torchrelay.checkpoint.log.live import Entry
from torchrelay.checkpoint.reading.casting import Cast, cast
from torchrelay.checkpoint.reading.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.reading.load_result import LoadResult, blob_of, check_objects, of_objects
from torchrelay.checkpoint.reading.lookup import find_row, holder_of, nearest
from torchrelay.checkpoint.reading.partly_loaded import naming_what_changed
from torchrelay.checkpoint.reading.patterns import Chosen, Rename, renamed, renamed_all
from torchrelay.checkpoint.selection import EVERYTHING
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.in_place import NOTHING, InPlace, fitting, planned
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.checkpoint.state.restore import Restoration, restoration
from torchrelay.checkpoint.wildcards import matches
from torchrelay.errors import UsageError

Nodes = str | Mapping[str, str] | None
"""Whose content is meant where every node has its own: one node's, or per stored blob."""


@dataclass(frozen=True)
class _Found:
    """A stored leaf under the name that the objects know it by."""

    spec: LeafSpec
    stored: str
    node: str | None


@dataclass(frozen=True)
class _Wish:
    """What is wanted of a load of objects; see `Checkpoint.load`."""

    strict: bool
    rename: Rename | None
    nodes: Nodes
    exclude: tuple[str, ...]

    def leaves_out(self, name: str) -> bool:
        """Whether a leaf of an object, by the name that the object knows, is to stay as it is."""
        return any(matches(name, pattern) for pattern in self.exclude)


def load_objects(
    reader: LeafReader,
    entry: Entry,
    objects: Mapping[str, Any],
    *,
    strict: bool,
    rename: Rename | None,
    nodes: Nodes,
    atomic: bool,
    exclude: Collection[str] = (),
) -> LoadResult:
    """Load into objects; see `Checkpoint.load`."""
    check_objects(objects)
    wish = _Wish(strict, rename, nodes, tuple(exclude))
    (found, plan), in_place = planned(
        lambda in_place: _plan(reader, entry, objects, in_place, wish),
        _in_place(reader, entry, objects) if rename is None and not exclude else NOTHING,
    )
    gate()
    _read(reader, plan, found, in_place, atomic=atomic)
    plan.finish()
    return LoadResult(
        (*in_place.tensors, *(name for name in found if name not in plan.unexpected)),
        plan.missing,
        plan.unexpected,
    )


def _in_place(reader: LeafReader, entry: Entry, objects: Mapping[str, Any]) -> InPlace:
    """The tensors that are blobs by themselves and that nothing need be asked about."""
    manifest = reader.manifest
    times = Counter(map(attrgetter("blob"), manifest.leaves))
    found: list[LeafRow] = []
    for name in objects:
        rows = manifest.rows.get(name, ())
        leaf = manifest.leaves[rows[0]] if len(rows) == 1 else None
        if leaf is None or leaf.blob != name or times[name] > 1 or leaf.role not in _BLOBS:
            continue
        if leaf.group in entry.groups and reader.holder(rows[0]) is not None:
            found.append(leaf)
    forms = [form_of(leaf.dtype or "", leaf.shape) for leaf in found]
    return fitting(objects, [leaf.name for leaf in found], forms)


_BLOBS = ("tensor", "parameter")


def _plan(
    reader: LeafReader,
    entry: Entry,
    objects: Mapping[str, Any],
    in_place: InPlace,
    wish: _Wish,
) -> tuple[dict[str, _Found], Restoration]:
    """The stored leaves of all objects that are not in place, and what to do."""
    settled, rename = in_place.tensors, wish.rename
    rest = in_place.rest(objects)
    found = _find(reader, rest, wish)
    _check_blobs(reader, rest, found, rename)
    kept = [leaf.name for leaf in leaves_of(rest) if wish.leaves_out(leaf.name)] if wish.exclude else []
    check_kept(reader, entry, [one.stored for one in found.values()])
    json = {
        name: reader.value_json(one.stored, one.node)
        for name, one in found.items()
        if one.spec.kind == "value" and one.spec.alias_of is None
    }
    found = _inner_unrenamed(found, json)
    specs = {name: one.spec for name, one in found.items()}
    why = reader.manifest.facts.selection.why_not
    if rename is not None:  # patterns are of stored names
        why = EVERYTHING.why_not
    plan = restoration(objects, specs, json, strict=wish.strict, kept=kept, why_absent=why, in_place=settled)
    return found, plan


def load_tensors(
    reader: LeafReader,
    entry: Entry,
    wanted: Mapping[str, Chosen],
    device: str | torch.device | None,
    dtype: Cast,
) -> dict[str, torch.Tensor]:
    """Read tensors, by their new names; names of one stored tensor get one tensor."""
    check_kept(reader, entry, [name for name, _ in wanted.values()])
    fresh: dict[tuple[int, int | None], torch.Tensor] = {}
    reads: list[LeafRead] = []
    places: dict[str, tuple[int, int | None]] = {}
    for new, (name, node) in wanted.items():
        row = find_row(reader.manifest, name, node)
        place = places[new] = (row, holder_of(reader.manifest, row, node))
        if place not in fresh:
            leaf = reader.manifest.leaves[row]
            fresh[place] = torch.empty(leaf.shape, dtype=torch_dtype(by_name(leaf.dtype or "")), device="cpu")
            reads.append(LeafRead(name, memory_of(fresh[place]), node))
    reader.read_many(reads)
    names = {place: new for new, place in reversed(places.items())}
    placed = {place: cast(tensor, names[place], dtype).to(device=device) for place, tensor in fresh.items()}
    return {new: placed[place] for new, place in places.items()}


def load_value(reader: LeafReader, entry: Entry, name: str, node: str | None) -> Any:
    """Read one value, with the tensors inside it."""
    check_kept(reader, entry, [name])

    def refer(inner: Any) -> torch.Tensor:
        return load_tensors(reader, entry, {"": (str(inner), node)}, None, None)[""]

    return values.decode(reader.value_json(name, node), tensor=refer)


def check_kept(reader: LeafReader, entry: Entry, names: Iterable[str]) -> None:
    """Refuse leaves whose files retention has removed; raises UsageError."""
    for name in names:
        for row in reader.manifest.rows.get(name, ()):
            group = reader.manifest.leaves[row].group
            if group not in entry.groups and row not in reader.manifest.values:
                raise UsageError(
                    f"{name!r} of epoch {entry.position} is gone: retention removed the files of group "
                    f"{group!r}; choose a newer epoch, or keep more"
                )


def _find(reader: LeafReader, objects: Mapping[str, Any], wish: _Wish) -> dict[str, _Found]:
    """The stored leaves that are of the objects' blobs once they are renamed."""
    manifest, rename, nodes = reader.manifest, wish.rename, wish.nodes
    inside = _inside(manifest.rows, objects, rename)
    if wish.exclude:
        inside = [name for name in inside if not wish.leaves_out(renamed(name, rename))]
    names = [name for name in inside if manifest.leaves[manifest.rows[name][0]].role != "rng"]
    first: dict[str, str] = {}
    found: dict[str, _Found] = {}
    for new, stored in renamed_all(names, rename).items():
        declared = manifest.leaves[manifest.rows[stored][0]]
        node = nodes.get(declared.blob) if isinstance(nodes, Mapping) else nodes
        row = find_row(manifest, stored, node)
        holder_of(manifest, row, node)  # says which node to ask for, before anything changes
        source = first.setdefault(manifest.leaves[row].name, new)
        blob = blob_of(new, objects) or declared.blob
        found[new] = _Found(_spec(manifest, row, new, blob, source), stored, node)
    return found


def _inner_unrenamed(found: Mapping[str, _Found], json: Mapping[str, Any]) -> dict[str, _Found]:
    """Tensors inside values back under their stored names, by which the values refer to them."""
    new_names = {one.stored: new for new, one in found.items()}
    back = {
        new_names[stored]: (stored, found[tree].spec.blob)
        for tree, value in json.items()
        for stored in references(value)
        if new_names.get(stored, stored) != stored
    }
    kept = {new: one for new, one in found.items() if new not in back}
    inner = {
        stored: replace(found[new], spec=replace(found[new].spec, name=stored, blob=blob))
        for new, (stored, blob) in back.items()
    }
    return {**kept, **inner}


def _inside(names: Iterable[str], objects: Mapping[str, Any], rename: Rename | None) -> list[str]:
    if rename is None:
        return of_objects(names, objects)
    return [name for name in names if blob_of(renamed(name, rename), objects) is not None]


def _spec(manifest: Manifest, number: int, name: str, blob: str, source: str) -> LeafSpec:
    """A stored leaf by its new name; `source` is the first of the names that share its bytes."""
    row = manifest.leaves[number]
    layout = manifest.layouts[row.layout]
    alias = None if source == name else source
    return LeafSpec(
        name=name,
        blob=blob,
        role=Role(row.role),
        group=row.group,
        kind="tensor" if row.kind == "tensor" else "value",
        dtype=row.dtype,
        shape=row.shape,
        nbytes=row.nbytes,
        alias_of=alias,
        sharding=layout if isinstance(layout, Mesh) else None,
    )


def _check_blobs(
    reader: LeafReader, objects: Mapping[str, Any], found: Mapping[str, _Found], rename: Rename | None
) -> None:
    """Refuse an object of which nothing at all is stored: most likely a misspelt name."""
    known = {blob.name for blob in reader.manifest.blobs} | {one.spec.blob for one in found.values()}
    for name in objects:
        if name not in known:
            there = [renamed(blob.name, rename) for blob in reader.manifest.blobs]
            raise UsageError(f"there is no blob {name!r}{nearest(name, there)}")


def _read(
    reader: LeafReader,
    plan: Restoration,
    found: Mapping[str, _Found],
    in_place: InPlace,
    *,
    atomic: bool,
) -> None:
    """Read everything; with `atomic` live tensors are written once all bytes have come and are right."""
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    reads: list[LeafRead] = []
    for read in plan.reads:
        memory = read.memory()
        if atomic and read.destination is not None:
            staged.append((read.destination, torch.empty_like(memory)))
            memory = staged[-1][1]
        one = found[read.leaf]
        reads.append(LeafRead(one.stored, memory_of(memory), one.node, read.target))
    live = bool(in_place.tensors) or any(read.destination is not None for read in plan.reads)
    memories, whole = in_place.beside() if atomic else (in_place.memories, None)
    rows = [reader.manifest.rows[name][0] for name in in_place.tensors]
    with naming_what_changed(live=live and not atomic):
        reader.read_rows(rows, memories)
        reader.read_many(reads)
    with torch.no_grad():
        if whole is not None:
            in_place.put(memories)
        for destination, fresh in staged:
            destination.copy_(fresh)
