"""Everything in which the given objects and a checkpoint differ, told at once, with what would let it pass.

One remedy follows the differences, the likeliest: other names (`rename`), another element type (`dtype`),
else what is to stay as it is (`exclude`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product

import torch

from torchrelay.checkpoint.format.position import LEFT_OUT
from torchrelay.checkpoint.state.leaf import LeafSpec
from torchrelay.errors import BlobError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.records import dataclass

_NEAREST_FOR = 20
"""Missing leaves for which the nearest stored names are looked up; the search is quadratic."""
_RULES = 4
"""Renames that are proposed at once."""


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """What a restoration may make of differences, and what messages say of them."""

    strict: bool = True
    """Whether leaves that are missing or unexpected are refused."""
    kept: Collection[str] = ()
    """Leaves that stay as the program made them."""
    offered: Collection[str] = ()
    """Leaves that may be taken by an object, and need not be."""
    untouched: Collection[str] = ()
    """Objects that stay as they are, too, and only name parameters."""
    may_lack: Collection[str] = ()
    """Blobs of which the checkpoint may lack leaves, which stay."""
    in_place: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Objects that are taken care of: leaves of their names are read into them by others."""
    late_buffers: bool = False
    """Whether, without `strict` too, buffers are made that a module has not made yet, where all else fits."""
    why_absent: Callable[[str], str] = lambda name: ""
    """Why the checkpoint lacks a leaf, where that is known."""
    same_content: Callable[[str, str], bool] = lambda one, other: False
    """Whether two stored tensors of one form have the same bytes."""
    cast: Callable[[str], torch.dtype | None] | None = None
    """To which floating-point type a leaf may be converted; None where there is no argument `dtype`."""
    exclude: str | None = "exclude"
    """What the argument is called by which leaves stay as they are; None where there is none."""
    excluded: Sequence[str] = ()
    """What that argument was given."""
    within: str = ""
    """The blob or part that names of the argument `rename` are relative to."""


USUAL = RestoreOptions()


@dataclass
class Mismatches:
    """What differs. Each text of `unlike` begins with the name of a leaf or blob."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    types: dict[str, torch.dtype] = field(default_factory=dict)
    """Those of `unlike` that differ in the floating-point type alone, and the type that the object has."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of the tensors that are missing."""
    members: dict[str, str] = field(default_factory=dict)
    """Texts of `unlike` about a parameter that a stored group of an optimizer lacks, and its name."""
    strangers: list[str] = field(default_factory=list)
    """Parameters that stored groups have, and that no optimizer has here."""

    def lack(self, missing: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Note names of the objects that are not stored, with the tensor where it is one."""
        self.missing[:0] = [name for name, _ in missing]
        self.shapes = {name: live.shape for name, live in missing if live is not None}

    def differ(self, *, strict: bool, kept: Collection[str]) -> bool:
        """Whether `check` would raise."""
        missing = strict and not all(name in kept for name in self.missing)
        return bool(self.unlike or self.refused or missing or (strict and self.unexpected))

    def check(self, stored: Mapping[str, LeafSpec], options: RestoreOptions) -> None:
        """Raise one BlobError that lists all differences; without `strict` only the unlike ones count."""
        why_absent = options.why_absent
        lines = [f"cannot be loaded into: {text}" for text in self.refused]
        lines += [f"differs: {text}" for text in self.unlike]
        missing: list[str] = []
        reasons: dict[str, str] = {}
        if options.strict:
            missing = [name for name in self.missing if name not in options.kept]
            near = missing[:_NEAREST_FOR]
            reasons = {name: f" ({why})" for name in missing if (why := why_absent(name))}
            hints = {**{name: _nearest(name, stored) for name in near if name not in reasons}, **reasons}
            lines += [f"not in the checkpoint: {name}{hints.get(name, '')}" for name in missing]
            whose = {name: f" ({why})" for name in self.unexpected if (why := why_absent(name))}
            lines += [f"only in the checkpoint: {name}{whose.get(name, '')}" for name in self.unexpected]
            reasons.update(whose)
        if not lines:
            return
        lines = [line.replace(" exclude=[", f" {options.exclude or 'exclude'}=[") for line in lines]
        if len(lines) == len(self.refused):
            raise BlobError("nothing was loaded or changed:\n  " + "\n  ".join(lines))
        remedy = (
            "A run resumes with the include and exclude of the save"
            if any(LEFT_OUT in why for why in reasons.values())
            else ""  # they say themselves what helps
            if reasons
            else self._remedy(stored, missing, options)
        )
        raise BlobError(
            "the checkpoint does not fit the given objects; nothing was changed:\n  "
            + "\n  ".join(lines)
            + (f"\n{remedy}" if remedy else "")
        )

    def _remedy(self, stored: Mapping[str, LeafSpec], missing: Sequence[str], options: RestoreOptions) -> str:
        if options.exclude is None:
            return "Build the objects as they were when it was saved, or ask for other names"
        unexpected = self.unexpected if options.strict else []

        def fits(old: str, new: str) -> bool:
            there, here = stored.get(old), self.shapes.get(new)
            return there is None or here is None or there.shape == here

        lacking = list(dict.fromkeys([*missing, *self.members.values()]))
        spare = list(dict.fromkeys([*unexpected, *self.strangers]))
        named_otherwise = all(text in self.members for text in self.unlike)
        if named_otherwise and (rename := _likely_rename(lacking, spare, options.within, fits)):
            return f"If these are the same leaves under other names: rename={rename!r}"
        different = [text.split(" ", 1)[0] for text in self.unlike]
        types = {self.types.get(name) for name in (*different, *missing, *unexpected)}
        if options.cast is not None and len(types) == 1 and (only := types.pop()) is not None:
            return f"To convert them to the type that they have here: dtype={only}"
        names = list(dict.fromkeys([*options.excluded, *_covering([*different, *missing, *unexpected])]))
        return f"To leave out what is to stay as the program made it: {options.exclude}={names!r}"


def _likely_rename(
    missing: Sequence[str], unexpected: Sequence[str], within: str, fits: Callable[[str, str], bool]
) -> dict[str, str] | None:
    """The few rules that turn the most stored names into missing ones, if that is half of them at least.

    Names in them are relative to the blob or part `within`, where there is one.
    """
    rules: dict[str, str] = {}
    left, spare = list(missing), list(unexpected)
    for _ in range(_RULES):
        rule, hit = _rule(left, spare, within, fits)
        if len(hit) < 2 and 2 * len(hit) < len(missing):
            break
        rules.update(rule)
        left = [name for name in left if name not in hit.values()]
        spare = [name for name in spare if name not in hit]
        if not left:
            break
    if not rules or 2 * len(left) > len(missing):
        return None
    return dict(sorted(rules.items(), key=lambda rule: -len(rule[0])))  # the first that fits is applied


def _rule(
    missing: Sequence[str], unexpected: Sequence[str], within: str, fits: Callable[[str, str], bool]
) -> tuple[dict[str, str], dict[str, str]]:
    """The rule that makes the most of them alike, and these; none by which one goes where it does not fit."""
    wanted = set(missing)
    best: dict[str, str] = {}
    most: dict[str, str] = {}
    for name, old in product(missing[:_RULES], unexpected[:_NEAREST_FOR]):
        for here, there in _beginnings(name, old):
            if within in (here, there):
                continue
            new = {one: _renamed(one, there, here) for one in unexpected}
            hit = {one: name for one, name in new.items() if name in wanted}
            if len(hit) > len(most) and all(fits(one, name) for one, name in hit.items()):
                best = {there.removeprefix(f"{within}."): here.removeprefix(f"{within}.")}
                most = hit
    return best, most


def _beginnings(one: str, other: str) -> Iterator[tuple[str, str]]:
    """What two names begin with, before ends that are alike, the longest end first; nothing without any."""
    ones, others = one.split("."), other.split(".")
    common = 0
    while common < min(len(ones), len(others)) and ones[-1 - common] == others[-1 - common]:
        common += 1
    for alike in range(min(common, len(ones) - 1, len(others) - 1), 0, -1):
        yield ".".join(ones[:-alike]), ".".join(others[:-alike])


def _renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def _covering(names: Sequence[str]) -> list[str]:
    """The names, or, of many, the parts below a blob that they lie in, or, of many, their beginnings."""
    found = list(dict.fromkeys(names))
    for longest, depth in ((3, 1), (12, 0)):
        if len(found) > longest:
            found = list(dict.fromkeys(next(iter(dotted_prefixes(name)[depth:]), name) for name in found))
    return found


def _nearest(name: str, stored: Mapping[str, LeafSpec]) -> str:
    near = difflib.get_close_matches(name, stored, n=2)
    return f" (there is {', '.join(near)})" if near else ""
