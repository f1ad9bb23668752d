"""Whether two writers can be told apart at a place: a name that is taken must refuse a second creation.

Everything that protects a directory from a second job stands on that, so it is tried before anything is
written.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Literal, Protocol, runtime_checkable

from torchrelay.checkpoint.storage import Storage
from torchrelay.errors import StorageError, UsageError

SingleWriter = Literal["external"] | None
"""`external`: not the storage but somebody else makes sure that one job at a time writes."""
_REMEDY = (
    "two jobs could overwrite each other's epochs there. Choose another place, or, if something else makes "
    "sure that never more than one job writes there, say single_writer='external'"
)


@runtime_checkable
class Distrusted(Protocol):
    """What a storage may say besides: that it needs no probe, or that none would help."""

    single_writer: SingleWriter

    @property
    def doubt(self) -> str | None:
        """Why nothing that a probe finds would prove anything; None if it would."""


def check_single_writer(given: object) -> SingleWriter:
    """The option as users give it; UsageError for what it cannot be."""
    if given is None or given == "external":
        return given
    raise UsageError(
        f"single_writer is {given!r:.80}; it is 'external', where something else makes sure that one job at "
        "a time writes, or None"
    )


def check_exclusion(storage: Storage) -> None:
    """Create one name twice; leaves nothing behind.

    Raises UsageError, with the remedy, where the second creation succeeds, where the store knows no such
    creation, or where nothing could prove it; StorageError where nothing can be written at all.
    """
    if isinstance(storage, Distrusted):
        if storage.single_writer is not None:
            return
        if storage.doubt:
            raise UsageError(f"{storage.url}: {storage.doubt}: {_REMEDY}")
    path = f".probe-{secrets.token_hex(8)}"
    try:
        fault = _fault(storage, path)
    except Exception as error:
        from torchrelay.checkpoint.remote.retrying import may_pass

        if not may_pass(error):
            _delete(storage, path)
        raise  # a store that does not answer was asked for long enough
    _delete(storage, path)
    if fault:
        raise UsageError(f"{storage.url} {fault}: {_REMEDY}")


def _delete(storage: Storage, path: str) -> None:
    with suppress(StorageError):
        storage.delete(path)


def _fault(storage: Storage, path: str) -> str | None:
    first, second = (f"{word} {secrets.token_hex(8)}\n".encode() for word in ("first", "second"))
    try:
        storage.link_exclusive(path, first)
    except StorageError as error:
        from torchrelay.checkpoint.remote.retrying import may_pass

        if may_pass(error):
            raise
        storage.replace(path, first)  # where this fails, too, it is no matter of exclusion
        return f"refuses to create a file exclusively ({error})"
    try:
        storage.link_exclusive(path, second)
    except FileExistsError:
        there = storage.read_range(path, 0, len(first) + 1)
        return None if there == first else "says that a name is taken, and replaces what lies there"
    except StorageError as error:
        return f"refuses to create a file exclusively ({error})"
    return "creates a file although its name is taken"
