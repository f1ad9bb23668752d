"""Before a run begins: what is checked, what the user and the log say, and the position that follows.

Nothing is changed anywhere, and nothing is left behind.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torchrelay.checkpoint.load.verify import Look
from torchrelay.checkpoint.manager_base import Manager
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers, decide
from torchrelay.records import dataclass
from torchrelay.runners.choosing import Choice, Past, Resume, Wish, check_epoch, choose
from torchrelay.runners.journal import Journal
from torchrelay.runners.preflight import check_before_start
from torchrelay.runners.result import RunResult
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.stop import Verdict, only_time_is_up, over_there

PROCESS = uuid.uuid4().hex
"""Drawn at the first import; processes that are forked later share it."""


def this_process() -> str:
    """Tells requests of this process from those of an earlier one, also where both are forks of one."""
    return f"{PROCESS}.{os.getpid()}"


@dataclass(frozen=True)
class Request:
    """What the caller of `train` asks for; alike on all ranks, or refused."""

    epoch: int | None
    resume: Resume
    again: bool

    def of_branch(self, choice: Choice) -> dict[str, Any]:
        """What a branch that begins by a choice remembers, so that the next process knows it again."""
        by_user = {"by": "user"} if self.epoch is not None else {}
        return {"epoch": choice.epoch, "process": this_process(), **by_user}


def look_and_choose(
    request: Request, job: Job, session: SessionBase, manager: Manager | None, journal: Journal
) -> tuple[Choice, Look]:
    """The position to begin from, alike on all processes, and what the log said.

    Raises UsageError and the errors of the checks; DamagedError or UnknownEpochError for an explicit epoch.
    """
    job.check()
    session.place(job.nodes())
    run, peers = journal.run, session.peers
    check_before_start(job, session, run, None if manager is None else manager.engine.single_writer)
    if manager is None:
        if request.epoch is not None:
            raise UsageError(
                f"epoch {request.epoch} was asked for, but nothing is saved: give JobRunner a run "
                "directory or a manager"
            )
        return Choice("fresh"), Look()
    manager.bind(job, default_name=run.name if run else None)
    _check_requests(request, peers)
    nodes = job.saved_among(place.name for place in session.nodes)
    wish = _wish(request, manager, nodes, peers, in_directory=run is not None)
    look = manager.engine.ledger.look(peers, tolerant=run is None and request.resume != "must")
    for notice in look.notices:
        journal.warn(notice)
    past = Past(
        commits=look.commits,
        told_of=_told_of(journal) if not look.commits else None,
        branch_request=look.request,
        epochs_over=(verdict := _verdict_at(look, job, session)) is not None and verdict.stop,
    )
    # Rank 0 chooses for all: which process began a branch is known by rank 0's identity alone.
    choice = Choice(**decide(peers, "choose", lambda: asdict(choose(wish, past))))
    if choice.epoch is not None:
        manager.engine.ledger.check(peers, choice.epoch)
    return choice, look


def ended_result(
    choice: Choice, look: Look, job: Job, session: SessionBase, journal: Journal
) -> RunResult | None:
    """The result of a run whose end is noted; None when work is left, be it the note."""
    if look.rest or choice.start != "newest" or look.facts is None or look.epoch is None:
        return None
    verdict = _verdict_at(look, job, session)
    if verdict is None or not verdict.stop or not journal.has_ended(look.branch, look.epoch):
        return None
    return RunResult(
        look.epoch,
        status="STOPPED" if only_time_is_up(job, verdict) else "FINISHED",
        stop=tuple(v["reason"] for v in look.facts.stop.values() if v["stop"]),
        metrics=look.facts.last_metrics,
        run_dir=journal.where,
        committed=look.epoch,
        resumed_from=look.epoch,
    )


def _verdict_at(look: Look, job: Job, session: SessionBase) -> Verdict | None:
    """Whether the epochs are over at the newest entry of the current branch; None where there is none."""
    if look.facts is None or look.epoch is None:
        return None
    return over_there(session, job, look.facts, look.epoch, inside=look.step > 0, rewound=look.rewound)


def _check_requests(request: Request, peers: Peers) -> None:
    """Raise UsageError on all ranks where they ask for different starts."""
    asked = peers.exchange("start: requests", asdict(request))
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


def _wish(
    request: Request, manager: Manager, nodes: Sequence[str], peers: Peers, *, in_directory: bool
) -> Wish:
    """Ask the handler, on rank 0 only; beside a run directory it decides only where it says so."""
    handler = manager.metadata_handler
    decides = handler is not None and bool(getattr(handler, "decides", not in_directory))

    def ask() -> int | None:
        manager.set_params(nodes)
        return check_epoch(
            manager.get_resume_from_epoch_id(request.epoch), "the metadata handler's last_epoch"
        )

    return Wish(
        epoch=decide(peers, "resume epoch", ask),
        decided=decides,
        resume=request.resume,
        automatic=in_directory,
        again=request.again,
        process=this_process(),
    )


def _told_of(journal: Journal) -> int | None:
    """The newest epoch that the run's metrics tell of as saved; what cannot be read tells of none."""
    if journal.run is None or journal.peers.rank != 0:
        return None
    lines: list[dict[str, Any]] = []
    with suppress(StorageError):
        lines = journal.run.metrics()
    return max((line["epoch"] for line in lines if line.get("saved") is True), default=None)
