"""Before a run begins: what is checked, what the user and the log say, and the position that follows.

Nothing is changed anywhere, and nothing is left behind.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.manager_base import Manager
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.peers import decide
from torchrelay.runners.choosing import Choice, Past, Wish, check_epoch, choose
from torchrelay.runners.preflight import check_before_start
from torchrelay.runners.result import RunResult
from torchrelay.runners.stopping import only_time_is_up, over_there

if TYPE_CHECKING:
    from torchrelay.runners.life import Life

PROCESS = uuid.uuid4().hex
"""Drawn at the first import; processes that are forked later share it."""


def this_process() -> str:
    """Tells requests of this process from those of an earlier one, also where both are forks of one."""
    return f"{PROCESS}.{os.getpid()}"


def look_and_choose(life: Life) -> Choice:
    """The position to begin from, alike on all processes; what the log said is in `life.look` then.

    Raises UsageError and the errors of the checks; DamagedError or UnknownEpochError for an explicit epoch.
    """
    life.job.check()
    life.session.place(life.job.nodes())
    manager, run, peers = life.manager, life.run_directory, life.session.peers
    single_writer = manager.engine.single_writer if manager is not None else None
    check_before_start(life.job, life.session, run, single_writer)
    if manager is None:
        if life.wish_epoch is not None:
            raise UsageError(
                f"epoch {life.wish_epoch} was asked for, but nothing is saved: give JobRunner a run "
                "directory or a manager"
            )
        return Choice("fresh")
    manager.bind(life.job, default_name=run.name if run else None)
    _check_requests(life)
    wish = _wish(life, manager)
    life.look = manager.engine.ledger.look(peers, tolerant=run is None and life.plan.resume != "must")
    for notice in life.look.notices:
        life.journal.warn(notice)
    past = Past(
        commits=life.look.commits,
        told_of=_told_of(life) if not life.look.commits else None,
        branch_request=life.look.request,
        epochs_over=_over_at_look(life),
    )
    # Rank 0 chooses for all: which process began a branch is known by rank 0's identity alone.
    choice = Choice(**decide(peers, "choose", lambda: asdict(choose(wish, past))))
    if choice.epoch is not None:
        manager.engine.ledger.check(peers, choice.epoch)
    return choice


def request_of(life: Life, choice: Choice) -> dict[str, Any]:
    """What a branch that this process begins for a choice remembers, to be known again by the next one."""
    by_user = {"by": "user"} if life.wish_epoch is not None else {}
    return {"epoch": choice.epoch, "process": this_process(), **by_user}


def ended_result(life: Life, choice: Choice) -> RunResult | None:
    """The result of a run whose end is noted; None when work is left, be it the note."""
    look, run = life.look, life.run_directory
    if look.rest or choice.start != "newest" or look.facts is None or look.epoch is None:
        return None
    verdict = over_there(
        life.session, life.job, look.facts, look.epoch, inside=look.step > 0, rewound=look.rewound
    )
    if not verdict.stop or not life.journal.has_ended(look.branch, look.epoch):
        return None
    return RunResult(
        look.epoch,
        status="STOPPED" if only_time_is_up(life.job, verdict) else "FINISHED",
        stop=tuple(v["reason"] for v in look.facts.stop.values() if v["stop"]),
        metrics=look.facts.last_metrics,
        run_dir=run.where if run else None,
        committed=look.epoch,
        resumed_from=look.epoch,
    )


def _check_requests(life: Life) -> None:
    """Raise UsageError on all ranks where they ask for different starts."""
    asked = life.session.peers.exchange(
        "start: requests", {"epoch": life.wish_epoch, "resume": life.plan.resume, "again": life.again}
    )
    if any(one != asked[0] for one in asked):
        texts = [
            f"rank {rank}: {'no epoch' if one['epoch'] is None else one['epoch']}, resume={one['resume']!r}"
            + (", again" if one["again"] else "")
            for rank, one in enumerate(asked)
            if rank == 0 or one != asked[0]
        ]
        more = f"; {len(texts) - 8} more" if len(texts) > 8 else ""
        raise UsageError(
            f"the ranks ask for different starts ({'; '.join(texts[:8])}{more}): give all ranks the same"
        )


def _wish(life: Life, manager: Manager) -> Wish:
    """Ask the handler, on rank 0 only; beside a run directory it decides only where it says so."""
    in_directory = life.run_directory is not None
    handler = manager.metadata_handler
    decides = handler is not None and bool(getattr(handler, "decides", not in_directory))

    def ask() -> int | None:
        manager.set_params(life.nodes)
        return check_epoch(
            manager.get_resume_from_epoch_id(life.wish_epoch), "the metadata handler's last_epoch"
        )

    epoch = decide(life.session.peers, "resume epoch", ask)
    return Wish(
        epoch=epoch,
        decided=decides,
        resume=life.plan.resume,
        automatic=in_directory,
        again=life.again,
        process=this_process(),
    )


def _told_of(life: Life) -> int | None:
    """The newest epoch that the run's metrics tell of as saved; what cannot be read tells of none."""
    if life.run_directory is None or life.session.peers.rank != 0:
        return None
    lines: list[dict[str, Any]] = []
    with suppress(StorageError):
        lines = life.run_directory.metrics()
    return max((line["epoch"] for line in lines if line.get("saved") is True), default=None)


def _over_at_look(life: Life) -> bool:
    """Whether the epochs are over at the newest entry of the current branch."""
    look = life.look
    return (
        look.facts is not None
        and look.epoch is not None
        and over_there(
            life.session, life.job, look.facts, look.epoch, inside=look.step > 0, rewound=look.rewound
        ).stop
    )
