"""Keys that the schema knows and that no step heeds yet: refused with the way out, never ignored. Pure."""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_keys import CLUSTER_TRAIN, LOCAL_TRAIN
from torchrelay.jobs.config.runner_keys import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings

_EXPORT = "weights of an epoch go out by `torchrelay export RUN@7`"


def check_heeded(settings: Settings, runner: RunnerKeys) -> None:
    """Raise UsageError for a key whose meaning would get lost."""
    for name in ("interval", "path", "feed_varnames", "fetch_varnames"):
        if getattr(runner, f"save_inference_{name}") is not None:
            raise _refusal(runner, f"save_inference_{name}", _EXPORT)


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


def _refusal(runner: RunnerKeys, key: str, remedy: str) -> UsageError:
    return UsageError(f"runner.{runner.name}.{key} is not heeded by the default steps: {remedy}")
