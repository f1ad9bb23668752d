"""A tiny run for hosts of a cluster: `hosted_job.py RUN [WAIT]`; with WAIT it stays in its second epoch."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.runners.session.context import Context

job = Job("hosted")


@job.init
def begin(ctx: Context) -> None:
    ctx["total"] = 0


@job.epoch
def count(ctx: Context) -> None:
    ctx["total"] += 1
    if ctx["total"] == 2 and len(sys.argv) > 2:
        Path(f"{sys.argv[2]}.{ctx.rank}").touch()
        for _ in ctx.steps(range(2000)):
            time.sleep(0.05)


job.stop_when(max_epochs(3))
JobRunner(job, sys.argv[1]).main()
