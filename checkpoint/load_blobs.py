"""Loading some blobs of an epoch into the hosted nodes' workspaces: for evaluation, without training.

`node:name` is a node's own value. Where that node is hosted here it goes into its workspace as
`name`; elsewhere into every hosted workspace under the full name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrelay.checkpoint.asynchronous.gate import gate
from torchrelay.checkpoint.disk.manifest import Manifest
from torchrelay.checkpoint.load import spec_of_row
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.checkpoint.reading.lookup import (
    check_owned,
    find_row,
    holder_of,
    is_owned,
    several_owners,
    split_name,
)
from torchrelay.checkpoint.reading.sharing import options_of
from torchrelay.checkpoint.reading.two_passes import Loading, Wanted
from torchrelay.checkpoint.reshard import same_nodes
from torchrelay.checkpoint.state.restore import Restoration, restoration
from torchrelay.checkpoint.storage import Storage
from torchrelay.checkpoint.timing import Clock, patience_secs
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.names import dotted_prefixes
from torchrelay.jobs.peers import together
from torchrelay.jobs.session import Session
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.stats import NodeStats, NodeTimes
from torchrelay.records import dataclass


@dataclass(frozen=True)
class _Plan:
    """One requested name for one workspace."""

    workspace: Workspace
    blob: str
    target: str
    node: str | None
    restoration: Restoration


def load_some(
    storage: Storage,
    session: Session,
    manifest: Manifest,
    names: Sequence[str],
    stored_name: Callable[[str], str],
    *,
    strict: bool,
) -> tuple[bool, NodeStats]:
    """Load; False, with nothing changed anywhere, when a name or a shard that holds it is not there.

    All processes verify what they load before any of them changes an object. With `strict=False` unknown
    names are left out.
    """
    clock = Clock()
    reader = LeafReader(storage, manifest, options=options_of(session))
    plans: list[_Plan] = []

    def prepare() -> bool:
        try:
            for name in names:
                plans.extend(_plans(session, reader, manifest, name, stored_name, strict=strict))
            for plan in plans:
                _open_files(reader, plan)
        except (UsageError, DamagedError):
            return False
        return True

    with clock.spent("prove"):
        ready = all(together(session.peers, "partial load: check", prepare))
    if ready:
        wanted = [Wanted(read, read.leaf, plan.node) for plan in plans for read in plan.restoration.reads]
        loading = Loading(reader, wanted)
        patience = patience_secs(sum(leaf.nbytes for leaf in manifest.leaves))
        with clock.spent("prove"):
            together(session.peers, "partial load: verify", loading.first, deadline_secs=patience)
        with clock.spent("read"):
            gate()
            install = partial(_install, loading, plans)
            together(session.peers, "partial load: read", install, deadline_secs=patience)
    path = f"{storage.url}/{stored_name(session.local_nodes[0].name)}.{manifest.position}"
    size = sum(read.spec.nbytes for plan in plans for read in plan.restoration.reads)
    rows = session.peers.exchange(
        "partial load: done", [stored_name(session.local_nodes[0].name), path, size, clock.secs]
    )
    return ready, NodeStats(NodeTimes(*row) for row in rows)


def _plans(
    session: Session,
    reader: LeafReader,
    manifest: Manifest,
    name: str,
    stored_name: Callable[[str], str],
    *,
    strict: bool,
) -> list[_Plan]:
    stored = {stored_name(place.name): place.name for place in session.local_nodes}
    node, blob = split_name(name, manifest.world.names)
    leaves = [leaf for leaf in manifest.rows if leaf == blob or leaf.startswith(f"{blob}.")]
    if not leaves:
        if strict:
            find_row(manifest, blob)
        return []
    hosted = node is not None and node in stored
    places = [stored[node]] if hosted and node is not None else list(stored.values())
    alike = same_nodes(manifest, [stored_name(place.name) for place in session.nodes])
    found = []
    for place in places:
        own = node or (stored_name(place) if stored_name(place) in manifest.world.number else None)
        workspace, target = session.workspace(place), blob if hosted or node is None else name
        wanted = _of_node(manifest, leaves, own, alone=node is not None or alike)
        if wanted:
            found.append(_plan(workspace, reader, wanted, blob, target, own))
    if node is not None and not found:
        check_owned(manifest, leaves[0], node)
    return found


def _of_node(manifest: Manifest, leaves: Sequence[str], node: str | None, *, alone: bool) -> Sequence[str]:
    """What a node takes of leaves: those that it owns.

    On other nodes than those of the epoch, all that have one value, too, for an object there may have them.
    """
    if node is None:
        return leaves
    mine = [leaf for leaf in leaves if is_owned(manifest, leaf, node)]
    if alone:
        return mine
    own = set(mine)
    return [leaf for leaf in leaves if leaf in own or not several_owners(manifest, leaf)]


def _plan(
    workspace: Workspace, reader: LeafReader, leaves: Sequence[str], blob: str, target: str, node: str | None
) -> _Plan:
    specs, values = {}, {}
    for leaf in leaves:
        row = find_row(reader.manifest, leaf, node)
        holder_of(reader.manifest, row, node)
        specs[leaf] = spec_of_row(reader.manifest.leaves[row], reader.manifest)
        if specs[leaf].kind == "value":
            values[leaf] = reader.value_json(leaf, node)
    entries = workspace.entries() if target == blob else {}
    owners = {owner for spec in specs.values() for owner in (spec.blob, *dotted_prefixes(spec.blob))}
    registered = {name: entry.target for name, entry in entries.items() if entry.blob is not None}
    objects = {name: value for name, value in registered.items() if name in owners}
    for leaf, spec in specs.items():  # a tensor of a container that nobody holds here comes alone
        if spec.blob not in objects and spec.blob not in specs and _is_value(reader.manifest, spec.blob):
            specs[leaf] = replace(spec, blob=leaf)
    plan = restoration(
        objects,
        specs,
        values,
        strict=False,
        late_buffers=True,
        exclude=None,
        same_content=lambda one, other: reader.same_content((one, node), (other, node)),
    )
    return _Plan(workspace, blob, target, node, plan)


def _is_value(manifest: Manifest, blob: str) -> bool:
    return blob in manifest.rows and manifest.leaves[manifest.rows[blob][0]].role == "value"


def _open_files(reader: LeafReader, plan: _Plan) -> None:
    """Open every file that holds a requested byte: a missing one shows now, not half-way."""
    for read in plan.restoration.reads:
        reader.digest(read.leaf, plan.node)


def _install(loading: Loading, plans: Sequence[_Plan]) -> None:
    loading.second()
    for plan in plans:
        created: dict[str, Any] = plan.restoration.finish()
        for name, value in created.items():
            plan.workspace.set_loaded(_renamed(name, plan), value)


def _renamed(name: str, plan: _Plan) -> str:
    return plan.target + name.removeprefix(plan.blob) if name.startswith(plan.blob) else name
