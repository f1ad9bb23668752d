"""Leaving for now: what runs is drained, the place inside of the epoch is saved where there is time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.position import Position
from torchrelay.jobs.peers import decide
from torchrelay.records import dataclass
from torchrelay.runners.ending.inside import NOTHING_NEW, obstacle_here, save_inside, why_not_at
from torchrelay.runners.result import RunResult

if TYPE_CHECKING:
    from torchrelay.runners.choosing import Choice
    from torchrelay.runners.life import Life


@dataclass(frozen=True)
class _Outlook:
    """What all processes know of a leave: who asked, whether a place can be saved, and where it is."""

    reason: str
    position: Position
    why_not: str | None
    elsewhere: bool


def leave_for_now(life: Life, untried: Choice | None = None) -> RunResult:
    """End a run that all processes agreed to interrupt; all call this together.

    `untried`: where it would have gone on, if it has not come to that.
    Raises what a save raises that makes the run fail: a process that is lost, a directory that is another's.
    """
    inside = life.state.tracked is not None
    life.saver.settle(life.session)
    outlook = _outlook(life, inside=inside)
    if inside and outlook.why_not is None:
        outlook = _save(life, outlook)
    life.saver.finish(life.session)
    decide(life.session.peers, "leave for now: the log", lambda: _check_still_ours(life))
    goes_on = untried is not None and untried.start == "newest"
    saved = life.look.position if goes_on else life.saver.newest
    result = RunResult(
        saved.epoch if saved is not None else 0,
        status="PREEMPTED",
        stop=(outlook.reason,),
        metrics=life.state.metrics,
        run_dir=life.run_directory.where if life.run_directory else None,
        committed=life.look.whole if goes_on else life.saver.newest_saved,
        elsewhere=outlook.elsewhere,
        resumed_from=life.resumed_from,
    )
    lost = outlook.why_not if inside and outlook.why_not != NOTHING_NEW else None
    life.journal.preempted(result, saved, lost)
    return result


def _check_still_ours(life: Life) -> None:
    """Raise FencedError where another job has the directory: its status is not ours to write."""
    writer = life.manager.engine.ledger.writer if life.manager is not None else None
    if writer is not None:
        writer.check()


def _outlook(life: Life, *, inside: bool) -> _Outlook:
    """Every process says who asked it, how far it is, how long it has, and what keeps it from going on."""
    state, requests = life.state, life.requests
    told = life.session.peers.exchange(
        "leave for now",
        [
            requests.reason(),
            requests.secs_left(),
            state.step,
            obstacle_here(life) if inside else None,
            life.saver.longest_secs,
        ],
    )
    reasons, left, steps, why, took = zip(*told, strict=True)
    position = Position(max(0, state.epoch - 1), max(steps)) if inside else Position(state.epoch)
    known = [secs for secs in left if secs is not None]
    time_left = min(known) - 2 * max(took) if known else 0.0
    reason = next((one for one in reasons if one is not None), "another process")
    why_not = _why_not(life, position, next(filter(None, why), None), time_left)
    return _Outlook(reason, position, why_not, _elsewhere(life, reasons))


def _elsewhere(life: Life, reasons: Sequence[str | None]) -> bool:
    """Whether SIGTERM came to other hosts alone: their agents leave, and the one of this host need not."""
    hosts = [place.host_index for place in life.session.nodes]
    asked = {host: reason for host, reason in zip(hosts, reasons, strict=False) if reason is not None}
    here = life.session.local_nodes[0].host_index
    return set(asked.values()) == {"SIGTERM"} and here not in asked


def _why_not(life: Life, position: Position, obstacle: str | None, time_left: float) -> str | None:
    """Why the place cannot be saved; None where it can. Alike on all processes."""
    why_not = why_not_at(life, position, obstacle)
    return "there is no time left for a save" if why_not is None and time_left < 0 else why_not


def _save(life: Life, outlook: _Outlook) -> _Outlook:
    """Save the place; a save that fails has warned, and the run goes on from the position before."""
    save_inside(life, outlook.position)
    life.saver.settle(life.session)
    failed = None if life.saver.newest == outlook.position else "the save failed"
    return replace(outlook, why_not=failed)
