"""Load some blobs of an epoch into the hosted nodes' workspaces: for evaluation, without training.

A name or pattern without a node means all nodes that have it. `node:name` is a node's own value. It is loaded
as `name` where that node is hosted in this process, else into every hosted workspace under its full name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import matches
from torchrelay.checkpoint.load.lookup import (
    check_owned,
    find_row,
    holder_of,
    is_owned,
    several_owners,
    split_name,
)
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.reads.shared_reads import options_of
from torchrelay.checkpoint.load.renaming import spec_of_row
from torchrelay.checkpoint.load.reshard import same_nodes
from torchrelay.checkpoint.load.tensors import Loading, TensorRead
from torchrelay.checkpoint.state.leaf import Role
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.restoration import Restoration, restoration
from torchrelay.checkpoint.state.steps import gate
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import Clock, patience_secs
from torchrelay.errors import MissingShardError, UsageError
from torchrelay.jobs.cluster import GRADIENTS, dotted_prefixes
from torchrelay.jobs.session import Session, together
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.handlers import NodeStats, NodeTimes


def load_some(
    storage: Storage,
    session: Session,
    manifest: Manifest,
    names: Sequence[str],
    stored_name: Callable[[str], str],
    *,
    strict: bool,
) -> tuple[str | None, NodeStats]:
    """Load the names; returns the reason if a name or a shard is missing, with nothing changed anywhere.

    All processes verify what they load before any of them changes an object. `strict=False` ignores unknown
    names.
    """
    clock = Clock()
    reader = LeafReader(storage, manifest, options=options_of(session))
    plans: list[tuple[_Part, Restoration]] = []

    def prepare() -> str | None:
        try:
            parts = [
                one for name in names for one in _parts(session, manifest, name, stored_name, strict=strict)
            ]
        except UsageError as error:
            return str(error)
        try:
            for part in _joined(parts):
                plans.append((part, plan := _plan(part, reader)))
                for read in plan.reads:  # reports a missing file before anything is read
                    reader.digest(read.leaf, part[3])
        except MissingShardError as error:
            return str(error)
        return None

    def install() -> None:
        loading.second()
        for (workspace, blob, target, _, _), plan in plans:
            for name, value in plan.finish().items():
                renamed = target + name.removeprefix(blob) if name.startswith(blob) else name
                workspace.set_loaded(renamed, value)

    with clock.spent("prove"):
        found = together(session.peers, "partial load: check", prepare)
        why = next((one for one in found if one is not None), None)
    if why is None:
        wanted = [TensorRead(read, read.leaf, part[3]) for part, plan in plans for read in plan.reads]
        loading = Loading(reader, wanted)
        patience = patience_secs(sum(leaf.nbytes for leaf in manifest.leaves))
        with clock.spent("prove"):
            together(session.peers, "partial load: verify", loading.first, deadline_secs=patience)
        with clock.spent("read"):
            gate()
            together(session.peers, "partial load: read", install, deadline_secs=patience)
    path = f"{storage.url}/{stored_name(session.local_nodes[0].name)}.{manifest.position}"
    size = sum(read.spec.nbytes for _, plan in plans for read in plan.reads)
    rows = session.peers.exchange(
        "partial load: done", [stored_name(session.local_nodes[0].name), path, size, clock.secs]
    )
    return why, NodeStats(NodeTimes(*row) for row in rows)


_Part = tuple[Workspace, str, str, str | None, Collection[str]]
"""A workspace, the requested blob, its name there, the node that owns it, None for all, and its leaves.

Leaves that keep their names share a part, so that tied tensors become one.
"""


def _parts(
    session: Session, manifest: Manifest, name: str, stored_name: Callable[[str], str], *, strict: bool
) -> list[_Part]:
    """What the hosted nodes get of a name; raises UsageError if the epoch lacks it, or it has several values.

    A name without a node means all nodes that have it. If the session has other nodes than the epoch, they
    get the leaves that have one value.
    """
    stored = {stored_name(place.name): place.name for place in session.local_nodes}
    node, blob = split_name(name, manifest.world.names)
    leaves = [leaf for leaf in manifest.rows if matches(leaf, blob) and not leaf.startswith(GRADIENTS)]
    if not leaves:
        if strict:
            known = dict.fromkeys([*(one.name for one in manifest.blobs), *manifest.rows])
            raise UsageError(f"no blob or leaf {blob!r}{nearest(blob, known)}")
        return []
    hosted = node is not None and node in stored
    places = [stored[node]] if hosted and node is not None else list(stored.values())
    alike = same_nodes(manifest, [stored_name(place.name) for place in session.nodes])
    found: list[_Part] = []
    for place in places:
        own = node or stored_name(place)
        mine = [leaf for leaf in leaves if is_owned(manifest, leaf, own)]
        owned = set(mine)
        rest = [] if node is not None or alike else [leaf for leaf in leaves if leaf not in owned]
        if mine:  # a node does not load other nodes' leaves of its own blob
            rest = [leaf for leaf in rest if not several_owners(manifest, leaf)]
        for leaf in rest:
            check_owned(manifest, leaf, None)
        workspace, target = session.workspace(place), blob if hosted or node is None else name
        if mine:
            found.append((workspace, blob, target, own, mine))
        if rest:
            found.append((workspace, blob, target, None, rest))
    if node is not None and not found:
        check_owned(manifest, leaves[0], node)
    return found


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """The parts, with all leaves that keep their names merged into one part per workspace and node."""
    joined: dict[tuple[int, str | None], dict[str, None]] = {}
    found: list[_Part] = []
    for workspace, blob, target, node, leaves in parts:
        if blob != target:
            found.append((workspace, blob, target, node, leaves))
            continue
        key = (id(workspace), node)
        if key not in joined:
            joined[key] = {}
            found.append((workspace, "", "", node, joined[key]))
        joined[key].update(dict.fromkeys(leaves))
    return found


def _plan(part: _Part, reader: LeafReader) -> Restoration:
    workspace, blob, target, node, leaves = part
    specs, values = {}, {}
    for leaf in leaves:
        row = find_row(reader.manifest, leaf, node)
        holder_of(reader.manifest, row, node)
        stored = spec_of_row(reader.manifest.leaves[row], reader.manifest)
        alias = None if stored.name == leaf else stored.name
        own = reader.manifest.leaves[reader.manifest.rows[leaf][0]]
        specs[leaf] = replace(
            stored, name=leaf, blob=own.blob, role=Role(own.role), frozen=own.frozen, alias_of=alias
        )
        if stored.kind == "value":
            values[stored.name] = reader.value_json(leaf, node)
    entries = workspace.entries() if target == blob else {}
    owners = {owner for spec in specs.values() for owner in (spec.blob, *dotted_prefixes(spec.blob))}
    registered = {name: entry.target for name, entry in entries.items() if entry.blob is not None}
    objects = registered if owners.intersection(registered) else {}
    for leaf, spec in specs.items():  # a tensor of a container that is not registered here is loaded alone
        above = () if spec.blob in objects or spec.blob in specs else reader.manifest.rows.get(spec.blob, ())
        if above and reader.manifest.leaves[above[0]].role == "value":
            specs[leaf] = replace(spec, blob=leaf)
    options = RestoreOptions(
        strict=False,
        untouched=[name for name in objects if name not in owners],  # they contain names of parameters
        late_buffers=True,
        exclude=None,
        same_content=lambda one, other: reader.same_content((one, node), (other, node)),
    )
    return restoration(objects, specs, values, options)
