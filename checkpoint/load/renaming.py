"""An epoch under other names than it was saved under; what a load is given, and what it gives back.

The name of a parameter occurs in the names of its optimizer state, and in the list of its parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.manifest.position import matches_any
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, BlobRow, LeafRow, Manifest
from torchrelay.checkpoint.format.value_decoding import renamed_references
from torchrelay.checkpoint.load.lookup import Rename, renamed
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader, ReadPlan
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP
from torchrelay.checkpoint.state.optimizer_leaves import PARAMS, groups_prefix, state_prefix
from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import objects_inside
from torchrelay.jobs.containers import is_container
from torchrelay.records import dataclass


@dataclass(frozen=True)
class LoadResult:
    """What a load did: leaf names by the names that the objects know, and bytes read, headers included.

    `misshapen` are those that both sides have in different forms, where the load was to skip them.
    `nodes` has, for each leaf that differs between nodes, whose value was taken.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    bytes_read: int = 0
    misshapen: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)

    def costing(self, nbytes: int) -> LoadResult:
        """The result with the bytes that it took."""
        return replace(self, bytes_read=nbytes)


def checked_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The objects, and those with state inside containers, by blob name; raises UsageError for no mapping."""
    if not isinstance(objects, Mapping) or not all(issubclass(kind, str) for kind in set(map(type, objects))):
        raise UsageError(
            f'give the objects by blob name, load({{"model": model}}), not {type(objects).__name__}'
        )
    one_each = {type(value): value for value in objects.values()}  # of very many tensors none is asked alone
    held = {kind for kind, value in one_each.items() if is_container(value)}
    containers = [(name, value) for name, value in objects.items() if type(value) in held] if held else []
    inside = {inner: found for name, value in containers for inner, found in objects_inside(value, name)}
    return {**inside, **objects}


def blob_of(name: str, objects: Collection[str]) -> str | None:
    """The object that a leaf belongs to. No blob's name is a dotted prefix of another's."""
    while name not in objects:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def of_objects(names: Iterable[str], objects: Mapping[str, Any]) -> list[str]:
    """The leaf names that belong to some object, in their order.

    Few of many are found by looking for what begins like them, not by asking every name.
    """
    if not objects:
        return []
    names = list(names)
    if len(objects) * _FEW > len(names):
        return [name for name in names if name in objects or blob_of(name, objects) is not None]
    below = tuple(f"{name}." for name in objects)
    return [name for name in names if name in objects or name.startswith(below)]


_FEW = 64
"""Names per object from which on a scan for beginnings, quadratic but in C, costs less."""


@dataclass(frozen=True)
class Renaming:
    """The leaves of an epoch under other names, those of today; `blobs` are registered now."""

    manifest: Manifest
    rename: Rename | None = None
    blobs: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names that optimizer state may be called after."""
        return frozenset(leaf.name for leaf in self.manifest.leaves if leaf.role == "parameter")

    def name(self, leaf: LeafRow) -> str:
        """What a stored leaf is called today."""
        if leaf.role == "gradient" and leaf.name != leaf.blob:
            return f"{leaf.blob}.{renamed(leaf.name.removeprefix(f'{leaf.blob}.'), self.rename)}"
        if leaf.role in OF_POSITION:
            return leaf.name
        if not isinstance(self.rename, Mapping):
            return renamed(leaf.name, self.rename)
        parameter, key = self.owner(leaf)
        if parameter:
            state = state_prefix(leaf.blob)
            return f"{renamed(state, self.rename)}{renamed(parameter, self.rename)}{key}"
        if leaf.name == leaf.blob:  # a rule for what lies below a blob is one for the blob
            return renamed(f"{leaf.name}.", self.rename).removesuffix(".")
        return renamed(leaf.name, self.rename)

    def owner(self, leaf: LeafRow) -> tuple[str, str]:
        """The parameter that a leaf of optimizer state belongs to, and the rest of its name; or nothing."""
        if leaf.group != OPTIM_GROUP:
            return "", leaf.name
        return owner_of(leaf.name, leaf.blob, self.parameters)

    @cached_property
    def today(self) -> dict[str, str]:
        """Stored names to new ones."""
        return {old: name for name, old in self.stored.items()}

    @cached_property
    def stored(self) -> dict[str, str]:
        """New names to stored ones; raises UsageError where two leaves would get one name."""
        found: dict[str, str] = {}
        for leaf in self.manifest.leaves:
            name = self.name(leaf)
            if not name or found.setdefault(name, leaf.name) != leaf.name:
                both = f"{found[name]!r} and {leaf.name!r} both" if name else repr(leaf.name)
                raise UsageError(f"rename={self.rename!r} makes {both} {name!r}: choose other names")
        return found

    @cached_property
    def renamed_manifest(self) -> Manifest:
        """The manifest as if the epoch had been saved under the names of today; keys in files stay."""
        new = self.today
        kinds = {blob.name: blob for blob in self.manifest.blobs}
        leaves, blobs = [], dict[str, BlobRow]()
        for leaf in self.manifest.leaves:
            name = new[leaf.name]
            blob = blob_of(name, self.blobs) or renamed(f"{leaf.blob}.", self.rename).removesuffix(".")
            blobs.setdefault(
                blob, kinds.get(leaf.blob, BlobRow(blob, "stateful", leaf.scope))._replace(name=blob)
            )
            alias = None if leaf.alias_of is None else new.get(leaf.alias_of, leaf.alias_of)
            same = None if leaf.same_as is None else new.get(leaf.same_as)
            leaves.append(leaf._replace(name=name, blob=blob, alias_of=alias, same_as=same))
        made = self.manifest.facts.made_by_init
        facts = self.manifest.facts
        if made is not None:
            facts = replace(facts, made_by_init=tuple(new.get(name, name) for name in made))
        return replace(self.manifest, leaves=tuple(leaves), blobs=tuple(blobs.values()), facts=facts)

    def value(self, stored: str, json: Json) -> Json:
        """A stored value with the names of today in it."""
        if self.is_group(stored):
            return self.group(json)
        return renamed_references(json, self.today)

    def is_group(self, stored: str) -> bool:
        """Whether a leaf is the list of the parameters of an optimizer's group."""
        leaf = self.manifest.leaves[self.manifest.rows[stored][0]]
        head, _, last = stored.rpartition(".")
        return leaf.group == OPTIM_GROUP and last == PARAMS and head.startswith(groups_prefix(leaf.blob))

    def group(self, names: Sequence[str]) -> list[str]:
        """Such a list with the names of today."""
        return [renamed(name, self.rename) for name in names]

    def excludes(self, leaf: LeafRow, patterns: Collection[str]) -> bool:
        """Whether patterns, of the names of today, mean a leaf, or the parameter that it is state of."""
        parameter, _ = self.owner(leaf)
        names = [self.name(leaf), *([renamed(parameter, self.rename)] if parameter else [])]
        return any(matches_any(name, patterns) for name in names)


class RenamedReader(LeafReader):
    """Reads an epoch by the names of today."""

    def __init__(self, reader: LeafReader, renaming: Renaming) -> None:
        self._stored = reader
        self._renaming = renaming
        self.manifest = renaming.renamed_manifest
        self.options, self.shards = reader.options, reader.shards

    def plan(self, reads: Iterable[LeafRead]) -> ReadPlan:
        """See `LeafReader.plan`."""
        old = self._renaming.stored
        return self._stored.plan(replace(read, leaf=old.get(read.leaf, read.leaf)) for read in reads)

    def value_json(self, leaf: str, node: str | None = None) -> Json:
        """A value in its typed form, with the names of today in it."""
        old = self._renaming.stored.get(leaf, leaf)
        return self._renaming.value(old, self._stored.value_json(old, node))

    def digest(self, leaf: str, node: str | None = None) -> str:
        """See `LeafReader.digest`."""
        return self._stored.digest(self._renaming.stored.get(leaf, leaf), node)


def owner_of(name: str, blob: str, parameters: Collection[str]) -> tuple[str, str]:
    """The parameter that a leaf of an optimizer is state of, and the rest of its name; or nothing."""
    state = state_prefix(blob)
    rest = name.removeprefix(state)
    end = len(rest) if name.startswith(state) else 0
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in parameters:
            return rest[:end], rest[end:]
    return "", rest


def renamed_manifest(manifest: Manifest, rename: Mapping[str, str], blobs: Iterable[str]) -> Manifest:
    """The manifest under the names of today; see `Renaming`."""
    return Renaming(manifest, rename, frozenset(blobs)).renamed_manifest if rename else manifest


def excluded_leaves(manifest: Manifest, patterns: Collection[str]) -> Callable[[str], bool]:
    """Whether a leaf, stored or of an object, is among what patterns mean.

    The state that an optimizer has of a parameter goes with the parameter.
    """
    renaming = Renaming(manifest)
    stored = {leaf.name for leaf in manifest.leaves if renaming.excludes(leaf, patterns)}
    return lambda name: name in stored or matches_any(name, patterns)
