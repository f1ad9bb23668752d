"""Which device a profile computes on: cpu with gloo, cuda with nccl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys

if TYPE_CHECKING:
    import torch


def device_of(runner: RunnerKeys, local_rank: int) -> torch.device:
    """The device of a process; raises UsageError, with the reason, for one that cannot be had.

    `auto` is the GPU of the local rank where there is one. `selected_gpus` are taken in their order, by local
    rank.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = f"runner.{runner.name}"
    if runner.device == "cpu" or (runner.device == "auto" and not count and runner.selected_gpus is None):
        return torch.device("cpu")
    if not count:
        key = "selected_gpus" if runner.selected_gpus is not None else f"device: {runner.device}"
        raise UsageError(f"{own} has `{key}`, and this machine shows no GPU: write `device: cpu` or `auto`")
    chosen = tuple(range(count)) if runner.selected_gpus is None else runner.selected_gpus
    beyond = [one for one in chosen if one >= count]
    if beyond:
        raise UsageError(f"{own}.selected_gpus has GPU {beyond[0]}, this machine shows 0 to {count - 1}")
    if local_rank >= len(chosen):
        raise UsageError(
            f"{own} may use {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}, and more processes were "
            f"started on this machine (local rank {local_rank}): start one per GPU, or write `device: cpu`"
        )
    return torch.device("cuda", chosen[local_rank])
