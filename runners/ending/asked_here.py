"""The requests of one run in this process: by its limits, its surroundings and its directory."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.ending.requests import GRACE_SECS, Requests
from torchrelay.runners.ending.time_limits import deadlines_of, notice_of


def requests_of(
    limit_secs: float | None, run: RunDirectory | None, save_secs: Callable[[], float], *, looks: bool
) -> Requests:
    """What may end the run early; the file STOP is looked for by the process that `looks`."""
    return Requests(
        deadlines_of(limit_secs, os.environ),
        run.stop_file if run is not None and looks else None,
        save_secs,
        notice_secs=notice_of(os.environ, GRACE_SECS),
        stop_name=None if run is None else f"{run.where}/STOP",
    )
