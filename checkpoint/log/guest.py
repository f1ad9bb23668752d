"""Guests of a log: they tag and pin epochs while somebody else may be writing, and never hold it.

A guest's record keeps the generation of the writer before it; the writer takes its change over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.format.log_state import Key, Mark, State
from torchrelay.checkpoint.format.names import check_mark_name
from torchrelay.checkpoint.log import changes
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.job_file import check_job, read_job
from torchrelay.checkpoint.log.log_append import Draft, OvertakenError, append
from torchrelay.checkpoint.log.log_reader import read_tail
from torchrelay.checkpoint.log.record import LOG, key_json
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError, UnknownEpochError

Json = Any

_ATTEMPTS = 8


def tag_draft(name: str, target: Key | None, generation: int | None = None) -> Draft:
    """Give an epoch a name, or move the name to it; None takes the name away. UsageError for a bad name."""
    return _mark_draft("tag", "tag", name, target, generation)


def pin_draft(name: str, target: Key, generation: int | None = None) -> Draft:
    """Keep an epoch for the reason `name`, one at a time. UsageError for a bad name."""
    return _mark_draft("pin", "pin", name, target, generation)


def unpin_draft(name: str, generation: int | None = None) -> Draft:
    """The reason `name` is gone."""
    return _mark_draft("unpin", "pin", name, None, generation)


def append_as_guest(storage: Storage, draft: Draft, job_name: str | None = None) -> LogView:
    """Put a mark into the log of somebody else; returns the log after it.

    Raises UnknownEpochError for an epoch that is not live, or a directory without a job.
    """
    job = read_job(storage)
    if job is None:
        raise UnknownEpochError(f"{storage.url} holds no job: check the path")
    for _ in range(_ATTEMPTS):
        tail = read_tail(storage, job)
        if job_name is not None:
            check_job(storage, tail.job, job_name)
        if tail.view.slot < 0:
            raise UnknownEpochError(f"{storage.url} holds no epoch yet")
        if tail.stepped_back:
            raise DamagedError(f"{tail.view.notices[0]}; start the job, then try again")
        storage.sync_dir(LOG)
        try:
            return append(storage, tail, draft).tail.view
        except OvertakenError:
            continue
    raise StorageError(f"{storage.url}/{LOG} changes faster than it can be read: try again later")


def _mark_draft(kind: str, mark: str, name: str, target: Key | None, generation: int | None) -> Draft:
    if target is not None:
        check_mark_name(name)

    def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
        place = None if target is None else key_json(target)
        if target is None:
            after = changes.unmarked(state, mark, name)
        else:
            after = changes.marked(state, Mark(mark, name, target))
        return None if after == state else (after, {"name": name, "target": place})

    return Draft(kind, change, generation)
