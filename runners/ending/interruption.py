"""What leaves a task when all processes agreed to stop here."""

from __future__ import annotations


class Interrupted(BaseException):
    """Ends the running tasks at a step or boundary that all processes agreed on; never leaves `train`.

    Passes by `except Exception` of users, as CancelledError does; their `finally` blocks run.
    """
