"""Which epochs `infer` goes over: one, a list, a range, the latest, the best, all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from torchrelay.jobs.config.forms import EXPRESSION, At, Form, Json
from torchrelay.records import dataclass

Kind = Literal["latest", "best", "all", "numbers"]
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})\.\.(0|[1-9][0-9]{0,5})?")
_WORDS: dict[str, Kind] = {"latest": "latest", "last": "latest", "best": "best", "all": "all"}


@dataclass(frozen=True)
class EpochChoice:
    """`kind`, and for `numbers` either the `listed` epochs, in order, or those from `first` to `last`.

    An epoch's number is 0 after init and k after k epochs. `last` belongs to the range; None: it has no end.
    """

    kind: Kind
    listed: tuple[int, ...] = ()
    first: int = 0
    last: int | None = None

    def chosen(self, available: Iterable[int], best: int | None = None) -> list[int]:
        """Of the epochs that are there those which are meant, in order of their numbers.

        `best` is the best one, None where none is known. What was asked for by number and is not there is
        told by `absent`.
        """
        there = sorted(set(available))
        if self.kind in ("all", "latest"):
            return there if self.kind == "all" else there[-1:]
        if self.kind == "best":
            return [one for one in there if one == best]
        if self.listed:
            return [one for one in self.listed if one in set(there)]
        return [one for one in there if self.first <= one and (self.last is None or one <= self.last)]

    def absent(self, available: Iterable[int]) -> list[int]:
        """The epochs that were asked for by number, or within a range that has an end, and are not there."""
        there = set(available)
        if self.kind != "numbers":
            return []
        wanted = self.listed or (() if self.last is None else range(self.first, self.last + 1))
        return [one for one in wanted if one not in there]


@dataclass(frozen=True)
class EpochsChosen(Form):
    """The form of `epoch:`."""

    word = "an epoch, a list of epochs, a range such as `1..5` or `3..`, `latest`, `best` or `all`"

    def take(self, value: Any, at: At) -> Any:
        """An EpochChoice."""
        if type(value) is int and value >= 0:
            return EpochChoice("numbers", (value,))
        if isinstance(value, str) and value in _WORDS:
            return EpochChoice(_WORDS[value])
        if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
            first, last = int(found[1]), int(found[2]) if found[2] else None
            if last is not None and last < first:
                return at.wrong(f"the range {value} is empty: write {last}..{first}")
            return EpochChoice("numbers", first=first, last=last)
        if isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value):
            return EpochChoice("numbers", tuple(sorted(set(value))))
        return at.expected(self, value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        whole: Json = {"type": "integer", "minimum": 0}
        ranges: Json = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)\.\.(0|[1-9][0-9]*)?$"}
        return {
            "anyOf": [
                whole,
                {"type": "array", "items": whole, "minItems": 1},
                {"enum": list(_WORDS)},
                ranges,
                EXPRESSION,
            ]
        }
