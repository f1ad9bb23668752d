"""What a train call gives back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torchrelay.runners.stages.warming import WarmStart

Status = Literal["FINISHED", "STOPPED", "PREEMPTED"]


class RunResult(int):
    """The last epoch, as Caffe2's runner returned it, with the rest as attributes.

    `metrics` has the last value of each metric, of whatever epoch. `run_dir` is the run's directory, or its
    URL; `warm_starts` tells what each `init_from` took and skipped, where this call began the run.
    `resumed_from` is the epoch that this call went on from; None where it began the run.
    `elsewhere`: other hosts alone were told to leave, so that this one may go on.
    Always true, epoch 0 included: a train call that returns has done what it was asked.
    """

    status: Status
    stop: tuple[str, ...]
    metrics: Mapping[str, float]
    run_dir: Path | str | None
    committed: int | None
    warm_starts: tuple[WarmStart, ...]
    elsewhere: bool
    resumed_from: int | None

    def __new__(
        cls,
        epoch: int,
        *,
        status: Status = "FINISHED",
        stop: tuple[str, ...] = (),
        metrics: Mapping[str, float] | None = None,
        run_dir: Path | str | None = None,
        committed: int | None = None,
        warm_starts: tuple[WarmStart, ...] = (),
        elsewhere: bool = False,
        resumed_from: int | None = None,
    ) -> RunResult:
        """Make the result of a run whose last epoch is `epoch`; `committed` is the newest saved one."""
        self = super().__new__(cls, epoch)
        self.status = status
        self.stop = stop
        self.metrics = dict(metrics or {})
        self.run_dir = run_dir
        self.committed = committed
        self.warm_starts = warm_starts
        self.elsewhere = elsewhere
        self.resumed_from = resumed_from
        return self

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"RunResult({int(self)}, status={self.status!r}, stop={self.stop!r}, "
            f"committed={self.committed!r}, run_dir={str(self.run_dir) if self.run_dir else None!r})"
        )
