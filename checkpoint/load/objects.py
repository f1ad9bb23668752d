"""Load parts of one epoch into objects, tensors and values, without a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.dtypes import by_name, memory_of, torch_dtype
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import EVERYTHING, CommittedPosition, matches_any
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.format.value_decoding import references
from torchrelay.checkpoint.load.lookup import (
    Below,
    Chosen,
    Nodes,
    Rename,
    check_decided,
    check_exclude_used,
    checked_nodes,
    find_row,
    holder_of,
    is_owned,
    node_for,
    node_of,
    renamed,
    whose,
)
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.load.renaming import LoadResult, Renaming, checked_objects, of_objects
from torchrelay.checkpoint.load.tensors import (
    Cast,
    Loading,
    TensorColumns,
    TensorRead,
    cast,
    cast_of,
    checked_cast,
)
from torchrelay.checkpoint.state.flatten import leaf_names
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, blob_of
from torchrelay.checkpoint.state.restore.container import check_changed
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.restoration import Restoration, restoration
from torchrelay.checkpoint.state.steps import gate
from torchrelay.checkpoint.state.tensor_memory import NOTHING, InPlace, fitting, planned
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.jobs.containers import item_of, within
from torchrelay.records import dataclass


@dataclass(frozen=True)
class _NamedLeaf:
    """A stored leaf under its name in the objects."""

    spec: LeafSpec
    stored: str
    node: str | None


@dataclass(frozen=True)
class LoadOptions:
    """How objects are loaded; see `Checkpoint.load`."""

    strict: bool
    rename: Rename | None
    nodes: Nodes
    atomic: bool
    exclude: tuple[str, ...]
    dtype: Cast


def load_objects(
    reader: LeafReader, entry: CommittedPosition, objects: Mapping[str, Any], wish: LoadOptions
) -> tuple[LoadResult, int]:
    """Load into objects, see `Checkpoint.load`; also returns the bytes verified before they were read."""
    objects = checked_objects(objects)
    checked_nodes(wish.nodes)
    checked_cast(wish.dtype)
    (found, plan), in_place = planned(
        lambda in_place: _plan(reader, entry, objects, in_place, wish),
        _in_place(reader, entry, objects) if wish.rename is None and not wish.exclude else NOTHING,
    )
    rows = [reader.manifest.rows[name][0] for name in in_place.tensors]
    columns = TensorColumns(in_place, partial(reader.check_rows, rows), partial(reader.read_rows, rows))
    wanted = [TensorRead(read, found[read.leaf].stored, found[read.leaf].node) for read in plan.reads]
    loading = Loading(reader, wanted, columns, atomic=wish.atomic)
    loading.first()
    gate()
    loading.second()
    plan.finish()
    loaded = (*in_place.tensors, *(name for name in found if name not in plan.unexpected))
    of_nodes = {name: one.node for name, one in found.items() if one.node and name not in plan.unexpected}
    return LoadResult(loaded, plan.missing, plan.unexpected, nodes=of_nodes), loading.checked


def _in_place(reader: LeafReader, entry: CommittedPosition, objects: Mapping[str, Any]) -> InPlace:
    """Tensors that are blobs by themselves and can be read straight into place."""
    manifest = reader.manifest
    times = Counter(map(attrgetter("blob"), manifest.leaves))
    found: list[LeafRow] = []
    for name in objects:
        rows = manifest.rows.get(name, ())
        leaf = manifest.leaves[rows[0]] if len(rows) == 1 else None
        if leaf is None or leaf.blob != name or times[name] > 1 or leaf.role not in ("tensor", "parameter"):
            continue
        if leaf.group in entry.groups and reader.holder(rows[0]) is not None:
            found.append(leaf)
    forms = [form_of(leaf.dtype or "", leaf.shape) for leaf in found]
    return fitting(objects, [leaf.name for leaf in found], forms)


def _plan(
    reader: LeafReader,
    entry: CommittedPosition,
    objects: Mapping[str, Any],
    in_place: InPlace,
    wish: LoadOptions,
) -> tuple[dict[str, _NamedLeaf], Restoration]:
    """The stored leaves of all objects that are not in place, and how to restore them."""
    settled, rename = in_place.tensors, wish.rename
    rest = in_place.rest(objects)
    found = _find(reader, rest, wish, settled)
    blobs = [blob.name for blob in reader.manifest.blobs]
    known = {*blobs, *(one.spec.blob for one in found.values())}
    for name in rest:
        if name not in known:  # most likely misspelt
            raise UsageError(f"no blob {name!r}{nearest(name, [renamed(blob, rename) for blob in blobs])}")
    kept = _excluded(reader.manifest, rest, wish) if wish.exclude else []
    check_kept(reader, entry, [one.stored for one in found.values()])
    json = {
        name: reader.value_json(one.stored, one.node)
        for name, one in found.items()
        if one.spec.kind == "value" and one.spec.alias_of is None
    }
    if isinstance(rename, Mapping):
        renaming = Renaming(reader.manifest, rename)
        groups = [name for name in json if renaming.is_group(found[name].stored)]
        json.update({name: renaming.group(json[name]) for name in groups})
    found = _inner_unrenamed(found, json)
    specs = {name: one.spec for name, one in found.items()}
    within = rename.into if isinstance(rename, Below) else ""
    selection = reader.manifest.facts.selection if rename is None else EVERYTHING  # patterns: stored names

    def why(name: str) -> str:
        return selection.why_absent(name) or whose(reader.manifest, name)

    def same_content(one: str, other: str) -> bool:
        known = [found.get(name) for name in (one, other)]  # leaves in place keep their stored names
        sources = [
            (a.stored, a.node) if a else (name, None) for a, name in zip(known, (one, other), strict=True)
        ]
        return reader.same_content(*sources)

    options = RestoreOptions(
        strict=wish.strict,
        kept=kept,
        why_absent=why,
        in_place=settled,
        same_content=same_content,
        excluded=wish.exclude,
        within=within,
        cast=None if isinstance(rename, Below) else lambda name: cast_of(name, wish.dtype),
    )
    plan = restoration(objects, specs, json, options)
    check_changed(plan.replaced, objects, "ckpt.value({0})")
    return found, plan


def _excluded(manifest: Manifest, objects: Mapping[str, Any], wish: LoadOptions) -> list[str]:
    """The leaves to leave unchanged; when strict, raises UsageError for a pattern that matches none."""
    renaming = Renaming(manifest, wish.rename)
    left = {renaming.name(one) for one in manifest.leaves if renaming.excludes(one, wish.exclude)}
    here = leaf_names(objects)
    if wish.strict:
        stored = map(renaming.name, manifest.leaves)
        owners = (renamed(one, wish.rename) for one in renaming.parameters)  # its parameter
        check_exclude_used([*stored, *owners, *here], wish.exclude)
    return [*left, *(one for one in here if matches_any(one, wish.exclude))]


def load_tensors(
    reader: LeafReader,
    entry: CommittedPosition,
    wanted: Mapping[str, Chosen],
    device: str | torch.device | None,
    dtype: Cast,
) -> dict[str, torch.Tensor]:
    """Read tensors, by their new names; tied names get one tensor."""
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


def load_value(reader: LeafReader, entry: CommittedPosition, name: str, node: str | None) -> Any:
    """Read one value, with the tensors inside it; a dotted name may refer into a container (`ema.step`)."""
    rows, leaves = reader.manifest.rows, reader.manifest.leaves
    for outer in reversed(dotted_prefixes(name)) if name not in rows else ():
        if outer in rows and leaves[rows[outer][0]].role == "value":
            place = within(load_value(reader, entry, outer, node), name[len(outer) + 1 :])
            if place is not None:
                with suppress(LookupError):
                    return item_of(*place)
    check_kept(reader, entry, [name])

    def refer(inner: Any) -> torch.Tensor:
        return load_tensors(reader, entry, {"": (str(inner), node)}, None, None)[""]

    return values.decode(reader.value_json(name, node), tensor=refer)


def check_kept(reader: LeafReader, entry: CommittedPosition, names: Iterable[str]) -> None:
    """Raise UsageError for leaves whose files retention has deleted."""
    for name in names:
        for row in reader.manifest.rows.get(name, ()):
            group = reader.manifest.leaves[row].group
            if group not in entry.groups and row not in reader.manifest.values:
                raise UsageError(
                    f"{name!r} of epoch {entry.position} is gone: retention deleted the files of group "
                    f"{group!r}; choose a newer epoch"
                )


def _find(
    reader: LeafReader, objects: Mapping[str, Any], wish: LoadOptions, settled: Collection[str]
) -> dict[str, _NamedLeaf]:
    """The stored leaves that belong to the objects' blobs after renaming, without those in `settled`."""
    manifest, nodes = reader.manifest, wish.nodes
    names = _names(Renaming(manifest, wish.rename), objects, wish)
    check_decided(manifest, names.values(), nodes)
    if nodes is not None:
        whose = {new: node_of(manifest, stored, nodes) for new, stored in names.items()}
        names = {
            new: stored
            for new, stored in names.items()
            if whose[new] not in manifest.world.number or is_owned(manifest, stored, whose[new])
        }
    first = {name: name for name in settled}
    found: dict[str, _NamedLeaf] = {}
    for new, stored in names.items():
        declared = manifest.leaves[manifest.rows[stored][0]]
        node = node_for(manifest, stored, nodes)
        row = find_row(manifest, stored, node)
        holder_of(manifest, row, node)  # raises with the nodes that have it
        source = first.setdefault(manifest.leaves[row].name, new)
        blob = blob_of(new, objects) or declared.blob
        found[new] = _NamedLeaf(_spec(manifest, row, stored, new, blob, source), stored, node)
    for new, one in found.items():
        if one.spec.same_as is not None:
            found[new] = replace(one, spec=replace(one.spec, same_as=first.get(one.spec.same_as)))
    return found


def _inner_unrenamed(found: Mapping[str, _NamedLeaf], json: Mapping[str, Any]) -> dict[str, _NamedLeaf]:
    """Restore the stored names of tensors inside values, by which the values refer to them."""
    new_names = {one.stored: new for new, one in found.items()}
    back = {
        new_names[stored]: (stored, found[tree].spec.blob)
        for tree, value in json.items()
        for stored in references(value)
        if new_names.get(stored, stored) != stored
    }
    if not back:
        return dict(found)
    kept = {new: one for new, one in found.items() if new not in back}
    inner = {
        stored: replace(found[new], spec=replace(found[new].spec, name=stored, blob=blob))
        for new, (stored, blob) in back.items()
    }

    def named(name: str | None) -> str | None:
        return back[name][0] if name in back else name

    return {
        name: replace(
            one, spec=replace(one.spec, alias_of=named(one.spec.alias_of), same_as=named(one.spec.same_as))
        )
        for name, one in {**kept, **inner}.items()
    }


def _names(renaming: Renaming, objects: Mapping[str, Any], wish: LoadOptions) -> dict[str, str]:
    """Stored names by new name of the chosen leaves; raises UsageError for duplicates."""
    manifest, rename = renaming.manifest, wish.rename
    found: dict[str, str] = {}
    for stored in of_objects(manifest.rows, objects) if rename is None else manifest.rows:
        leaf = manifest.leaves[manifest.rows[stored][0]]
        new = stored if rename is None else renaming.name(leaf)
        inside = rename is None or blob_of(new, objects) is not None
        if leaf.role in OF_POSITION or not inside or (wish.exclude and renaming.excludes(leaf, wish.exclude)):
            continue
        if found.setdefault(new, stored) != stored:
            both = f"{found[new]!r} and {stored!r} both"
            raise UsageError(f"rename={rename!r} makes {both} {new!r}: choose other names")
    return found


def _spec(manifest: Manifest, number: int, stored: str, name: str, blob: str, source: str) -> LeafSpec:
    """A stored leaf under its new name; `source` is the first of the names that share its bytes."""
    row, own = manifest.leaves[number], manifest.leaves[manifest.rows[stored][0]]
    layout = manifest.layouts[row.layout]
    return LeafSpec(  # `replace` would take 7 % of a load of many tensors
        name, blob, Role(own.role), row.group, "tensor" if row.kind == "tensor" else "value",
        row.dtype, row.shape, row.nbytes, None if source == name else source,
        layout if isinstance(layout, Mesh) else None,
        frozen=own.frozen, order=row.order, device=own.device, same_as=row.same_as,
    )  # fmt: skip
