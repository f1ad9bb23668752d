"""The verb that `torchrelay VERB script.py` has read, from the start of the script to its `torchrelay.main`.

Until then the script only defines its class. A job that it runs itself meanwhile was not asked for, least of
all by `status`, which writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from torchrelay.runners.experiment.request import Request

_handed: list[tuple[Request, str]] = []


def hand_over(request: Request | None, script: str = "") -> None:
    """Have the next `main` that acts do this instead of reading the command line; None takes it back."""
    _handed[:] = [] if request is None else [(request, script)]


def taken() -> Request | None:
    """What was handed over, once; None where the script was started by itself."""
    return _handed.pop()[0] if _handed else None


def refuse_before_main() -> None:
    """Refuse to train where a verb still waits for the script's `torchrelay.main`; raises UsageError."""
    for request, script in _handed:
        raise UsageError(
            f"{script} trains a job by itself (JobRunner): start it with python or torchrun; `torchrelay "
            f"{request.verb}` takes scripts that end with torchrelay.main(...), and train nothing before it"
        )
