"""Loading some blobs of an epoch into the hosted nodes' workspaces: for evaluation, without training.

`node:name` is a node's own value. Where that node is hosted here it goes into its workspace as
`name`; elsewhere into every hosted workspace under the full name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.disk.dtypes import memory_of
from torchrelay.checkpoint.disk.manifest import Manifest
from torchrelay.checkpoint.load import spec_of_row
from torchrelay.checkpoint.reading.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.reading.lookup import find_row, holder_of, split_name
from torchrelay.checkpoint.reading.sharing import options_of
from torchrelay.checkpoint.state.restore import Restoration, restoration
from torchrelay.checkpoint.storage import Storage
from torchrelay.checkpoint.timing import Clock, patience_secs
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.peers import together
from torchrelay.jobs.session import Session
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.stats import NodeStats, NodeTimes


@dataclass(frozen=True)
class Wanted:
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

    With `strict=False` unknown names are left out.
    """
    clock = Clock()
    reader = LeafReader(storage, manifest, options=options_of(session))
    plans: list[Wanted] = []

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
        with clock.spent("read"):
            size = sum(leaf.nbytes for leaf in manifest.leaves)
            together(
                session.peers,
                "partial load: read",
                lambda: _read(reader, plans),
                deadline_secs=patience_secs(size),
            )
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
) -> list[Wanted]:
    stored = {stored_name(place.name): place.name for place in session.local_nodes}
    node, blob = split_name(name, manifest.world.names)
    leaves = [leaf for leaf in manifest.rows if leaf == blob or leaf.startswith(f"{blob}.")]
    if not leaves:
        if strict:
            find_row(manifest, blob)
        return []
    hosted = node is not None and node in stored
    places = [stored[node]] if hosted and node is not None else list(stored.values())
    found = []
    for place in places:
        own = node or (stored_name(place) if stored_name(place) in manifest.world.number else None)
        found.append(
            _plan(
                session.workspace(place), reader, leaves, blob, blob if hosted or node is None else name, own
            )
        )
    return found


def _plan(
    workspace: Workspace, reader: LeafReader, leaves: Sequence[str], blob: str, target: str, node: str | None
) -> Wanted:
    specs, values = {}, {}
    for leaf in leaves:
        row = find_row(reader.manifest, leaf, node)
        holder_of(reader.manifest, row, node)
        specs[leaf] = spec_of_row(reader.manifest.leaves[row], reader.manifest)
        if specs[leaf].kind == "value":
            values[leaf] = reader.value_json(leaf, node)
    owner = next(iter(specs.values())).blob
    entry = workspace.entries().get(owner)
    objects = {owner: entry.value} if entry is not None and entry.blob is not None and target == blob else {}
    return Wanted(workspace, blob, target, node, restoration(objects, specs, values, strict=False))


def _open_files(reader: LeafReader, plan: Wanted) -> None:
    """Open every file that holds a requested byte: a missing one shows now, not half-way."""
    for read in plan.restoration.reads:
        reader.digest(read.leaf, plan.node)


def _read(reader: LeafReader, plans: Sequence[Wanted]) -> None:
    reads = [
        LeafRead(read.leaf, memory_of(read.memory()), plan.node, read.target)
        for plan in plans
        for read in plan.restoration.reads
    ]
    reader.read_many(reads)
    for plan in plans:
        created: dict[str, Any] = plan.restoration.finish()
        for name, value in created.items():
            plan.workspace.set_loaded(_renamed(name, plan), value)


def _renamed(name: str, plan: Wanted) -> str:
    return plan.target + name.removeprefix(plan.blob) if name.startswith(plan.blob) else name
