"""Who starts the ranks: a small table. A target's module is imported when it was chosen, no other one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from torchrelay.records import dataclass
from torchrelay.runners.launch.request import LaunchFile, LaunchRequest
from torchrelay.runners.monitoring.console import Output


class Target(Protocol):
    """What the module of a target has: two functions of these names."""

    def files(self, request: LaunchRequest) -> tuple[LaunchFile, ...]:
        """The files of a launch. Pure; raises UsageError for a request that this target cannot serve."""

    def submit(self, request: LaunchRequest, directory: Path, output: Output) -> int:
        """Start what `files` made, which lies in `directory` under its names; returns the exit code."""


@dataclass(frozen=True)
class Row:
    """A target: its module in this package, and its line in the help of `launch`.

    `here`: the script that is started lies on this machine, too, so that a mistyped name is seen at once.
    """

    module: str
    help: str
    here: bool = True


TARGETS = {
    "local": Row("local", "on this machine, and wait for the end (the default)"),
    "slurm": Row("slurm", "by sbatch; preempted runs are queued again"),
    "k8s": Row("kubernetes", "as a Job of Kubernetes, or a TrainJob of Kubeflow", here=False),
    "torchx": Row("torchx", "by one of TorchX's schedulers", here=False),
}
"""By the name of the option that chooses it."""


def target(name: str) -> Target:
    """The module of a target; `name` is a key of TARGETS."""
    return cast(Target, import_module(f"{__package__}.{TARGETS[name].module}"))
