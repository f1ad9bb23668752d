"""Which epoch a reader means: pure, over a log as it was read."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.records import dataclass

_TEXT = re.compile(r"(?:epoch=)?(0|[1-9][0-9]{0,7})(?:,branch=(0|[1-9][0-9]{0,8}))?")
_WITH_STEP = re.compile(r"[0-9]+\+[0-9]+.*")
WORDS = ("last", "best")
"""What stands for an epoch instead of its number; `opening.candidates` says what each means."""
_FORMS = 'a number from 0 on, "last", "best", "tag=NAME", or "7,branch=0"'
_TAG = "tag="
_RANGES = 6  # so many stretches of numbers are told, of more only what is near


@dataclass(frozen=True)
class Wanted:
    """An epoch by number or by its tag, or `last`, or `best`; on a branch, or on the current one."""

    epoch: int | None
    word: str = ""
    branch: int | None = None
    tag: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether one epoch was named, which is then never replaced by another."""
        return self.epoch is not None or self.tag is not None


def wanted(epoch: Any, branch: int | None = None) -> Wanted:
    """Understand what a user wrote; raises UsageError for anything that names no whole epoch."""
    if branch is not None and (isinstance(branch, bool) or not isinstance(branch, int) or branch < 0):
        raise UsageError(f"branch={branch!r} is no branch: branches are numbered from 0")
    if isinstance(epoch, str):
        return _from_text(epoch.strip(), branch)
    try:
        number = operator.index(epoch)
    except TypeError:
        raise UsageError(f"epoch={epoch!r} is no epoch: give {_FORMS}") from None
    if isinstance(epoch, bool) or number < 0:
        raise UsageError(f"epoch={epoch!r} is no epoch: give {_FORMS}")
    return Wanted(number, "", branch)


def _from_text(text: str, branch: int | None) -> Wanted:
    if text in WORDS:
        return Wanted(None, text, branch)
    if text.startswith(_TAG) and text != _TAG:
        if branch is not None:
            raise UsageError(f"epoch={text!r} and branch={branch}: a tag names one epoch, drop the branch")
        return Wanted(None, "", None, text.removeprefix(_TAG))
    if _WITH_STEP.fullmatch(text):
        raise UsageError(
            f"{text!r} is a position inside an epoch, which only automatic resume uses: ask for a whole epoch"
        )
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(f"epoch={text!r} is no epoch: give {_FORMS}")
    if match[2] is not None and branch not in (None, int(match[2])):
        raise UsageError(f"epoch={text!r} and branch={branch} contradict each other: give one of them")
    return Wanted(int(match[1]), "", branch if match[2] is None else int(match[2]))


def whole_epochs(view: LogView, branch: int | None) -> list[Entry]:
    """Whole epochs seen from a branch, newest first; raises UsageError for an unknown branch."""
    known = [one.id for one in view.branches]
    if branch is not None and branch not in known:
        raise UsageError(f"there is no branch {branch}; the branches are: {', '.join(map(str, known))}")
    return [entry for entry in reversed(view.line(branch)) if entry.position.boundary]


def named_entry(view: LogView, wish: Wanted, place: str) -> Entry:
    """The entry of an explicit epoch or tag; raises UnknownEpochError saying what there is at `place`."""
    if wish.tag is not None:
        return _tagged(view, wish.tag, place)
    line = whole_epochs(view, wish.branch)
    found = next((entry for entry in line if entry.position.epoch == wish.epoch), None)
    if found is not None:
        return found
    of_branch = "" if wish.branch is None else f" of branch {wish.branch}"
    there_is = _there_is(view, line, wish.epoch)
    raise UnknownEpochError(f"there is no epoch {wish.epoch}{of_branch} in {place}: {there_is}")


def _tagged(view: LogView, name: str, place: str) -> Entry:
    found = view.tagged(name)
    if found is None:
        known = [mark.name for mark in view.marks if mark.kind == "tag"]
        raise UnknownEpochError(f"there is no tag {name!r} in {place}{nearest(name, known)}")
    return found


def best_first(line: Sequence[Entry], metrics: Mapping[str, float], mode: str) -> list[Entry]:
    """Entries whose try has a value, best first; of equal ones the earlier. Only what is finite is one."""
    sign = -1.0 if mode == "max" else 1.0
    scored = [entry for entry in line if math.isfinite(metrics.get(entry.try_name, math.nan))]
    return sorted(scored, key=lambda entry: (sign * metrics[entry.try_name], entry.position))


def _there_is(view: LogView, line: Sequence[Entry], wish: int | None) -> str:
    parts = [f"there are epochs {_near(line, wish)}"] if line else []
    seen = {entry.key for entry in line}
    others: dict[int, list[Entry]] = {}
    for entry in view.entries:
        if entry.key not in seen and entry.position.boundary:
            others.setdefault(entry.branch, []).append(entry)
    for branch, entries in sorted(others.items()):
        first = entries[0].position.epoch
        parts.append(f"on branch {branch} also {_near(entries, wish)} (write {first},branch={branch})")
    return "; ".join(parts) or "nothing is committed yet"


def _near(entries: Sequence[Entry], wish: int | None) -> str:
    """Which epochs there are; of many stretches of them what lies next to the one that was meant."""
    epochs = sorted(entry.position.epoch for entry in entries)
    told = ranges(epochs)
    if wish is None or told.count(",") < _RANGES:
        return told
    close = [*[one for one in epochs if one < wish][-1:], *[one for one in epochs if one > wish][:1]]
    some = " and ".join(map(str, close))
    return f"{epochs[0]} to {epochs[-1]} with gaps ({len(epochs)}), next to {wish} there is {some}"


def ranges(numbers: Sequence[int]) -> str:
    """`0 to 4, 6` for people."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
