"""Leaves chosen by a selection. What belongs together is saved together or not at all.

Together belong a tensor of a wrapper class, a value or an object's state with the tensors inside; of an
optimizer the state of one parameter, and all the rest, without which no state is worth anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrelay.checkpoint.format.manifest.position import Selection, matches
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.state.flatten import leaves_of, parameter_names
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import Leaf, Role, Value
from torchrelay.checkpoint.state.optimizer_leaves import state_prefix
from torchrelay.errors import BlobError, UsageError


def select(leaves: Sequence[Leaf], objects: Mapping[str, Any], selection: Selection) -> list[Leaf]:
    """The leaves to save, in order; a name whose tensor went with another name stores it itself.

    Raises BlobError where patterns take a part of what belongs together, or leave nothing.
    """
    if selection.everything:
        return list(leaves)
    units = _units(leaves, objects)
    wanted = {unit for unit, members in units.items() if _wanted(unit, members, selection)}
    _check_optimizers(objects, units, wanted)
    chosen = [leaf for unit, members in units.items() if unit in wanted for leaf in members]
    if leaves and not chosen:
        known = nearest((selection.include or ("",))[0], [leaf.name for leaf in leaves])
        raise BlobError(f"{_told(selection)} leaves nothing to save: name what to save{known}")
    names = {leaf.name for leaf in chosen}
    return _with_own_content([leaf for leaf in leaves if leaf.name in names])


def left_out(objects: Mapping[str, Any], selection: Selection) -> frozenset[str]:
    """The leaves that these objects have now and a save would not take."""
    if selection.everything:
        return frozenset()
    leaves = leaves_of(objects)
    chosen = {leaf.name for leaf in select(leaves, objects, selection)}
    return frozenset(leaf.name for leaf in leaves if leaf.name not in chosen)


def used_patterns(names: Iterable[str], selection: Selection) -> list[str]:
    """The patterns that mean any of these names."""
    known = list(names)
    return [one for one in selection.patterns if any(matches(name, one) for name in known)]


def check_patterns_used(leaves: Sequence[Leaf], selection: Selection) -> None:
    """Raise UsageError for a pattern that means no leaf: most likely a misspelt name."""
    names = [leaf.name for leaf in leaves]
    used = used_patterns(names, selection)
    for pattern in selection.patterns:
        if pattern not in used:
            raise UsageError(f"no leaf matches {pattern!r}{nearest(pattern, names)}")


def check_remade(names: Iterable[str], registered: Collection[str], selection: Selection) -> None:
    """Refuse, by BlobError, to leave out what only `init` makes: a resumed run would lack it."""
    lost = [name for name in names if name not in registered and not selection.saves(name)]
    if lost:
        raise BlobError(
            f"{', '.join(map(repr, lost))} is left out of saves ({selection.why_not(lost[0])}), but "
            "only init makes it, and a resumed run skips init: register it as a blob, job.blobs(name=value), "
            "or give it scope='transient'"
        )


def _units(leaves: Sequence[Leaf], objects: Mapping[str, Any]) -> dict[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = {}
    kinds = {blob: kind_of(value) for blob, value in objects.items()}
    parameters = set(parameter_names(objects).values())
    root = ""
    for leaf in leaves:
        if kinds[leaf.blob] is Kind.OPTIMIZER:
            unit = _optimizer_unit(leaf, parameters)
        elif kinds[leaf.blob] is not Kind.MODULE:
            unit = leaf.blob
        else:
            inside = bool(root) and leaf.name.startswith(f"{root}.")
            unit = root if inside else leaf.name
            root = unit if inside or isinstance(leaf.content, Value) else ""
        found.setdefault(unit, []).append(leaf)
    return found


def _optimizer_unit(leaf: Leaf, parameters: Collection[str]) -> str:
    prefix = state_prefix(leaf.blob)
    if not leaf.name.startswith(prefix):
        return leaf.blob
    owner = leaf.name[len(prefix) :]
    while owner and owner not in parameters:
        owner = owner.rpartition(".")[0]
    return prefix + owner if owner else leaf.blob


def _wanted(unit: str, members: Sequence[Leaf], selection: Selection) -> bool:
    votes = {selection.saves(leaf.name) for leaf in members}
    inside = [leaf for leaf in members if leaf.name != unit or leaf.role is not Role.VALUE]
    if len(votes) > 1 and not any(selection.saves(leaf.name) for leaf in inside):
        return False  # `ema.*` means all of a container
    if len(votes) > 1:
        out = next(leaf.name for leaf in members if not selection.saves(leaf.name))
        raise BlobError(
            f"{out} cannot be left out ({selection.why_not(out)}) without all of {unit}: give a pattern that "
            f"means the whole, such as {unit!r}"
        )
    return votes.pop()


def _check_optimizers(
    objects: Mapping[str, Any], units: Mapping[str, Sequence[Leaf]], wanted: Collection[str]
) -> None:
    for unit in wanted:
        blob = units[unit][0].blob
        if blob in units and blob not in wanted and kind_of(objects[blob]) is Kind.OPTIMIZER:
            raise BlobError(
                f"the groups of {blob!r} are left out and {unit!r} is not: leave out all of {blob!r}"
            )


def _with_own_content(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Aliases of names that were left out: the first becomes the owner, and what others are the same as."""
    names = {leaf.name for leaf in leaves}
    owners: dict[str, str] = {}
    found = []
    for leaf in leaves:
        if leaf.alias_of is None or leaf.alias_of in names:
            found.append(leaf)
            continue
        owner = owners.setdefault(leaf.alias_of, leaf.name)
        alias = None if owner == leaf.name else owner
        found.append(replace(leaf, alias_of=alias))
    apart = [at for at, leaf in enumerate(found) if leaf.same_as is not None and leaf.same_as not in names]
    for at in apart:
        found[at] = replace(found[at], same_as=owners.get(found[at].same_as or ""))
    return found


def _told(selection: Selection) -> str:
    said = [f"exclude={list(selection.exclude)}"] if selection.exclude else []
    return " ".join([f"include={list(selection.include)}", *said] if selection.include else said)
