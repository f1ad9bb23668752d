"""The body of a request: bounded in bytes, its own and those of all, and in time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torchrelay.runners.programs.serve_options import Budget
from torchrelay.runners.serving.refusal import RefusedError, busy, wrong

Receive = Callable[[], Awaitable[Any]]


class GoneError(Exception):
    """The client is gone: nobody reads an answer."""


class Body:
    """A body that grows while it is read; `release` gives its bytes back to the budget.

    `weight` is how many bytes of memory a byte of it comes to.
    """

    def __init__(self, budget: Budget, weight: int = 1) -> None:
        self.data = bytearray()
        self._budget, self._weight, self._taken = budget, weight, 0

    async def read(self, receive: Receive, headers: Mapping[str, str], most: int) -> None:
        """Read it whole. Raises RefusedError 413 where it is too long, 429 where all are; GoneError."""
        check_length(headers, most)
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise GoneError
            chunk = message.get("body", b"")
            if len(self.data) + len(chunk) > most:
                raise too_long(most)
            cost = len(chunk) * self._weight
            if not self._budget.take(cost):
                raise busy("too many large requests at once")
            self._taken += cost
            self.data += chunk
            more = message.get("more_body", False)

    def release(self) -> None:
        """It is not needed any more."""
        self._budget.give_back(self._taken)
        self._taken = 0


def check_length(headers: Mapping[str, str], most: int) -> None:
    """Refuse before a byte is read what says itself that it is too long."""
    said = headers.get("content-length")
    if said is not None and (not said.isdecimal() or len(said) > 15 or int(said) > most):
        raise too_long(most)


def too_long(most: int) -> RefusedError:
    """413."""
    return wrong(f"the body is longer than {most} bytes", 413)
