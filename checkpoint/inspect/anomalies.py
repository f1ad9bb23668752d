"""Find epochs with problems: the first bad one, jumps of a metric, NaN and Inf, and why one is not used.

A change from one epoch to the next is a jump if it is more than `factor` spreads from the median of the
changes before it (at most `WINDOW` of them, at least `LEAST`). The spread is their median absolute deviation,
scaled to a standard deviation. It is at least a hundredth of the level (the median size of the values in the
window), so that a smooth curve has no jumps by small variations. NaN and Inf are jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from torchrelay.checkpoint.format.dtypes import BLOCK, block_count
from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.inspect.contents import (
    CAN_BE_BAD,
    CHUNK_BYTES,
    Epoch,
    LeafPart,
    NodeLeaf,
    PartReader,
    parts,
)
from torchrelay.checkpoint.load.verify import Verification, VerificationStatus, verify_epoch
from torchrelay.checkpoint.log.state import Happening, History, happened_to
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import NoProvableEpochError, StorageError
from torchrelay.records import Json, dataclass


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int | None:
    """The lowest number below `count` that is bad, by bisection; None if the last is not bad.

    Asks at most ceil(log2(count)) + 1 times, each number once. The neighbour below the answer was asked, and
    was good. If a good one follows a bad one, the answer is a bad one after a good one, but maybe not the
    first.
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
    """Value number `at` is a jump: its change, the usual one, the spread; None for NaN or Inf."""

    at: int
    change: float | None = None
    usual: float | None = None
    spread: float | None = None


def first_jump(values: Sequence[float], factor: float = FACTOR) -> Jump | None:
    """The first jump of a row; until `LEAST` changes nothing is usual, so that only NaN and Inf are."""
    for at, value in enumerate(values):
        if not math.isfinite(value):
            return Jump(at)
        if at > LEAST:
            change, row = value - values[at - 1], values[max(0, at - 1 - WINDOW) : at]
            changes = [after - before for before, after in pairwise(row)]
            usual, level = median(changes), median(map(abs, row))
            deviation = median(abs(change - usual) for change in changes)
            spread = max(_TO_STANDARD_DEVIATION * deviation, _LEVEL * level)
            if abs(change - usual) > factor * spread:
                return Jump(at, change, usual, spread)
    return None


@dataclass(frozen=True)
class Account:
    """State of a position: `standing` is one word, `reason` a sentence, `happened` the log's history."""

    position: Position
    branch: int | None
    standing: str
    reason: str
    happened: tuple[Happening, ...] = ()

    def json(self) -> dict[str, Json]:
        """An object of `why --json`."""
        said = {**vars(self), "happened": [one.json() for one in self.happened]}
        del said["position"]
        return {"epoch": self.position.epoch, "step": self.position.step, **said}


@dataclass(frozen=True)
class ResumePreview:
    """What automatic resume would do now: `chosen` is None if it would not resume.

    `passed` are the newer positions that it would try first, each with its damage. `over`: the run was
    finished at the chosen one, so that the same program would train no further.
    """

    chosen: CommittedPosition | None
    sentence: str
    exit_code: int
    passed: tuple[Verification, ...] = ()
    over: bool = False


def start_now(storage: Storage, view: LogView) -> ResumePreview:
    """Predict what a launch would resume from: the newest verified position of the current branch.

    Verifies headers, as a launch does: a damaged block would show while it is loaded.
    """
    if view.empty:
        return ResumePreview(None, "the next launch would begin from scratch: nothing is committed", 0)
    passed: list[Verification] = []
    for entry in view.candidates():
        result = verify_epoch(storage, entry)
        if result.verified:
            after = f", after {len(passed)} newer that are damaged" if passed else ""
            if entry.position.boundary and result.check()[0].facts.over:
                text = (
                    f"the next launch would train nothing: the run finished at epoch {entry.position} of "
                    f"branch {entry.branch}{after}; with more epochs or patience it would resume there"
                )
                return ResumePreview(entry, text, 0, tuple(passed), over=True)
            text = f"the next launch would resume from epoch {entry.position} of branch {entry.branch}{after}"
            return ResumePreview(entry, text, 0, tuple(passed))
        passed.append(result)
        if result.outcome is VerificationStatus.UNKNOWN:
            text = (
                f"the next launch would end with an error: epoch {entry.position} cannot be read "
                f"({result.reason}); it is not skipped, because it may be intact"
            )
            return ResumePreview(None, text, StorageError.exit_code, tuple(passed))
    text = (
        "the next launch would end with an error: no epoch of the current branch can be verified; restore "
        "files from a copy"
    )
    return ResumePreview(None, text, NoProvableEpochError.exit_code, tuple(passed))


def explain(
    view: LogView, history: History, start: ResumePreview, wanted: Position, branch: int | None = None
) -> Account:
    """Explain why automatic resume would or would not use this checkpoint."""
    happened = tuple(happened_to(history, wanted, branch))
    entry = view.find(wanted.epoch, branch, step=wanted.step)
    if entry is None and branch is None:
        entry = next((one for one in reversed(view.entries) if one.position == wanted), None)
    if entry is None:
        return Account(wanted, branch, *_absent(history, happened), happened)
    return Account(wanted, entry.branch, *_standing(view, start, entry, happened), happened)


def newest_and_chosen(view: LogView, start: ResumePreview) -> Iterator[CommittedPosition]:
    """Positions to explain by default: from the newest to the chosen one."""
    for entry in reversed(view.line()):
        yield entry
        if start.chosen is not None and entry.key == start.chosen.key:
            return


def _absent(history: History, happened: tuple[Happening, ...]) -> tuple[str, str]:
    """Standing and reason of a position that is not in the log."""
    last = next((one for one in reversed(happened) if one.kind in ("retire", "commit")), None)
    if last is not None and "retired" in last.text:
        return "retired", f"{last.text}, {last.when}"
    if happened:
        return "gone", "it was committed, and the record that retired it is gone"
    if history.complete:
        return "unknown", "it was never committed"
    return "unknown", (
        f"it is not committed now, and records begin at slot {history.begins} only: older ones were "
        "deleted or are damaged"
    )


def _standing(
    view: LogView, start: ResumePreview, entry: CommittedPosition, happened: tuple[Happening, ...]
) -> tuple[str, str]:
    if not entry.healthy:
        return "quarantined", _last(happened, "quarantine", "the record with the reason was deleted")
    if entry.key not in {one.key for one in view.line()}:
        rewound = _last(happened, "rewind", f"it is not on branch {view.current.id}")
        return "abandoned", f"{rewound}; it loads as {entry.key} and is never chosen"
    if not entry.resumable:
        left = ", ".join(entry.groups) or "nothing"
        taken = _last(happened, "retire", "retention deleted a part of it")
        return "not resumable", f"{taken}; left: {left}. It can be loaded, but not resumed from"
    failed = next((one for one in start.passed if one.entry.key == entry.key), None)
    if failed is not None:
        return failed.outcome.value, failed.reason
    kind = "" if entry.position.boundary else "mid-epoch, for automatic resume only; "
    if start.chosen is None:
        return "not reached", f"{kind}a newer one comes before it"
    if start.chosen.key == entry.key:
        return "chosen", f"{kind}the newest one with verified headers"
    return "older", f"{kind}a start takes the newest, epoch {start.chosen.position}; give its number"


def _last(happened: tuple[Happening, ...], kind: str, otherwise: str) -> str:
    found = next((one for one in reversed(happened) if one.kind == kind), None)
    return otherwise if found is None else f"{found.text}, {found.when}"


@dataclass(frozen=True)
class BadLeaf:
    """A tensor with `nan` NaN and `inf` Inf; `first` is the index of the first in row-major order."""

    name: str
    blob: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    first: int

    @property
    def index(self) -> tuple[int, ...]:
        """The index of the first, one number per dimension."""
        found, rest = [], self.first
        for extent in reversed(self.shape):
            rest, at = divmod(rest, extent)
            found.append(at)
        return tuple(reversed(found))


class BadElementSearch:
    """Searches epochs of one run; blocks that were good are not read again. Needs numpy.

    With `nan_only` Inf is ignored, because masks contain some on purpose. `loads` counts the epochs.
    """

    def __init__(self, patterns: Sequence[str] = (), *, nan_only: bool = False) -> None:
        from torchrelay.checkpoint.inspect import statistics

        self.loads = 0
        self._statistics = statistics
        self._patterns, self._nan_only = patterns, nan_only
        self._good: set[tuple[str, bytes]] = set()

    def bad_leaves(self, epoch: Epoch) -> list[BadLeaf]:
        """All leaves with a NaN or Inf, except deleted ones, in the manifest's order; raises DamagedError."""
        self.loads += 1
        there = (item for item in epoch.chosen(self._patterns).values() if not epoch.gone(item))
        able = (item for item in there if item.tensor and item.leaf.dtype in CAN_BE_BAD)
        reader = PartReader(epoch)
        return [bad for item in able if (bad := self._look(reader, item)) is not None]

    def _look(self, reader: PartReader, item: NodeLeaf) -> BadLeaf | None:
        leaf, dtype = item.leaf, str(item.leaf.dtype)
        nan = inf = 0
        firsts: list[int] = []
        for part in parts(reader.epoch, item):
            for start, stop in self._unknown(part, dtype):
                first: int | None = None
                at = start // part.item_bytes
                data = reader.filled(part, start, stop)
                for values in self._statistics.steps(data, part.item_bytes, dtype):
                    more_nan, more_inf, place = self._statistics.bad_in(values, nan_only=self._nan_only)
                    nan, inf = nan + more_nan, inf + more_inf
                    first = at + place if first is None and place is not None else first
                    at += values.size
                if first is not None:
                    firsts.append(part.index_of(first))
                    continue
                for block in range(start // BLOCK, block_count(stop)):
                    self._good.add((dtype, part.digest(block)))
        if not firsts:
            return None
        return BadLeaf(item.name, leaf.blob, dtype, leaf.shape, nan, inf, min(firsts))

    def _unknown(self, part: LeafPart, dtype: str) -> Iterator[tuple[int, int]]:
        """Byte ranges of blocks that are not known to be good, at most a chunk at a time."""
        start = stop = 0
        for block in range(block_count(part.nbytes)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, part.nbytes)
            known = (dtype, part.digest(block)) in self._good
            if start < stop and (known or last - start > CHUNK_BYTES):
                yield start, stop
                start = stop = first
            start, stop = (last, last) if known else (start, last)
        if start < stop:
            yield start, stop
