"""Which leaves a save takes, by patterns: what a user asked for, and what an epoch remembers of it."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.checkpoint.wildcards import matches, matches_any
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Patterns = str | Sequence[str] | None


@dataclass(frozen=True)
class Selection:
    """Saved is what a pattern of `include` means (None: everything) and no pattern of `exclude`."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether nothing was asked for."""
        return self.include is None and not self.exclude

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns."""
        return (*(self.include or ()), *self.exclude)

    def saves(self, name: str) -> bool:
        """Whether a leaf of this name is saved."""
        return not self.why_not(name)

    def why_absent(self, name: str) -> str:
        """What a refusal says of a leaf that the save left out; empty for one that it would have saved."""
        why = self.why_not(name)
        return f"{LEFT_OUT}: {why}" if why else ""

    def why_not(self, name: str) -> str:
        """Why a leaf of this name is not saved, for people; empty if it is."""
        for pattern in self.exclude:
            if matches(name, pattern):
                return f"excluded by {pattern!r}"
        if self.include is not None and not matches_any(name, self.include):
            return f"not among include={list(self.include)}"
        return ""


LEFT_OUT = "the save left it out"
EVERYTHING = Selection()


def selection_of(include: Patterns, exclude: Patterns) -> Selection:
    """What arguments `include` and `exclude` ask for; raises UsageError for what are no patterns."""
    found = None if include is None else _checked(include, "include")
    if found == ():
        raise UsageError("include=[] would save nothing: leave it out, or name what to save")
    return Selection(found, () if exclude is None else _checked(exclude, "exclude"))


def _checked(given: object, what: str) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and one for one in found):
        raise UsageError(f'{what} is {given!r:.80}; give patterns of leaf names, such as ["debug.*"]')
    return tuple(found)
