"""The engines on several ranks: every rank calls, all files lie below one folder that all see."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.caches import sync_tree
from bench.content import local_of
from bench.models import State


class RankEngine:
    """Saves the state of all ranks and loads it into a state that is resident."""

    def start(self) -> None:
        """Make the process group."""
        dist.init_process_group("gloo")

    def stop(self) -> None:
        """Leave it."""
        dist.destroy_process_group()

    def save(self, path: Path, state: State) -> None:
        raise NotImplementedError

    def ready(self, state: State) -> None:
        """Prepare a load, unmeasured."""

    def load(self, path: Path, state: State) -> None:
        raise NotImplementedError

    def timed_saves(self, paths: list[Path], state: State) -> list[float]:
        """Seconds of a save into each folder, from a barrier until all ranks know it to be durable."""
        secs = []
        for path in paths:
            if dist.get_rank() == 0:
                path.mkdir(parents=True)
            dist.barrier()
            begin = time.perf_counter()
            self.save(path, state)
            durable(path)
            secs.append(time.perf_counter() - begin)
        return secs


def durable(path: Path) -> None:
    """All ranks have written, and rank 0 has synced everything, when this returns on any rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        sync_tree(path)
    dist.barrier()


class Relay(RankEngine):
    """Epochs of a run, and the manager's load as a resume does it."""

    def start(self) -> None:
        import torchrelay

        self.session = torchrelay.init(backend="gloo", device="cpu")

    def stop(self) -> None:
        self.session.close()

    def timed_saves(self, paths: list[Path], state: State) -> list[float]:
        from bench.epochs import keep_first, timed_epochs

        run = paths[0] / "run"
        if dist.get_rank() == 0:
            paths[0].mkdir(parents=True)
        dist.barrier()
        secs = timed_epochs(run, state.objects, len(paths), lambda: durable(run), self.session)
        if dist.get_rank() == 0:
            keep_first(run)
        dist.barrier()
        return secs

    def ready(self, state: State) -> None:
        from bench.epochs import hand_over

        hand_over(state.objects, self.session)

    def load(self, path: Path, state: State) -> None:
        from bench.epochs import load_epoch

        load_epoch(path / "run", self.session)


class RankZero(RankEngine):
    """Rank 0 saves what all have alike; every rank loads the file."""

    def __init__(self, library: str) -> None:
        self.library = library

    def save(self, path: Path, state: State) -> None:
        if dist.get_rank() != 0:
            return
        if self.library == "torch":
            torch.serialization.set_crc32_options(False)
            torch.save(state.tensors, path / "state.pt")
        else:
            from safetensors.torch import save_file

            save_file(state.tensors, path / "state.safetensors")

    def load(self, path: Path, state: State) -> None:
        if self.library == "torch":
            found = torch.load(path / "state.pt", weights_only=True)
        else:
            from safetensors.torch import load_file

            found = load_file(path / "state.safetensors")
        for name, tensor in state.tensors.items():
            tensor.copy_(found[name])


class PerRank(RankEngine):
    """Every rank saves its local tensors with `torch.save`; nothing else can read them again."""

    def save(self, path: Path, state: State) -> None:
        torch.serialization.set_crc32_options(False)
        torch.save(_local(state), path / f"{dist.get_rank()}.pt")

    def load(self, path: Path, state: State) -> None:
        found = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in _local(state).items():
            tensor.copy_(found[name])


class Dcp(RankEngine):
    """`torch.distributed.checkpoint` of `get_state_dict`, with so many writer threads."""

    def __init__(self, threads: int, *, caching: bool = False) -> None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        self.threads = threads
        self.planner = DefaultSavePlanner(enable_plan_caching=caching)

    def save(self, path: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=self.threads)
        dcp.save(_whole(state), storage_writer=writer, planner=self.planner)

    def load(self, path: Path, state: State) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = _whole(state)
        dcp.load(found, storage_reader=dcp.FileSystemReader(path))
        if state.optimizer is None:
            state.model.load_state_dict(found["model"])
            return
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )


class TorchSnapshot(RankEngine):
    """`Snapshot` of what all ranks have alike, or of each rank's local tensors."""

    def __init__(self, *, replicated: bool) -> None:
        self.replicated = ["**"] if replicated else []

    def save(self, path: Path, state: State) -> None:
        from torchsnapshot import Snapshot, StateDict

        content = {"state": StateDict(**_local(state))}
        Snapshot.take(str(path / "snapshot"), content, replicated=self.replicated)

    def load(self, path: Path, state: State) -> None:
        from torchsnapshot import Snapshot, StateDict

        local = _local(state)
        found = StateDict(**local)
        Snapshot(str(path / "snapshot")).restore({"state": found})
        for name, tensor in local.items():
            if found[name] is not tensor:
                tensor.copy_(found[name])


def _local(state: State) -> dict[str, torch.Tensor]:
    return {name: local_of(tensor) for name, tensor in state.tensors.items()}


def _whole(state: State) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if state.optimizer is None:
        return {"model": state.model.state_dict()}
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}
