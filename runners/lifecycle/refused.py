"""Ways of starting a profile that contradict what it says: refused with the way out. Pure."""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import CLUSTER_TRAIN, LOCAL_TRAIN
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys


def check_launch(runner: RunnerKeys, *, launched: bool, world_size: int) -> None:
    """Raise UsageError where a profile and the way in which it was started contradict each other."""
    own = f"runner.{runner.name}"
    if runner.kind == CLUSTER_TRAIN and not launched:
        raise UsageError(
            f"{own}.class is {CLUSTER_TRAIN}, which runs under a launcher only: torchrun ... -m torchrelay "
            f"run -m config.yaml; write `train` for one process, `{LOCAL_TRAIN}` for several on this machine"
        )
    if runner.kind == LOCAL_TRAIN and launched and world_size != runner.worker_num:
        raise UsageError(
            f"{own}.class is {LOCAL_TRAIN}, which starts {runner.worker_num} processes itself, and a "
            f"launcher has started {world_size}: write `train`, or start without the launcher"
        )
    if runner.device == "cpu" and runner.selected_gpus is not None:
        raise UsageError(f"{own}: `selected_gpus` and `device: cpu` contradict each other: keep one of them")
