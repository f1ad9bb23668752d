"""The checkpoint set: which names of a node are saved, and who owns their content.

The set of a node is fixed when `init` ends: the registered blobs and the names that its GLOBAL
workspace holds then. Scopes that nobody forced are inferred here, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, Manifest
from torchrelay.checkpoint.state.dtensors import is_sharded
from torchrelay.checkpoint.state.gradients import parameter_of
from torchrelay.checkpoint.state.leaf import Leaf, Role, Value
from torchrelay.jobs.blobs import Reshard, Scope
from torchrelay.jobs.cluster import RANDOM_STATES, check_blob_names
from torchrelay.jobs.containers import is_generator
from torchrelay.jobs.workspace import Entry, Origin, Workspace
from torchrelay.records import dataclass

RNG_BLOB = RANDOM_STATES
_RANK, _REPLICATED = Scope.RANK.value, Scope.REPLICATED.value


@dataclass(frozen=True)
class Member:
    """A name of the set. `scope` None means inferred; `placed` that `init` made it on one named node."""

    name: str
    scope: Scope | None = None
    reshard: Reshard = None
    placed: bool = False
    registered: bool = False
    """Whether the program gave it as a blob; `init` made it otherwise."""
    container: str | None = None
    """The blob that the object lies in."""
    generator: bool = False
    """Whether it draws random numbers: nodes may differ, and one that is new keeps its own."""


def members_of(workspace: Workspace) -> dict[str, Member]:
    """The set of a node as its workspace is now; raises UsageError for names that cannot stand together."""
    members = [_member(name, entry) for name, entry in workspace.entries().items() if ":" not in name]
    found = {member.name: member for member in members if member.scope is not Scope.TRANSIENT}
    check_blob_names(found, {name: member.container for name, member in found.items() if member.container})
    return found


def _member(name: str, entry: Entry) -> Member:
    blob = entry.blob
    generator = is_generator(entry.value)
    return Member(
        name,
        blob.scope if blob else None,
        (blob.reshard if blob else None) or ("by_rank" if generator else None),
        placed=entry.origin is Origin.INIT_PLACED,
        registered=blob is not None,
        container=blob.container if blob else None,
        generator=generator,
    )


def newcomers(workspace: Workspace, members: Mapping[str, Member]) -> list[str]:
    """Names that came too late to be saved."""
    return [
        name
        for name, entry in workspace.entries().items()
        if name not in members
        and entry.origin is Origin.LATER
        and ":" not in name
        and name not in workspace.outliving
    ]


def scopes_of(
    leaves: Sequence[Leaf], members: Mapping[str, Member], objects: Mapping[str, Any], demoted: set[str]
) -> dict[str, str]:
    """The scope of every leaf; `demoted` are leaves that differed once and are `rank` since."""
    of_blobs = {name: _scope_of_blob(member, objects.get(name)) for name, member in members.items()}
    gradients = [leaf for leaf in leaves if leaf.role is Role.GRADIENT]
    others = leaves if not gradients else [leaf for leaf in leaves if leaf.role is not Role.GRADIENT]
    found = {leaf.name: _scope(leaf, members, of_blobs, demoted) for leaf in others}
    for leaf in gradients:  # owned as its parameter is
        sharded = not isinstance(leaf.content, Value) and is_sharded(leaf.content)
        owned = _RANK if found.get(parameter_of(leaf.name)) == _RANK else _REPLICATED
        found[leaf.name] = Scope.SHARDED.value if sharded else owned
    return found


def _scope_of_blob(member: Member, value: Any) -> str:
    if member.scope is not None:
        return member.scope.value
    return _RANK if member.placed or is_foreign_loader(value) else _REPLICATED


def _scope(leaf: Leaf, members: Mapping[str, Member], of_blobs: Mapping[str, str], demoted: set[str]) -> str:
    scope = of_blobs.get(leaf.blob)
    if scope is None or leaf.role is Role.RNG:
        return _RANK
    if not isinstance(leaf.content, Value) and is_sharded(leaf.content):
        return Scope.SHARDED.value  # whatever was said of its blob: a part is no value of its own
    if leaf.name in demoted and members[leaf.blob].scope is None:
        return _RANK
    return scope


def is_foreign_loader(value: Any) -> bool:
    """Whether this is a loader of the user's with a state of its own, which differs between ranks."""
    if isinstance(value, nn.Module) or not hasattr(type(value), "__iter__"):
        return False
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_state and not getattr(value, "same_on_all_ranks", False)


def stored_blobs(manifest: Manifest, node: str) -> list[str]:
    """The blobs that a node of this name owns a leaf of, or, for a new node, those that all nodes share."""
    number = manifest.world.number.get(node, -1)
    known = 0 <= number < len(manifest.world.nodes)
    found: dict[str, None] = {}
    for leaf in sorted(manifest.leaves, key=lambda leaf: leaf.name):  # referenced ones stand at the end
        mine = number in manifest.owners_of(leaf) if known else manifest.is_shared(leaf)
        if mine and leaf.role not in OF_POSITION:
            found[leaf.blob] = None
    return list(found)
