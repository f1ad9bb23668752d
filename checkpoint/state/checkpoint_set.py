"""Decide which names are saved, which nodes own them, and which leaves are selected.

The set of a node is fixed when `init` ends: the registered blobs and the names that its GLOBAL workspace
holds then. Scopes that the user did not force are inferred here, leaf by leaf.

Patterns must take these units whole:

- a tensor of a wrapper class
- a value or an object's state, with the tensors inside
- the state that an optimizer has of one parameter
- all the rest of an optimizer
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import by_name, torch_dtype
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import Selection, matches
from torchrelay.checkpoint.state.flatten import leaves_of, parameter_names
from torchrelay.checkpoint.state.leaf import Leaf, Role, Value, blob_of, is_sharded, parameter_of
from torchrelay.checkpoint.state.module_leaves import state_prefix
from torchrelay.checkpoint.state.names import Kind, kind_of
from torchrelay.errors import BlobError
from torchrelay.jobs.blobs import Reshard, Scope
from torchrelay.jobs.cluster import RANDOM_STATES, check_blob_names
from torchrelay.jobs.containers import is_generator
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.records import dataclass

RNG_BLOB = RANDOM_STATES
_RANK, _REPLICATED = Scope.RANK.value, Scope.REPLICATED.value


@dataclass(frozen=True)
class SetMember:
    """A name of the set. `scope` None means inferred; `placed` that `init` made it on one named node."""

    name: str
    scope: Scope | None = None
    reshard: Reshard = None
    placed: bool = False
    registered: bool = False
    """Whether the program registered it as a blob; otherwise `init` made it."""
    container: str | None = None
    """The blob that contains the object."""
    generator: bool = False
    """Whether it draws random numbers: nodes may differ, and a new one keeps its own."""


def members_of(workspace: Workspace) -> dict[str, SetMember]:
    """The set of a node from its current workspace; raises UsageError for names that conflict."""
    found: dict[str, SetMember] = {}
    for name, entry in workspace.entries().items():
        blob, generator = entry.blob, is_generator(entry.value)
        if ":" in name or (blob is not None and blob.scope is Scope.TRANSIENT):
            continue
        found[name] = SetMember(
            name,
            blob.scope if blob else None,
            (blob.reshard if blob else None) or ("by_rank" if generator else None),
            placed=entry.origin is Origin.INIT_PLACED,
            registered=blob is not None,
            container=blob.container if blob else None,
            generator=generator,
        )
    check_blob_names(found, {name: member.container for name, member in found.items() if member.container})
    return found


def newcomers(workspace: Workspace, members: Mapping[str, SetMember]) -> list[str]:
    """Names created too late to be saved."""
    return [
        name
        for name, entry in workspace.entries().items()
        if name not in members
        and entry.origin is Origin.LATER
        and ":" not in name
        and name not in workspace.outliving
    ]


def scopes_of(
    leaves: Sequence[Leaf], members: Mapping[str, SetMember], objects: Mapping[str, Any], demoted: set[str]
) -> dict[str, str]:
    """The scope of every leaf; `demoted` are leaves that once differed and are `rank` since."""
    of_blobs: dict[str, str] = {}
    for name, member in members.items():
        own = member.placed or is_foreign_loader(objects.get(name))
        forced = member.scope.value if member.scope is not None else None
        of_blobs[name] = forced or (_RANK if own else _REPLICATED)
    found: dict[str, str] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.role is Role.GRADIENT):
        sharded = not isinstance(leaf.content, Value) and is_sharded(leaf.content)
        scope = of_blobs.get(leaf.blob)
        if leaf.role is Role.GRADIENT:  # owned as its parameter is
            scope = _RANK if found.get(parameter_of(leaf.name)) == _RANK else _REPLICATED
        elif scope is None or leaf.role is Role.RNG:
            scope, sharded = _RANK, False
        elif leaf.name in demoted and members[leaf.blob].scope is None:
            scope = _RANK
        # A part is not a value by itself, regardless of its blob.
        found[leaf.name] = Scope.SHARDED.value if sharded else scope
    return found


def is_foreign_loader(value: Any) -> bool:
    """Whether this is a user's own loader with state, which differs between ranks."""
    if isinstance(value, nn.Module) or not hasattr(type(value), "__iter__"):
        return False
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_state and not getattr(value, "same_on_all_ranks", False)


def stored_blobs(manifest: Manifest, node: str) -> list[str]:
    """Blobs that a node of this name owns a leaf of, or, for a new node, those that all nodes share."""
    number = manifest.world.number.get(node, -1)
    known = 0 <= number < len(manifest.world.nodes)
    found: dict[str, None] = {}
    for leaf in sorted(manifest.leaves, key=lambda leaf: leaf.name):  # referenced ones are at the end
        mine = number in manifest.owners_of(leaf) if known else manifest.is_shared(leaf)
        if mine and leaf.role not in OF_POSITION:
            found[leaf.blob] = None
    return list(found)


def select(leaves: Sequence[Leaf], objects: Mapping[str, Any], selection: Selection) -> list[Leaf]:
    """The leaves to save, in order; raises BlobError for patterns that split a unit, or leave nothing."""
    if selection.everything:
        return list(leaves)
    units: dict[str, list[Leaf]] = {}
    kinds = {blob: kind_of(value) for blob, value in objects.items()}
    parameters = set(parameter_names(objects).values())
    root = ""
    for leaf in leaves:
        if kinds[leaf.blob] is Kind.OPTIMIZER:
            prefix = state_prefix(leaf.blob)
            owner = blob_of(leaf.name.removeprefix(prefix), parameters)
            unit = prefix + owner if owner and leaf.name.startswith(prefix) else leaf.blob
        elif kinds[leaf.blob] is not Kind.MODULE:
            unit = leaf.blob
        else:
            inside = bool(root) and leaf.name.startswith(f"{root}.")
            unit = root if inside else leaf.name
            root = unit if inside or isinstance(leaf.content, Value) else ""
        units.setdefault(unit, []).append(leaf)
    wanted = {unit for unit, members in units.items() if _wanted(unit, members, selection)}
    for unit in wanted:
        blob = units[unit][0].blob
        if blob in units and blob not in wanted and kind_of(objects[blob]) is Kind.OPTIMIZER:
            raise BlobError(
                f"the groups of {blob!r} are left out and {unit!r} is not: leave out all of {blob!r}"
            )
    chosen = [leaf for unit, members in units.items() if unit in wanted for leaf in members]
    if leaves and not chosen:
        known = nearest((selection.include or ("",))[0], [leaf.name for leaf in leaves])
        given = {"include": selection.include, "exclude": selection.exclude}
        text = " ".join(f"{which}={list(patterns)}" for which, patterns in given.items() if patterns)
        raise BlobError(f"{text} leaves nothing to save: name what to save{known}")
    names = {leaf.name for leaf in chosen}
    # A leaf whose content is left out under another name has it itself.
    owners: dict[str, str] = {}
    found = []
    for leaf in [leaf for leaf in leaves if leaf.name in names]:
        if leaf.alias_of is None or leaf.alias_of in names:
            found.append(leaf)
            continue
        holder = owners.setdefault(leaf.alias_of, leaf.name)
        found.append(replace(leaf, alias_of=None if holder == leaf.name else holder))
    for at, leaf in enumerate(found):
        if leaf.same_as is not None and leaf.same_as not in names:
            found[at] = replace(leaf, same_as=owners.get(leaf.same_as))
    return found


def left_out(objects: Mapping[str, Any], selection: Selection) -> frozenset[str]:
    """Current leaves of these objects that a save leaves out."""
    if selection.everything:
        return frozenset()
    leaves = leaves_of(objects)
    chosen = {leaf.name for leaf in select(leaves, objects, selection)}
    return frozenset(leaf.name for leaf in leaves if leaf.name not in chosen)


def used_patterns(names: Iterable[str], selection: Selection) -> list[str]:
    """The patterns that match any of these names."""
    known = list(names)
    return [one for one in selection.patterns if any(matches(name, one) for name in known)]


def check_remade(names: Iterable[str], registered: Collection[str], selection: Selection) -> None:
    """Raise BlobError if a blob that only `init` makes is left out: a resumed run would lack it."""
    lost = [name for name in names if name not in registered and not selection.saves(name)]
    if lost:
        raise BlobError(
            f"{', '.join(map(repr, lost))} is left out of saves ({selection.why_not(lost[0])}), but only "
            "init makes it, and a resumed run skips init: register it as a blob, job.blobs(name=value), "
            "or give it scope='transient'"
        )


def _wanted(unit: str, members: Sequence[Leaf], selection: Selection) -> bool:
    """Whether a unit is saved; raises BlobError if patterns split it."""
    votes = {selection.saves(leaf.name) for leaf in members}
    inside = [leaf for leaf in members if leaf.name != unit or leaf.role is not Role.VALUE]
    if len(votes) > 1 and not any(selection.saves(leaf.name) for leaf in inside):
        return False  # `ema.*` matches all of a container
    if len(votes) > 1:
        out = next(leaf.name for leaf in members if not selection.saves(leaf.name))
        raise BlobError(
            f"{out} cannot be left out ({selection.why_not(out)}) without all of {unit}: give a pattern "
            f"for the whole, such as {unit!r}"
        )
    return votes.pop()


@dataclass(frozen=True)
class TensorForm:
    """Element type and shape of a tensor; `same_as` names the tensor of its blob that it is tied to."""

    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None

    def made(self) -> torch.Tensor:
        """A new, uninitialised tensor of this form."""
        return torch.empty(self.shape, dtype=torch_dtype(by_name(self.dtype)))


class FrozenTensors(nn.Module):
    """A tree of frozen parameters with given names, such as `encoder.0.weight`, to be filled by a load."""

    def __init__(self, forms: Mapping[str, TensorForm]) -> None:
        super().__init__()
        made: dict[str, nn.Parameter] = {}
        for name, form in forms.items():
            *parts, last = name.split(".")
            folder: nn.Module = self
            for part in parts:
                # The usual functions refuse names that modules have as attributes, such as `type`.
                folder = folder._modules.setdefault(part, nn.Module()) or folder
            known = made.get(form.same_as or "")
            made[name] = nn.Parameter(form.made(), requires_grad=False) if known is None else known
            folder._parameters[last] = made[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, as for a module's `load_state_dict`."""
        return {name: one.detach() for name, one in self.named_parameters(remove_duplicate=False)}


def forms_by_blob(manifest: Manifest, names: Iterable[str]) -> dict[str, dict[str, TensorForm]]:
    """Forms of stored tensors by blob and by the rest of their names; `""` is a blob that is a tensor."""
    found: dict[str, dict[str, TensorForm]] = {}
    first: dict[tuple[str, str], str] = {}
    for name in names:
        leaf = manifest.leaves[manifest.rows[name][0]]
        if leaf.kind == "tensor":
            inner = name[len(leaf.blob) :].removeprefix(".")
            source = first.setdefault((leaf.blob, leaf.alias_of or name), inner)
            same_as = None if source == inner else source
            found.setdefault(leaf.blob, {})[inner] = TensorForm(leaf.dtype or "", leaf.shape, same_as)
    return found


def made_of(forms: Mapping[str, TensorForm]) -> torch.Tensor | FrozenTensors:
    """An object that a blob of these forms can be loaded into."""
    if set(forms) == {""}:
        return forms[""].made()
    return FrozenTensors(forms)
