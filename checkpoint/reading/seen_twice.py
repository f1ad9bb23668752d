"""A second look before damage is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchrelay.errors import DamagedError, FormatError

T = TypeVar("T")


def seen_twice(look: Callable[[], T]) -> T:
    """Look again before damage or an I/O error is believed: the bytes may have changed on their way."""
    try:
        return look()
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename or error} is missing") from error
    except OSError:
        pass
    try:
        return look()
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename or error} is missing") from error
