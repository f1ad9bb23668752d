"""Report all differences between the given objects and a checkpoint in one error, with one remedy.

The remedy is the likeliest one: other names (`rename`), another element type (`dtype`), else leaves to keep
unchanged (`exclude`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from itertools import product, takewhile

import torch

from torchrelay.checkpoint.format.position import LEFT_OUT
from torchrelay.checkpoint.state.leaf import LeafSpec
from torchrelay.errors import BlobError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.records import dataclass

_NEAREST_FOR = 20
"""Maximum of missing leaves for which similar stored names are searched; the search is quadratic."""
_RULES = 4
"""Maximum of renames that are proposed at once."""


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """How a restoration treats differences, and details for messages."""

    strict: bool = True
    """Whether missing or unexpected leaves raise."""
    kept: Collection[str] = ()
    """Leaves that keep the program's value."""
    offered: Collection[str] = ()
    """Leaves that an object may take or not."""
    untouched: Collection[str] = ()
    """Objects that keep their content and only name parameters."""
    may_lack: Collection[str] = ()
    """Blobs whose leaves the checkpoint may lack; these keep their value."""
    in_place: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Objects that others load: leaves of their names are read by them."""
    late_buffers: bool = False
    """Whether buffers that a module has not created yet are made without `strict` too, if all else fits."""
    why_absent: Callable[[str], str] = lambda name: ""
    """Why the checkpoint lacks a leaf, if known."""
    same_content: Callable[[str, str], bool] = lambda one, other: False
    """Whether two stored tensors of one form have the same bytes."""
    cast: Callable[[str], torch.dtype | None] | None = None
    """The floating-point type that a leaf may be converted to; None without an argument `dtype`."""
    exclude: str | None = "exclude"
    """Name of the argument that keeps leaves unchanged; None without one."""
    excluded: Sequence[str] = ()
    """Value of that argument."""
    within: str = ""
    """The blob or part that names in `rename` are relative to."""


USUAL = RestoreOptions()


@dataclass
class Mismatches:
    """Collected differences. Each text of `unlike` begins with the name of a leaf or blob."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    types: dict[str, torch.dtype] = field(default_factory=dict)
    """Those of `unlike` that differ in the floating-point type only, and the type that the object has."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of the tensors that are missing."""
    members: dict[str, str] = field(default_factory=dict)
    """Texts of `unlike` about a parameter that a stored group of an optimizer lacks, and its name."""
    strangers: list[str] = field(default_factory=list)
    """Parameters of stored groups that no optimizer has here."""

    def lack(self, missing: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Note names of the objects that are not stored, with their tensors."""
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

            reasons = {name: f" ({why})" for name in missing if (why := why_absent(name))}
            hints = dict(reasons)
            for name in missing[:_NEAREST_FOR]:
                if name not in reasons and (alike := difflib.get_close_matches(name, stored, n=2)):
                    hints[name] = f" (similar: {', '.join(alike)})"
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
            else ""  # these texts contain their remedy
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
            return "Build the objects as they were when it was saved"
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
        found = list(dict.fromkeys([*different, *missing, *unexpected]))
        for longest, depth in ((3, 1), (12, 0)):  # if there are many, parts below a blob, or blobs
            if len(found) > longest:
                found = list(dict.fromkeys(next(iter(dotted_prefixes(name)[depth:]), name) for name in found))
        names = list(dict.fromkeys([*options.excluded, *found]))
        return f"To keep these as the program made them: {options.exclude}={names!r}"


def _likely_rename(
    missing: Sequence[str], unexpected: Sequence[str], within: str, fits: Callable[[str, str], bool]
) -> dict[str, str] | None:
    """The few rules, relative to `within`, that find most missing names; None unless at least half."""
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
    return dict(sorted(rules.items(), key=lambda rule: -len(rule[0])))  # the first match is applied


def _rule(
    missing: Sequence[str], unexpected: Sequence[str], within: str, fits: Callable[[str, str], bool]
) -> tuple[dict[str, str], dict[str, str]]:
    """The rule that matches the most names, and these names; empty if it maps one to a wrong place."""
    wanted = set(missing)
    best: dict[str, str] = {}
    most: dict[str, str] = {}
    for name, old in product(missing[:_RULES], unexpected[:_NEAREST_FOR]):
        ones, others = name.split("."), old.split(".")
        pairs = zip(reversed(ones), reversed(others), strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for alike in range(min(common, len(ones) - 1, len(others) - 1), 0, -1):  # the longest ending first
            here, there = ".".join(ones[:-alike]), ".".join(others[:-alike])
            if within in (here, there):
                continue
            below = [one for one in unexpected if one == there or one.startswith(f"{there}.")]
            new = {one: here + one[len(there) :] for one in below}
            hit = {one: name for one, name in new.items() if name in wanted}
            if len(hit) > len(most) and all(fits(one, name) for one, name in hit.items()):
                best = {there.removeprefix(f"{within}."): here.removeprefix(f"{within}.")}
                most = hit
    return best, most
