"""Run by torchrun in a copy of examples/pipeline: its stages one after another, each of them killed once.

pipeline_stages.py MARKS

In the second epoch of each stage rank 1 asks itself for a save (SIGUSR2) and, some steps later, kills itself;
MARKS has a file for each stage that was killed. The same command goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torchrelay import lifecycle
from torchrelay.jobs.config.config import load_config
from torchrelay.runners.training.exit import run_and_leave

STAGES = ("encoder", "expert", "agent")
ASKS, DIES = 5, 10
"""Steps of the second epoch; a request is agreed on at the next step, so it is served long before."""


def main(marks: Path) -> int:
    code = 0
    for stage in STAGES:
        given = [f"runner.train.network_class_path={__file__}:Network", "runner.train.replay=true"]
        os.environ["PIPELINE_MARK"] = str(marks / stage)
        code = code or lifecycle.run_config(load_config(f"{stage}.yaml", given)).exit_code
    return code


class Network(lifecycle.Network):
    """The stage's own, with a model that ends its process once."""

    def build(self, context: Any) -> None:
        super().build(context)
        mark = Path(os.environ["PIPELINE_MARK"])
        if context.is_infer or context.session.peers.rank != 1 or mark.exists():
            return
        (phase,) = context.phases.values()
        steps = 0

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == len(phase.loader) + ASKS:
                os.kill(os.getpid(), signal.SIGUSR2)
            if steps == len(phase.loader) + DIES:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        phase.model.register_forward_pre_hook(count)


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
