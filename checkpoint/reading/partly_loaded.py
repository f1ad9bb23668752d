"""A load that fails after objects of the user have changed says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import PartiallyLoadedError, RelayError


@contextmanager
def naming_what_changed(*, live: bool) -> Iterator[None]:
    """Turn our errors into PartiallyLoadedError where what is read goes into `live` memory."""
    try:
        yield
    except RelayError as error:
        if not live:
            raise
        raise PartiallyLoadedError(
            f"reading failed after objects had changed: {error}; load them again before you use them"
        ) from error
