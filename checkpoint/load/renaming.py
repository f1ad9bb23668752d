"""Map the stored names of an epoch to the current ones, and find what changed in the program since the save.

Names of parameters also occur in the names of optimizer state and in its lists of parameter groups.

- A blob that is new keeps the value that the program gave it.
- A blob that is not registered any more is left out, of later saves too.
- A blob with a new name is found by its old one, if `rename` maps it.
- Leaves that `exclude` names and that do not fit any more keep the program's value.

Each is reported in one line. Any other difference raises before an object changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, BlobRow, LeafRow, Manifest
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.position import Patterns, Position, matches_any
from torchrelay.checkpoint.format.value_decoding import renamed_references
from torchrelay.checkpoint.load.lookup import Rename, names_apart, pattern_list, renamed
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP, LeafSpec, Role, blob_of, spec_of
from torchrelay.checkpoint.state.module_leaves import PARAMS, groups_prefix, state_prefix
from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import objects_inside
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.jobs.containers import is_container
from torchrelay.records import Json, dataclass


@dataclass(frozen=True)
class LoadResult:
    """Result of a load: leaf names as the objects have them, and bytes read, headers included.

    `misshapen` are leaves that both sides have in different forms, if the load skips them. `nodes` has the
    node whose value was taken, for each leaf that differs between nodes.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    bytes_read: int = 0
    misshapen: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)


def misshapen_leaves(
    objects: Mapping[str, Any], stored: Iterable[Any], rename: Rename | None
) -> tuple[str, ...]:
    """The leaves of objects that are stored in another form, by their names in the objects."""
    live = {leaf.name: spec_of(leaf) for leaf in leaves_of(objects)}
    pairs = ((live.get(renamed(leaf.name, rename)), leaf) for leaf in stored)
    return tuple(
        here.name
        for here, leaf in pairs
        if here is not None and (here.kind, here.dtype, here.shape) != (leaf.kind, leaf.dtype, leaf.shape)
    )


def checked_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Objects by blob name, with the stateful ones inside containers; raises UsageError unless a mapping."""
    if not isinstance(objects, Mapping) or not all(issubclass(kind, str) for kind in set(map(type, objects))):
        raise UsageError(
            f"invalid objects of type {type(objects).__name__}: expected a mapping by blob name, "
            '{"model": model}'
        )
    one_each = {type(value): value for value in objects.values()}  # one per type: there may be many
    held = {kind for kind, value in one_each.items() if is_container(value)}
    containers = [(name, value) for name, value in objects.items() if type(value) in held] if held else []
    inside = {inner: found for name, value in containers for inner, found in objects_inside(value, name)}
    return {**inside, **objects}


def of_objects(names: Iterable[str], objects: Mapping[str, Any]) -> list[str]:
    """Those names that belong to some object, in their order."""
    if not objects:
        return []
    names = list(names)
    if len(objects) * _FEW > len(names):
        return [name for name in names if name in objects or blob_of(name, objects) is not None]
    below = tuple(f"{name}." for name in objects)
    return [name for name in names if name in objects or name.startswith(below)]


_FEW = 64
"""Names per object above which scanning for prefixes, quadratic but in C, is quicker."""


@dataclass(frozen=True)
class Renaming:
    """The leaves of an epoch under their current names; `blobs` are those registered now."""

    manifest: Manifest
    rename: Rename | None = None
    blobs: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names that occur in names of optimizer state."""
        return frozenset(leaf.name for leaf in self.manifest.leaves if leaf.role == "parameter")

    def name(self, leaf: LeafRow) -> str:
        """The current name of a stored leaf."""
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
        if leaf.name == leaf.blob:  # a rule for leaves below a blob is one for the blob
            return renamed(f"{leaf.name}.", self.rename).removesuffix(".")
        return renamed(leaf.name, self.rename)

    def owner(self, leaf: LeafRow) -> tuple[str, str]:
        """The parameter that a leaf of optimizer state belongs to, and the rest of its name; else empty."""
        if leaf.group != OPTIM_GROUP:
            return "", leaf.name
        return owner_of(leaf.name, leaf.blob, self.parameters)

    @cached_property
    def today(self) -> dict[str, str]:
        """Current names by stored name."""
        return {old: name for name, old in self.stored.items()}

    @cached_property
    def stored(self) -> dict[str, str]:
        """Stored names by current name; raises UsageError if two leaves would get one name."""
        return names_apart(((leaf.name, self.name(leaf)) for leaf in self.manifest.leaves), self.rename)

    @cached_property
    def renamed_manifest(self) -> Manifest:
        """The manifest as if the epoch had been saved under the current names; keys in files stay."""
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
        """A stored value with current names in it."""
        if self.is_group(stored):
            return self.group(json)
        return renamed_references(json, self.today)

    def is_group(self, stored: str) -> bool:
        """Whether a leaf is the list of the parameters of an optimizer's group."""
        leaf = self.manifest.leaves[self.manifest.rows[stored][0]]
        head, _, last = stored.rpartition(".")
        return leaf.group == OPTIM_GROUP and last == PARAMS and head.startswith(groups_prefix(leaf.blob))

    def group(self, names: Sequence[str]) -> list[str]:
        """Such a list with current names."""
        return [renamed(name, self.rename) for name in names]

    def excludes(self, leaf: LeafRow, patterns: Collection[str]) -> bool:
        """Whether patterns of current names match a leaf, or the parameter that it is state of."""
        parameter, _ = self.owner(leaf)
        names = [self.name(leaf), *([renamed(parameter, self.rename)] if parameter else [])]
        return any(matches_any(name, patterns) for name in names)


def owner_of(name: str, blob: str, parameters: Collection[str]) -> tuple[str, str]:
    """The parameter that an optimizer's leaf is state of, and the rest of its name; else empty."""
    state = state_prefix(blob)
    rest = name.removeprefix(state)
    parameter = blob_of(rest.rpartition(".")[0], parameters) if name.startswith(state) else None
    return parameter or "", rest.removeprefix(parameter or "")


def spec_of_row(row: LeafRow, manifest: Manifest) -> LeafSpec:
    """A stored leaf in the form that planning and checks use."""
    layout = manifest.layouts[row.layout]
    return LeafSpec(
        row.name, row.blob, Role(row.role), row.group, "tensor" if row.kind == "tensor" else "value",
        row.dtype, row.shape, row.nbytes, row.alias_of, layout if isinstance(layout, Mesh) else None,
        row.frozen, row.order, row.order_changed, row.device, row.same_as
    )  # fmt: skip


def renamed_manifest(manifest: Manifest, rename: Mapping[str, str], blobs: Iterable[str]) -> Manifest:
    """The manifest under current names; see `Renaming`."""
    return Renaming(manifest, rename, frozenset(blobs)).renamed_manifest if rename else manifest


def excluded_leaves(manifest: Manifest, patterns: Collection[str]) -> Callable[[str], bool]:
    """A test whether patterns match a leaf, stored or of an object; state matches with its parameter."""
    renaming = Renaming(manifest)
    stored = {leaf.name for leaf in manifest.leaves if renaming.excludes(leaf, patterns)}
    return lambda name: name in stored or matches_any(name, patterns)


_MADE_ANEW = ("tensor", "parameter", "value")
"""Roles of a blob's own leaf from which a load can create the blob without an object."""
_LATE = ("optimizer",)
"""The role of state that an optimizer has only after its first step."""


@dataclass(frozen=True)
class ResumeOptions:
    """How a resume treats differences; see `ManagerOptions`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    strict: bool = False


def resume_options_of(rename: Any, exclude: Patterns, strict: Any) -> ResumeOptions:
    """Check the arguments `rename`, `resume_exclude` and `resume_strict`; raises UsageError."""
    names = {} if rename is None else rename
    if not isinstance(names, Mapping) or not all(
        isinstance(one, str) for pair in names.items() for one in pair
    ):
        raise UsageError(
            f'invalid rename={rename!r}: expected new names by old ones, such as {{"old.": "new."}}'
        )
    if strict is not None and type(strict) is not bool:
        raise UsageError(f"invalid resume_strict={strict!r:.80}: expected True or False")
    return ResumeOptions(dict(names), tuple(pattern_list(exclude or ())), bool(strict))


# New and removed blobs


def new_blobs(manifest: Manifest, objects: Mapping[str, Any]) -> list[str]:
    """Registered objects that the epoch lacks, without those that its save left out."""
    stored = {blob.name for blob in manifest.blobs}
    absent = {name for name in objects if name not in stored}
    if not absent:
        return []
    absent -= {prefix for name in stored for prefix in dotted_prefixes(name)}  # entries of dicts were blobs
    leaves = [leaf for leaf in leaves_of(objects) if leaf.blob in absent] if absent else []
    left_out = {leaf.blob for leaf in leaves if manifest.facts.selection.why_not(leaf.name)}
    return sorted({leaf.blob for leaf in leaves} - left_out)


def gone_blobs(manifest: Manifest, registered: Collection[str]) -> frozenset[str]:
    """Stored blobs that are not registered any more and were not made by `init`."""
    rows = (row for blob in manifest.blobs for row in manifest.rows.get(blob.name, ()))
    remade = {leaf.name for leaf in map(manifest.leaves.__getitem__, rows) if leaf.role in _MADE_ANEW}
    made = manifest.facts.made_by_init
    if made is not None:  # else saved by an earlier version: what can be recreated may have been made by init
        remade = {name for name in remade if blob_of(name, registered)}.union(made)
    of_position = {leaf.blob for leaf in manifest.leaves if leaf.role in OF_POSITION}
    return frozenset(blob.name for blob in manifest.blobs).difference(registered, remade, of_position)


def may_be_renamed(manifest: Manifest, gone: str, new: str, objects: Mapping[str, Any]) -> bool:
    """Whether a stored blob has the same kinds of leaves as a registered one."""
    stored = {leaf.role for leaf in manifest.leaves if leaf.blob == gone}
    here = {str(leaf.role) for leaf in leaves_of(objects) if leaf.blob == new}
    return stored.difference(_LATE) == here.difference(_LATE)


@dataclass
class LoadChanges:
    """Changes of the program that a load found, on one node or on all."""

    new: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)
    buffers: dict[str, str] = field(default_factory=dict)
    """Buffers that differed between the epoch's nodes and are loaded on others; and the first such node."""
    retyped: set[str] = field(default_factory=set)
    """Containers of another type than the saved ones; a load does not change the type."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The only removed blob and the only new one, if one may be the other renamed."""
    unsaved: set[str] = field(default_factory=set)
    """Nodes that are not saved."""

    def to_json(self) -> Json:
        """The changes as JSON, to send to other processes."""
        return {name: sorted(one) if isinstance(one, set) else one for name, one in vars(self).items()}

    @staticmethod
    def of_all(parts: Iterable[Json]) -> LoadChanges:
        """Merge the changes of all nodes; a blob is gone if no node has it any more."""
        found, known = LoadChanges(), list(parts)
        for part in known:
            for name, one in part.items():
                getattr(found, name).update(one)
        found.gone.intersection_update(*(part["gone"] for part in known))
        return found

    def lines(self, position: Position) -> list[str]:
        """A line for each blob, and one each for exclusions, others' buffers, and unsaved nodes."""
        excluded, buffers = _some(self.excluded), _some(self.buffers)
        owners = ", ".join(sorted(set(self.buffers.values())))
        renamed = ""
        if len(self.new) == len(self.gone) == 1 and set(self.renamed) == self.gone:
            renamed = f". If it was renamed, give rename={self.renamed}"
        return [
            *(f"blob {name!r} is not in epoch {position}: it begins as the program made it" for name in
              sorted(self.new)),
            *(
                f"blob {name!r} of epoch {position} is not registered any more: it is left out, of later "
                f"saves too{renamed}" for name in sorted(self.gone)),
            *(
                f"{name!r} was saved with another type or form than the registered one, which stays as "
                f"the program made it: ctx[{name!r}] has the saved value" for name in sorted(self.retyped)),
            *([f"not loaded from epoch {position}, because resume_exclude names it or its "
               f"parameter: {excluded}"]
              if excluded else []),
            *([
                f"buffers that differed between the nodes of epoch {position}: each node loads its own, "
                f"a new one those of {owners} ({buffers})"] if buffers else []),
            *([
                f"{_some(self.unsaved)}: not saved (nodes_to_checkpoint), only replicated blobs are "
                "loaded there; all else, random streams too, begins as new"] if self.unsaved else [])
        ]  # fmt: skip


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
