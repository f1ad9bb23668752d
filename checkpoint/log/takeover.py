"""Becoming the writer of a log: judge, watch, append `takeover`.

Whoever creates the takeover's slot first has the log; everybody else judges again what is then there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from torchrelay.checkpoint.format.log_state import State
from torchrelay.checkpoint.format.manifest.schema import DATA
from torchrelay.checkpoint.log import changes
from torchrelay.checkpoint.log.bases import restore
from torchrelay.checkpoint.log.counter import moves
from torchrelay.checkpoint.log.job_file import JobFile, check_job, write_again
from torchrelay.checkpoint.log.log_append import Draft, OvertakenError, append
from torchrelay.checkpoint.log.log_reader import Tail, mended, read_tail
from torchrelay.checkpoint.log.record import LOG
from torchrelay.checkpoint.log.writer import Right, WriterIdentity, describe, judge
from torchrelay.checkpoint.storage.base import Leftovers, Storage, Unfinished
from torchrelay.errors import DirectoryInUseError, StorageError
from torchrelay.records import dataclass

Json = Any

_ATTEMPTS = 8
_REMEDY = "stop that job, or wait until it has ended, or choose another directory"


@dataclass(frozen=True)
class Taken:
    """A log that is ours.

    `older_tries` are the tries that lay there before our record was written: whatever of them the
    log does not know was left by an older generation and can never be committed any more.
    """

    tail: Tail
    older_tries: frozenset[str]


def take_over(
    storage: Storage,
    job: JobFile,
    job_name: str | None,
    me: WriterIdentity,
    nonce: str,
    *,
    live_here: Container[str],
    patience_secs: float,
) -> Taken:
    """Append our takeover, after watching the holder where the log does not say that he is gone.

    Raises UsageError for the log of another job than `job_name`, DirectoryInUseError naming the holder when
    he lives, or when others are always faster.
    """
    holder: Mapping[str, Json] = {}
    for _ in range(_ATTEMPTS):
        tail = read_tail(storage, job)
        check_job(storage, tail.job, job_name)
        holder = tail.view.holder
        verdict = judge(tail.view, me, certain=not tail.stepped_back, live_here=live_here)
        if verdict.right is Right.REFUSED:
            raise DirectoryInUseError(f"{storage.url} is in use: {verdict.reason}")
        if verdict.right is Right.WATCH and moves(storage, patience_secs):
            raise DirectoryInUseError(f"{storage.url} is in use by {describe(holder, _REMEDY)}")
        storage.mkdir(LOG)
        storage.mkdir(DATA)
        storage.sync_dir("")
        older_tries = frozenset(storage.list(DATA))
        cut_off, begun = _temporaries(storage), _begun(storage)
        storage.sync_dir(LOG)  # never act on a name that a power cut could still remove
        try:
            appended = append(storage, tail, _takeover(tail.job, me, nonce, verdict.reason))
        except OvertakenError:
            continue
        _delete(storage, cut_off)
        _give_up(storage, begun)
        return Taken(_mended(storage, tail, appended.tail), older_tries)
    raise DirectoryInUseError(f"{storage.url} is in use by {describe(holder, _REMEDY)}")


def _mended(storage: Storage, found: Tail, taken: Tail) -> Tail:
    """Write again what the log told instead of its files: it is ours, so nobody else does."""
    try:
        if found.job.damage:
            write_again(storage, found.job)
        if found.base is not None and found.base.lost is not None:
            restore(storage, found.base.lost)
    except StorageError:
        return taken  # the next start finds it in the same way
    return mended(taken)


def _temporaries(storage: Storage) -> list[str]:
    """Files without a name yet: of a writer that crashed, or of one, or a guest, that writes right now.

    What they are to become is older than the takeover that follows: its slot, at the latest, is filled, so
    no record of theirs is lost with them; a guest that lives makes its file anew (`LocalStorage`).
    """
    if not isinstance(storage, Leftovers):
        return []
    return [*storage.leftovers(""), *(f"{LOG}/{name}" for name in storage.leftovers(LOG))]


def _delete(storage: Storage, paths: list[str]) -> None:
    """What cannot go now stays for the next one."""
    for path in paths:
        with suppress(StorageError):
            storage.delete(path)


def _begun(storage: Storage) -> list[tuple[str, str]]:
    """Parts of shards that older writers sent; without the right to list them there is nothing to be done."""
    if isinstance(storage, Unfinished):
        with suppress(StorageError):
            return storage.unfinished(DATA)
    return []


def _give_up(storage: Storage, begun: list[tuple[str, str]]) -> None:
    if isinstance(storage, Unfinished):
        for one in begun:
            with suppress(StorageError):
                storage.give_up(one)


def _takeover(job: JobFile, me: WriterIdentity, nonce: str, reason: str) -> Draft:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    holder = {**me.json(), **job.repeated(), "nonce": nonce, "since": since}

    def change(state: State) -> tuple[State, Mapping[str, Json]]:
        return changes.taken_over(state, holder), {"reason": reason}

    return Draft("takeover", change)
