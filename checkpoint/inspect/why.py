"""Why an epoch is not used, and what a start now would choose. Reads; decides; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrelay.checkpoint.format.manifest.position import Entry, Position
from torchrelay.checkpoint.load.verify import Outcome, Proof, prove
from torchrelay.checkpoint.log.state import Happening, History, happened_to
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import NoProvableEpochError, StorageError
from torchrelay.records import dataclass

Json = Any


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
class Start:
    """What automatic resume would do now: `chosen` is None where it would not train from an epoch.

    `passed` are the newer positions that it would try first, each with what is wrong with it. `over`: the
    epochs were over at the chosen one, so that the same program would train no further.
    """

    chosen: Entry | None
    sentence: str
    exit_code: int
    passed: tuple[Proof, ...] = ()
    over: bool = False


def start_now(storage: Storage, view: LogView) -> Start:
    """What a start of the job would choose: the newest position of the current branch that is proved.

    Proves as a start does, up to the headers: a damaged block would show while it is loaded.
    """
    if view.empty:
        return Start(None, "a start now would begin anew: nothing is committed", 0)
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
                return Start(entry, text, 0, tuple(passed), over=True)
            text = f"a start now would resume from epoch {entry.position} of branch {entry.branch}{after}"
            return Start(entry, text, 0, tuple(passed))
        passed.append(proof)
        if proof.outcome is Outcome.UNKNOWN:
            text = (
                f"a start now would end with an error: epoch {entry.position} cannot be read "
                f"({proof.reason}); it is not passed over, because it may be whole"
            )
            return Start(None, text, StorageError.exit_code, tuple(passed))
    text = (
        "a start now would end with an error: no epoch of the current branch can be proved; restore files "
        "from a copy, or begin anew with resume='never'"
    )
    return Start(None, text, NoProvableEpochError.exit_code, tuple(passed))


def explain(
    view: LogView, history: History, start: Start, wanted: Position, branch: int | None = None
) -> Account:
    """Why a position is used or not, as the log stands and as `start_now` found it."""
    happened = tuple(happened_to(history, wanted, branch))
    entry = view.find(wanted.epoch, branch, step=wanted.step)
    if entry is None and branch is None:
        entry = next((one for one in reversed(view.entries) if one.position == wanted), None)
    if entry is None:
        return Account(wanted, branch, *_absent(history, happened), happened)
    return Account(wanted, entry.branch, *_standing(view, start, entry, happened), happened)


def newest_and_chosen(view: LogView, start: Start) -> Iterator[Entry]:
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


def _standing(view: LogView, start: Start, entry: Entry, happened: tuple[Happening, ...]) -> tuple[str, str]:
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


def _usable(start: Start, entry: Entry) -> tuple[str, str]:
    kind = "" if entry.position.boundary else "mid-epoch, for automatic resume only; "
    if start.chosen is None:
        return "not reached", f"{kind}a newer one stands before it"
    if start.chosen.key == entry.key:
        return "chosen", f"{kind}the newest that is proved, up to the headers"
    return "older", f"{kind}a start takes the newest, epoch {start.chosen.position}; ask for it by its number"


def _last(happened: tuple[Happening, ...], kind: str, otherwise: str) -> str:
    found = next((one for one in reversed(happened) if one.kind == kind), None)
    return otherwise if found is None else f"{found.text}, {found.when}"
