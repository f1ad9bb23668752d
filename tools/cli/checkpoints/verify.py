"""`torchrelay ckpt verify|why`: verify every byte of epochs, and explain why one is not used.

`--quarantine` records damaged epochs in the log, so that no launch tries them again. `--replay` instead
repeats a recorded call on the model rebuilt from the run's archives.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.inspect.anomalies import (
    Account,
    ResumePreview,
    explain,
    newest_and_chosen,
    start_now,
)
from torchrelay.checkpoint.load.verify import Level, Verification, VerificationStatus, verify_epoch
from torchrelay.checkpoint.log.state import History, read_history
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import check_exclusion
from torchrelay.errors import NoProvableEpochError, StorageError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output, arg, flag, verb
from torchrelay.runners.remote_runs.resolve import (
    LAST,
    RunLocation,
    Selector,
    find_entry,
    locate,
    locate_run,
    parse_selector,
)
from torchrelay.tools.cli.arguments import SINGLE_WRITER, run_epoch
from torchrelay.tools.cli.runs.ls import current_keys, entry_json, states_of

NOT_VERIFIED = StorageError.exit_code
NONE_LEFT = NoProvableEpochError.exit_code


def _replay(path: str, output: Output) -> int:
    """Repeat the recorded calls; returns 0 if all gave the same bits."""
    from torchrelay.runners.artifacts.rebuild import replay

    selector = parse_selector(path)
    run, wish = locate_run(selector.path).path, None
    if selector.wish is not None:
        place = locate(selector.path)
        wish = find_entry(place, place.log(), selector.wish).position.epoch
    output.notice(f"running the archived source of {run}")
    found = replay(run, wish)
    same = all(one.same for one in found)
    lines = (line for one in found for line in one.lines())
    output.result({"same": same, "calls": list(map(vars, found))}, lines)
    return 0 if same else 1


@dataclass(frozen=True)
class EpochVerdict:
    """Result of verifying one epoch; `states` are its states in the log."""

    result: Verification
    states: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Reason why the epoch is damaged, or cannot be used although it is intact."""
        if self.result.verified and not self.result.entry.healthy:
            return "(was quarantined, so automatic resume never uses it)"
        return self.result.reason

    def line(self) -> str:
        """Describe the result, as one line."""
        entry, states = self.result.entry, f" ({', '.join(self.states)})" if self.states else ""
        outcome = "verified" if self.result.verified else self.result.outcome.value  # `--json` keeps "proved"
        return f"epoch {entry.position}  branch {entry.branch}  {outcome}{states}  {self.reason}".rstrip()

    def json(self) -> dict[str, Any]:
        """Return the object of `verify --json`."""
        return {
            **entry_json(self.result.entry),
            "outcome": self.result.outcome.value,
            "states": list(self.states),
            "reason": self.reason,
        }


@verb(
    "verify every byte of epochs; exit code 5 if one is damaged or unreadable, 3 if none is usable",
    run_epoch("all"),
    arg(
        "--level",
        "headers: files, sizes and headers, not every byte (default: full)",
        choices=("headers", "full"),
        default="full",
    ),
    flag(
        "--replay",
        (
            "rebuild the model by running the archived source and repeat the recorded call; exit code 1 if "
            "the bits differ"
        ),
    ),
    flag("--quarantine", "record damaged epochs in the log, so that no launch tries them"),
    SINGLE_WRITER,
)
def verify(chosen: argparse.Namespace, output: Output) -> int:
    """Verify one epoch or all; returns 0 if all are intact, 5 if not, 3 if no epoch can be used."""
    if chosen.replay:
        return _replay(chosen.path, output)
    selector = parse_selector(chosen.path)
    place, whole = locate(selector.path, single_writer=chosen.single_writer), selector.wish is None
    view = place.log()
    output.notices(view.notices)
    entries = view.entries if selector.wish is None else (find_entry(place, view, selector.wish),)
    verdicts, current = list[EpochVerdict](), current_keys(view)
    for number, entry in enumerate(entries, 1):
        count = f"{number} of {len(entries)}"
        output.progress(f"epoch {entry.position}, {count}")
        with output.works(f" ({count})"):
            result = verify_epoch(place.storage, entry, level=chosen.level)
        verdicts.append(EpochVerdict(result, tuple(states_of(entry, current))))
        output.progress("")
        if not output.json:
            output.line(verdicts[-1].line(), result.outcome.value)
    retired = [one.attempt_name for one in view.state.retiring if one.groups is None] if whole else []
    quarantined = _quarantine(place, verdicts, chosen.level, output) if chosen.quarantine else []
    verified = sum(one.result.verified for one in verdicts)
    if output.json:
        output.value(
            {
                "proved": verified == len(verdicts),
                "epochs": [one.json() for one in verdicts],
                "retired": retired,
                "quarantined": quarantined,
                "notices": list(view.notices),
            }
        )
    else:
        for name in retired:
            output.line(f"{name}  retired  (not deleted completely yet)", "retired")
        damaged = ", the log is damaged" if not view.certain else ", torchrelay ckpt repair fixes the rest"
        epochs = f"{verified} of {len(verdicts)} epoch{'s' * (len(verdicts) != 1)} verified"
        output.line(f"{epochs}{damaged if view.notices else ''}")
    if verified == len(verdicts) and not view.notices:
        return 0
    usable = {entry.key for entry in view.candidates()}
    found = [one.result.outcome for one in verdicts if one.result.entry.key in usable]
    none_left = whole and bool(verdicts) and all(one is VerificationStatus.DAMAGED for one in found)
    return NONE_LEFT if none_left else NOT_VERIFIED


def _quarantine(
    place: RunLocation, verdicts: Sequence[EpochVerdict], level: Level, output: Output
) -> list[str]:
    """Take over the log, verify damaged epochs again and quarantine them; returns their names."""
    from torchrelay.checkpoint.log.writer import LogWriter

    found = [
        one.result
        for one in verdicts
        if one.result.outcome is VerificationStatus.DAMAGED and one.result.entry.healthy
    ]
    if not found:
        return []
    done: list[str] = []
    check_exclusion(place.storage)
    writer = LogWriter.take(place.storage, place.log().job_name)
    try:
        for result in found:
            if result.entry not in writer.view.entries:
                continue  # deleted or changed in the meantime
            again = verify_epoch(place.storage, result.entry, level=level)
            if again.outcome is VerificationStatus.DAMAGED:
                writer.quarantine(result.entry.key, again.reason)
                done.append(str(result.entry.key))
                output.notice(f"epoch {result.entry.key} is quarantined: {again.reason}")
    finally:
        writer.release()
    return done


_WANTED = re.compile(r"(\d+(?:\+\d+)?)(?:,branch=(\d{1,9}))?", re.ASCII)
_STYLES = {"chosen": "proved", "not resumable": "quarantined"}


@verb(
    "explain why an epoch is not used, and what the next launch resumes from",
    run_epoch("the newest, down to the one that is chosen"),
    arg(
        "epoch",
        "same as @EPOCH, also for positions within an epoch: 7, 3+1200, 7,branch=0",
        "EPOCH",
        nargs="?",
    ),
)
def why(chosen: argparse.Namespace, output: Output) -> int:
    """Print the explanation; returns the exit code that a launch would have, 0 if it could resume."""
    selector = parse_selector(chosen.path)
    place = locate(selector.path)
    wanted = None if chosen.epoch is None else _wanted(chosen.epoch)
    view = place.log()
    if selector.wish is not None:
        wanted = _selected(place, view, selector, chosen.epoch)
    history = read_history(place.storage, view.job_uuid or "", view.slot)
    start = start_now(place.storage, view)
    if wanted is not None:
        accounts = [explain(view, history, start, *wanted)]
    else:
        entries = list(newest_and_chosen(view, start))
        accounts = [explain(view, history, start, one.position, one.branch) for one in entries]
    failures = {account.position: list(_failures(place, account.position)) for account in accounts}
    output.notices(view.notices)
    if output.json:
        output.value(_json(view, history, start, accounts, failures))
        return start.exit_code
    for account in accounts:
        where = "" if account.branch is None else f" (branch {account.branch})"
        reason = account.reason.removeprefix(f"{account.standing} ")  # "abandoned by a rewind"
        line = f"epoch {account.position}{where}  {account.standing}: {reason}"
        output.line(line, _STYLES.get(account.standing, account.standing))
        history_lines = (f"slot {one.slot}, {one.when}: {one.text}" for one in account.happened)
        for text in chain(history_lines, failures[account.position]):
            output.line(f"  {text}")
    output.line(start.sentence)
    return start.exit_code


def _wanted(text: str) -> tuple[Position, int | None]:
    match = _WANTED.fullmatch(text)
    if match is None:
        raise UsageError(f"invalid epoch {text!r}: expected 7, 3+1200, or 7,branch=0")
    return Position.parse(match[1]), None if match[2] is None else int(match[2])


def _selected(
    place: RunLocation, view: LogView, selector: Selector, besides: str | None
) -> tuple[Position, int | None]:
    wish = selector.wish
    if besides is not None:
        raise UsageError(f"@{selector.epoch} and {besides} both name an epoch; give only one")
    if wish is not None and wish.epoch is not None:
        return Position(wish.epoch), wish.branch  # it may be deleted: `explain` reports its history
    entry = find_entry(place, view, wish or LAST)
    return entry.position, entry.branch


def _failures(place: RunLocation, position: Position) -> Iterator[str]:
    """Yield the run's notes about failed saves of this epoch; unreadable notes are ignored."""
    if place.run is None or not position.boundary:
        return
    try:
        for event in place.run.events():
            if event.get("kind") == "save failed" and event.get("epoch") == position.epoch:
                yield f"a save of it failed: {event.get('error', 'unknown reason')}"
    except StorageError:
        return


def _json(
    view: LogView,
    history: History,
    start: ResumePreview,
    accounts: list[Account],
    failures: dict[Position, list[str]],
) -> dict[str, object]:
    return {
        "job": view.job_name,
        "branch": view.current.id,
        "start": {
            "epoch": None if start.chosen is None else start.chosen.position.epoch,
            "step": None if start.chosen is None else start.chosen.position.step,
            "over": start.over,
            "says": start.sentence,
            "exit_code": start.exit_code,
        },
        "epochs": [{**one.json(), "failures": failures[one.position]} for one in accounts],
        "history_from_slot": history.begins,
        "notices": list(view.notices),
    }
