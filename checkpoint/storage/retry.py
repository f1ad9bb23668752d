"""Calls to a store over a network, retried until a deadline.

Nothing here knows what a call does: whoever repeats one must be able to, or look first what became of it.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchrelay.errors import StorageError
from torchrelay.records import dataclass

T = TypeVar("T")

AT_LEAST = 3
"""Attempts that are made even if the first ones took longer than the deadline (large files do)."""
_PASSING = frozenset(
    {
        errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EPIPE,
        errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETDOWN, errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    }
)  # fmt: skip
_PASSING_NAMES = frozenset(
    {
        "HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead",
        "ResponseParserError", "ServiceRequestError", "ServiceResponseError",
    }
)  # fmt: skip
"""Errors of the clients below fsspec that are no OSError, by the names of their classes."""
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, a call is repeated, and how long the pauses between are at most."""

    deadline_secs: float = 120.0
    first_pause_secs: float = 0.1
    longest_pause_secs: float = 5.0


def persistently(work: Callable[[], T], patience: Patience) -> T:
    """Do `work`, again and again while what it raises may pass; raises its last error."""
    until = time.monotonic() + patience.deadline_secs
    for attempt, pause in enumerate(_pauses(patience), 1):
        try:
            return work()
        except Exception as error:
            settled = isinstance(error, StorageError) or not may_pass(error)  # ours was persistent already
            if settled or (time.monotonic() + pause > until and attempt >= AT_LEAST):
                raise
        time.sleep(pause)
    raise AssertionError("pauses never end")


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later: overload, time-outs, lost connections."""
    return any(_passes(one) for one in _chain(error))


def refusal(place: str, verb: str, error: BaseException) -> StorageError:
    """The error of ours for what a store answered."""
    reason = str(error).strip() or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        hint = "; check the credentials and what they allow"
    elif isinstance(error, FileNotFoundError):
        hint = "; check that the bucket exists"
    elif may_pass(error):
        hint = "; try again when the store answers"
    else:
        hint = ""
    failure = StorageError(f"cannot {verb} {place}: {reason}{hint}")
    failure.errno = number
    return failure


def _pauses(patience: Patience) -> Iterator[float]:
    """Growing pauses with jitter, from the system's randomness: the user's streams must not be touched."""
    pause, random = patience.first_pause_secs, secrets.SystemRandom()
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, patience.longest_pause_secs)


def _passes(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if _status(error) in _PASSING_STATUS:
        return True
    return any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells, in the forms of botocore, aiohttp and azure."""
    response = getattr(error, "response", None)
    told = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    for found in (told, getattr(error, "status", None), getattr(error, "status_code", None)):
        if type(found) is int:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    step: BaseException | None = error
    for _ in range(8):
        if step is None:
            return
        yield step
        step = step.__cause__


def size_of(system: Any, name: str) -> int | None:
    """The size of a file; None for a directory. Raises FileNotFoundError and what the client raises.

    s3fs, which looks for directories, too, lists what may lie below a name that nothing has; a store is
    asked for hundreds of these.
    """
    if hasattr(system, "call_s3"):
        bucket, key, _ = system.split_path(name)
        return int(system.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])
    found = system.info(name)
    return int(found["size"]) if found.get("type") == "file" else None
