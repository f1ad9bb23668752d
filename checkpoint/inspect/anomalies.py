"""Epochs that are not as they should be: the first bad one, jumps of a metric, and why one is not used.

A change from one epoch to the next is a jump if it is further than `factor` spreads from the median of
the changes before it (at most `WINDOW` of them, at least `LEAST`). The spread is their median absolute
deviation, scaled to a standard deviation, but no less than a hundredth of the level (the median size of
the values in the window): a curve that is smooth to the last digit does not make a jump of a wiggle.
NaN and Inf are jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.load.verify import Proof, VerificationStatus, prove
from torchrelay.checkpoint.log.state import Happening, History, happened_to
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import NoProvableEpochError, StorageError
from torchrelay.records import Json, dataclass


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int | None:
    """The lowest number below `count` that is bad, None if the last is not.

    Asks at most ceil(log2(count)) + 1 times, each number once: the last, then halves. The neighbour below the
    answer was always asked, and was good. Where a good one follows a bad one, an answer is still a bad one
    behind a good one, but perhaps not the first; where the last is good, it is None.
    """
    if count < 1 or not is_bad(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(middle):
            high = middle
        else:
            low = middle + 1
    return high


WINDOW = 16
LEAST = 4
FACTOR = 8.0
_TO_STANDARD_DEVIATION = 1.4826
_LEVEL = 0.01


@dataclass(frozen=True)
class Jump:
    """Value number `at` is a jump; the change from the one before, the usual change, and the spread.

    The three are None where the value is NaN or Inf.
    """

    at: int
    change: float | None = None
    usual: float | None = None
    spread: float | None = None


def first_jump(values: Sequence[float], factor: float = FACTOR) -> Jump | None:
    """The first jump of a row of values; None without one.

    The first `LEAST` changes are never a jump unless they lead to NaN or Inf: nothing says what is usual.
    """
    for at, value in enumerate(values):
        if not math.isfinite(value):
            return Jump(at)
        if at > LEAST:
            change = value - values[at - 1]
            usual, spread = _usual(values[max(0, at - 1 - WINDOW) : at])
            if abs(change - usual) > factor * spread:
                return Jump(at, change, usual, spread)
    return None


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """The median change and the spread of changes of a row."""
    changes = [after - before for before, after in pairwise(values)]
    usual = median(changes)
    deviation = median(abs(change - usual) for change in changes)
    level = median(abs(value) for value in values)
    return usual, max(_TO_STANDARD_DEVIATION * deviation, _LEVEL * level)


@dataclass(frozen=True)
class Account:
    """How a position stands: `standing` is one word, `reason` a sentence, `happened` what the log says."""

    position: Position
    branch: int | None
    standing: str
    reason: str
    happened: tuple[Happening, ...] = ()

    def json(self) -> dict[str, Json]:
        """As an object of `why --json`."""
        return {
            "epoch": self.position.epoch,
            "step": self.position.step,
            "branch": self.branch,
            "standing": self.standing,
            "reason": self.reason,
            "happened": [one.json() for one in self.happened],
        }


@dataclass(frozen=True)
class ResumePreview:
    """What automatic resume would do now: `chosen` is None where it would not train from an epoch.

    `passed` are the newer positions that it would try first, each with what is wrong with it. `over`: the
    epochs were over at the chosen one, so that the same program would train no further.
    """

    chosen: CommittedPosition | None
    sentence: str
    exit_code: int
    passed: tuple[Proof, ...] = ()
    over: bool = False


def start_now(storage: Storage, view: LogView) -> ResumePreview:
    """What a start of the job would choose: the newest position of the current branch that is proved.

    Proves as a start does, up to the headers: a damaged block would show while it is loaded.
    """
    if view.empty:
        return ResumePreview(None, "a start now would begin anew: nothing is committed", 0)
    passed: list[Proof] = []
    for entry in view.candidates():
        proof = prove(storage, entry)
        if proof.proved:
            after = f", after {len(passed)} newer that are damaged" if passed else ""
            if entry.position.boundary and proof.check()[0].facts.over:
                text = (
                    f"the run was over at epoch {entry.position} of branch {entry.branch}{after}: a start "
                    "now would resume nowhere; with more epochs or patience it would resume there"
                )
                return ResumePreview(entry, text, 0, tuple(passed), over=True)
            text = f"a start now would resume from epoch {entry.position} of branch {entry.branch}{after}"
            return ResumePreview(entry, text, 0, tuple(passed))
        passed.append(proof)
        if proof.outcome is VerificationStatus.UNKNOWN:
            text = (
                f"a start now would end with an error: epoch {entry.position} cannot be read "
                f"({proof.reason}); it is not passed over, because it may be whole"
            )
            return ResumePreview(None, text, StorageError.exit_code, tuple(passed))
    text = (
        "a start now would end with an error: no epoch of the current branch can be proved; restore files "
        "from a copy, or begin anew with resume='never'"
    )
    return ResumePreview(None, text, NoProvableEpochError.exit_code, tuple(passed))


def explain(
    view: LogView, history: History, start: ResumePreview, wanted: Position, branch: int | None = None
) -> Account:
    """Why a position is used or not, as the log stands and as `start_now` found it."""
    happened = tuple(happened_to(history, wanted, branch))
    entry = view.find(wanted.epoch, branch, step=wanted.step)
    if entry is None and branch is None:
        entry = next((one for one in reversed(view.entries) if one.position == wanted), None)
    if entry is None:
        return Account(wanted, branch, *_absent(history, happened), happened)
    return Account(wanted, entry.branch, *_standing(view, start, entry, happened), happened)


def newest_and_chosen(view: LogView, start: ResumePreview) -> Iterator[CommittedPosition]:
    """The positions to explain where none was named: the newest one and all down to the chosen one."""
    for entry in reversed(view.line()):
        yield entry
        if start.chosen is not None and entry.key == start.chosen.key:
            return


def _absent(history: History, happened: tuple[Happening, ...]) -> tuple[str, str]:
    last = next((one for one in reversed(happened) if one.kind in ("retire", "commit")), None)
    if last is not None and "retired" in last.text:
        return "retired", f"{last.text}, {last.when}"
    if happened:
        return "gone", "it was committed, and the record that retired it is not there any more"
    if history.complete:
        return "unknown", "it was never committed"
    return "unknown", (
        f"it is not committed now, and records go back to slot {history.begins} only: older ones were "
        "thinned away or are damaged"
    )


def _standing(
    view: LogView, start: ResumePreview, entry: CommittedPosition, happened: tuple[Happening, ...]
) -> tuple[str, str]:
    if not entry.healthy:
        return "quarantined", _last(happened, "quarantine", "the record that said why was thinned away")
    if entry.key not in {one.key for one in view.line()}:
        rewound = _last(happened, "rewind", f"branch {view.current.id} does not see it")
        return "abandoned", f"{rewound}; it loads as {entry.key} and is never chosen"
    if not entry.resumable:
        left = ", ".join(entry.groups) or "nothing"
        taken = _last(happened, "retire", "retention took a part of it")
        return "not resumable", f"{taken}; left: {left}. It loads, and a run cannot go on from it"
    failed = next((one for one in start.passed if one.entry.key == entry.key), None)
    if failed is not None:
        return failed.outcome.value, failed.reason
    return _usable(start, entry)


def _usable(start: ResumePreview, entry: CommittedPosition) -> tuple[str, str]:
    kind = "" if entry.position.boundary else "mid-epoch, for automatic resume only; "
    if start.chosen is None:
        return "not reached", f"{kind}a newer one stands before it"
    if start.chosen.key == entry.key:
        return "chosen", f"{kind}the newest that is proved, up to the headers"
    return "older", f"{kind}a start takes the newest, epoch {start.chosen.position}; ask for it by its number"


def _last(happened: tuple[Happening, ...], kind: str, otherwise: str) -> str:
    found = next((one for one in reversed(happened) if one.kind == kind), None)
    return otherwise if found is None else f"{found.text}, {found.when}"
