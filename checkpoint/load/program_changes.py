"""What a resume makes of a program that has changed since an epoch was saved.

    a blob that is new                  begins as the program made it
    a blob that nobody registers now    is left out, of later saves too
    a name that has changed             is found by its old one, where `rename` says so
    leaves that do not fit any more     stay as the program made them, where `exclude` names them

Each is reported in one line. Everything else that differs is refused before an object changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import Any

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.manifest.position import Patterns, Position
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, LeafRow, Manifest
from torchrelay.checkpoint.load.lookup import pattern_list
from torchrelay.checkpoint.load.renaming import blob_of
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.records import dataclass

_MADE_ANEW = ("tensor", "parameter", "value")
"""Roles of a blob's own leaf of which a load can make the blob without an object."""
_LATE = ("optimizer",)
"""The role of state that an optimizer has only after its first step."""


@dataclass(frozen=True)
class ResumeOptions:
    """What a resume may make of differences; see `ManagerOptions`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    strict: bool = False


def resume_options_of(rename: Any, exclude: Patterns, strict: Any) -> ResumeOptions:
    """What the arguments `rename`, `resume_exclude` and `resume_strict` ask for; raises UsageError."""
    names = {} if rename is None else rename
    if not isinstance(names, Mapping) or not all(
        isinstance(one, str) for pair in names.items() for one in pair
    ):
        raise UsageError(f'rename is {rename!r:.80}; give new names by old ones, such as {{"old.": "new."}}')
    if strict is not None and type(strict) is not bool:
        raise UsageError(f"resume_strict is {strict!r:.80}; it is True or False")
    return ResumeOptions(dict(names), tuple(pattern_list(exclude or ())), bool(strict))


# Blobs that are new or gone


def new_blobs(manifest: Manifest, objects: Mapping[str, Any]) -> list[str]:
    """The registered objects of which the epoch has nothing, and not because its save left them out."""
    stored = {blob.name for blob in manifest.blobs}
    absent = {name for name in objects if name not in stored}
    if not absent:
        return []
    absent -= {prefix for name in stored for prefix in dotted_prefixes(name)}  # entries of dicts were blobs
    leaves = [leaf for leaf in leaves_of(objects) if leaf.blob in absent] if absent else []
    left_out = {leaf.blob for leaf in leaves if manifest.facts.selection.why_not(leaf.name)}
    return sorted({leaf.blob for leaf in leaves} - left_out)


def gone_blobs(manifest: Manifest, registered: Collection[str]) -> frozenset[str]:
    """The stored blobs that nobody registers any more, and that `init` did not make either."""
    own = (manifest.rows.get(blob.name, ()) for blob in manifest.blobs)
    remade = {leaf.name for rows in own for leaf in _leaves(manifest, rows) if leaf.role in _MADE_ANEW}
    made = manifest.facts.made_by_init
    if made is not None:  # else an earlier version saved: what can be made anew may have been made by init
        remade = {name for name in remade if blob_of(name, registered)}.union(made)
    of_position = {leaf.blob for leaf in manifest.leaves if leaf.role in OF_POSITION}
    return frozenset(blob.name for blob in manifest.blobs).difference(registered, remade, of_position)


def may_be_renamed(manifest: Manifest, gone: str, new: str, objects: Mapping[str, Any]) -> bool:
    """Whether what is stored of a blob consists of the same sorts of leaves as a registered one."""
    stored = {leaf.role for leaf in manifest.leaves if leaf.blob == gone}
    here = {str(leaf.role) for leaf in leaves_of(objects) if leaf.blob == new}
    return stored.difference(_LATE) == here.difference(_LATE)


def _leaves(manifest: Manifest, rows: Iterable[int]) -> list[LeafRow]:
    return [manifest.leaves[row] for row in rows]


@dataclass
class Changes:
    """What a load found changed, on one node or on all."""

    new: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)
    buffers: dict[str, str] = field(default_factory=dict)
    """Buffers that differed between the nodes of the epoch, which are others now, and the first of these."""
    retyped: set[str] = field(default_factory=set)
    """Containers of another type than what was saved, which no load changes into that."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The one blob that is gone, and the one that is new, where they may be one."""
    unsaved: set[str] = field(default_factory=set)
    """The nodes that no save takes."""

    def to_json(self) -> Json:
        """For the other processes."""
        return [
            sorted(self.new),
            sorted(self.gone),
            sorted(self.excluded),
            self.buffers,
            sorted(self.retyped),
            self.renamed,
            sorted(self.unsaved),
        ]

    @staticmethod
    def of_all(parts: Iterable[Json]) -> Changes:
        """What all nodes found; a blob is gone if no node has it any more."""
        found, gone = Changes(), list[set[str]]()
        for new, here, excluded, buffers, retyped, renamed, unsaved in parts:
            found.new.update(new)
            found.excluded.update(excluded)
            found.buffers.update(buffers)
            found.retyped.update(retyped)
            found.renamed.update(renamed)
            found.unsaved.update(unsaved)
            gone.append(set(here))
        found.gone = set.intersection(*gone) if gone else set()
        return found

    def lines(self, position: Position) -> list[str]:
        """A line for each blob, and one each for what is excluded, others' buffers, and unsaved nodes."""
        excluded, buffers = _some(self.excluded), _some(self.buffers)
        owners = ", ".join(sorted(set(self.buffers.values())))
        renamed = ""
        if len(self.new) == len(self.gone) == 1 and set(self.renamed) == self.gone:
            renamed = f". If it has another name now, give rename={self.renamed}"
        return [
            *(f"blob {name!r} is not in epoch {position}: it begins as the program made it" for name in
              sorted(self.new)),
            *(f"blob {name!r} of epoch {position} is not registered any more: it is left out, of later saves "
              f"too{renamed}" for name in sorted(self.gone)),
            *(f"{name!r} was saved as a value of another type or form than the registered one, which stays "
              f"as the program made it: ctx[{name!r}] has what was saved" for name in sorted(self.retyped)),
            *([f"not loaded from epoch {position}, because resume_exclude names it or its "
               f"parameter: {excluded}"]
              if excluded else []),
            *([f"buffers that differed between the nodes of epoch {position}: each node takes its own, a new "
               f"one those of {owners} ({buffers})"] if buffers else []),
            *([f"{_some(self.unsaved)}: not saved (nodes_to_checkpoint), so only replicated blobs are loaded "
               "there, and the rest, random streams too, begins as in a new run"] if self.unsaved else []),
        ]  # fmt: skip


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
