"""The engines in one process, each with the quickest public settings that were found for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.caches import sync_tree

Tensors = Mapping[str, torch.Tensor]


class Engine:
    """Saves a dict of tensors into an empty folder and loads it, or some of it, into resident tensors."""

    def save(self, path: Path, tensors: Tensors) -> None:
        raise NotImplementedError

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        raise NotImplementedError

    def timed_saves(self, paths: list[Path], tensors: Tensors) -> list[float]:
        """Seconds of a save into each folder, until its bytes and names are durable."""
        secs = []
        for path in paths:
            path.mkdir(parents=True)
            begin = time.perf_counter()
            self.save(path, tensors)
            sync_tree(path)
            secs.append(time.perf_counter() - begin)
        return secs


class RelayFile(Engine):
    """`save_blobs` and `load_into` as they are by default: all or nothing, every block verified."""

    verify = "full"
    atomic = True

    def save(self, path: Path, tensors: Tensors) -> None:
        import torchrelay

        torchrelay.save_blobs(path / "blobs.safetensors", tensors)

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        import torchrelay

        file = path / "blobs.safetensors"
        torchrelay.load_into(file, into, strict=whole, atomic=self.atomic, verify=self.verify)


class RelayFileAtOnce(RelayFile):
    """The same with `atomic=False`: bytes are read once, and verified when objects have changed."""

    atomic = False


class RelayFileUnverified(RelayFile):
    """The same with `verify="headers"`: blocks are not compared with their digests."""

    verify = "headers"


class RelayEpoch(Engine):
    """Epochs of a run, and `open_checkpoint(...).load` as it is by default; every block verified."""

    atomic = True

    def timed_saves(self, paths: list[Path], tensors: Tensors) -> list[float]:
        from bench.epochs import keep_first, timed_epochs

        run = paths[0] / "run"
        run.parent.mkdir(parents=True)
        secs = timed_epochs(run, {"state": dict(tensors)}, len(paths), lambda: sync_tree(run))
        keep_first(run)
        return secs

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        import torchrelay

        objects = {f"state.{name}": tensor for name, tensor in into.items()}
        # strict compares both sides, and the random states of the run are on one side only
        torchrelay.open_checkpoint(path / "run", 1).load(objects, strict=False, atomic=self.atomic)


class RelayEpochAtOnce(RelayEpoch):
    """The same with `atomic=False`."""

    atomic = False


class TorchSave(Engine):
    """`torch.save`, with or without its CRC; `torch.load` with `mmap` where it helps."""

    def __init__(self, *, crc: bool) -> None:
        self.crc = crc

    def save(self, path: Path, tensors: Tensors) -> None:
        torch.serialization.set_crc32_options(self.crc)
        torch.save(dict(tensors), path / "state.pt")

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        _copy(torch.load(path / "state.pt", mmap=not whole, weights_only=True), into)


class Safetensors(Engine):
    """`save_file`; `load_file`, or `safe_open` for some."""

    def save(self, path: Path, tensors: Tensors) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), path / "state.safetensors")

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file

        if whole:
            _copy(load_file(path / "state.safetensors"), into)
            return
        with safe_open(path / "state.safetensors", "pt") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))


class Dcp(Engine):
    """`torch.distributed.checkpoint` with so many writer threads."""

    def __init__(self, threads: int, *, caching: bool = False) -> None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        self.threads = threads
        self.planner = DefaultSavePlanner(enable_plan_caching=caching)

    def save(self, path: Path, tensors: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=self.threads)
        dcp.save(dict(tensors), storage_writer=writer, planner=self.planner, no_dist=True)

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(into), storage_reader=dcp.FileSystemReader(path), no_dist=True)


class TorchSnapshot(Engine):
    """`Snapshot.take` and `restore`, or `read_object` for some."""

    def save(self, path: Path, tensors: Tensors) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(path / "snapshot"), {"state": StateDict(**tensors)})

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        from torchsnapshot import Snapshot, StateDict

        snapshot = Snapshot(str(path / "snapshot"))
        if whole:
            state = StateDict(**into)
            snapshot.restore({"state": state})
            _copy(state, into)
            return
        for name, tensor in into.items():
            snapshot.read_object(f"0/state/{name}", obj_out=tensor)


class Orbax(Engine):
    """`PyTreeCheckpointer` of NumPy views, copied into the tensors after restoring."""

    def save(self, path: Path, tensors: Tensors) -> None:
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path.resolve() / "tree", {name: one.numpy() for name, one in tensors.items()})

    def load(self, path: Path, into: Tensors, *, whole: bool) -> None:
        import numpy
        import orbax.checkpoint as ocp

        kinds = {name: ocp.RestoreArgs(restore_type=numpy.ndarray) for name in into}
        wanted = ocp.args.PyTreeRestore(
            item=dict.fromkeys(into, 0), restore_args=kinds, partial_restore=not whole
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(path.resolve() / "tree", args=wanted)
        _copy({name: torch.from_numpy(array) for name, array in found.items()}, into)


class Broken(TorchSave):
    """Stores other bytes than it was given; the tests look whether that is noticed."""

    def __init__(self) -> None:
        super().__init__(crc=True)

    def save(self, path: Path, tensors: Tensors) -> None:
        super().save(path, {name: tensor + 1 for name, tensor in tensors.items()})


def _copy(found: Tensors, into: Tensors) -> None:
    for name, tensor in into.items():
        if found[name] is not tensor:
            tensor.copy_(found[name])
