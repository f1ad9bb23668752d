"""Compare torch.distributed.checkpoint and torchrelay in the same failure cases.

Each case is two programs that end by saying, in a few words, what came of it. Nothing is patched: faults are
limits of the system, changed files and, for two ranks, what programs really do. `CheckpointException` is a
BaseException, so that is what the sides of torch.distributed.checkpoint catch.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A mishap; `ranks` processes run `dcp` or `ours` in an empty directory, rank 0 says what came of it."""

    name: str
    what: str
    ranks: int
    dcp: Callable[[Path], str]
    ours: Callable[[Path], str]


def _state(value: float = 1.0, mib: int = 8) -> dict[str, Any]:
    import torch

    return {"large": torch.full((mib * MIB // 4,), value), "small": torch.full((1024,), value)}


def _limit_files(nbytes: int) -> None:
    """Files of this process end there: EFBIG, as a quota or a full disk would say."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def _unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _short(error: BaseException) -> str:
    return type(error).__name__


def _job(state: dict[str, Any], epochs: int, *, at: Callable[[int], None] = lambda epoch: None) -> Any:
    import torchrelay

    job = torchrelay.Job("side", blobs=state)

    @job.epoch
    def count(ctx: Any) -> None:
        at(ctx.epoch)
        state["small"].fill_(float(ctx.epoch))

    job.stop_when(torchrelay.max_epochs(epochs))
    return job


# A file cannot be written to its end


def _full_dcp(where: Path) -> str:
    """A file per thread; which thread meets the limit is chance, so it is tried ten times."""
    import torch.distributed.checkpoint as dcp

    silent = 0
    for number in range(10):
        path = where / str(number)
        _limit_files(4 * MIB)
        try:
            dcp.save(_state(), storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True)
        except BaseException:
            continue
        finally:
            _unlimited()
        try:
            dcp.load(_state(0.0), checkpoint_id=path, no_dist=True)
        except BaseException:
            silent += 1
    return f"no error from {silent} of 10 saves; these do not load" if silent else "save raised, 10 of 10"


def _full_ours(where: Path) -> str:
    from torchrelay import JobRunner, open_checkpoint
    from torchrelay.errors import RelayError

    raised = 0
    for number in range(10):
        job = _job(_state(), 1, at=lambda _: _limit_files(4 * MIB))
        try:
            JobRunner(job, where / str(number), max_failed_saves=1, reuse=False).train()
        except RelayError:
            raised += 1
        finally:
            _unlimited()
        open_checkpoint(where / str(number), epoch=0).load_tensors("*")
    return f"save raised, {raised} of 10; the epoch before loads"


# The second save into a place does not end


def _second_dcp(where: Path) -> str:
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(1.0), checkpoint_id=where, no_dist=True)
    _limit_files(4 * MIB)
    try:
        dcp.save(_state(2.0), checkpoint_id=where, no_dist=True)
        return "the limit was not met"
    except BaseException:
        _unlimited()
    state = _state(0.0)
    try:
        dcp.load(state, checkpoint_id=where, no_dist=True)
    except BaseException as error:
        return f"save raised; the old checkpoint is gone ({_short(error)})"
    return "save raised; the old checkpoint loads"


def _second_ours(where: Path) -> str:
    from torchrelay import JobRunner, open_checkpoint
    from torchrelay.errors import RelayError

    job = _job(_state(), 2, at=lambda epoch: _limit_files(4 * MIB) if epoch == 2 else None)
    try:
        JobRunner(job, where, max_failed_saves=1, keep_last=1, reuse=False).train()
        return "the limit was not met"
    except RelayError:
        _unlimited()
    found = open_checkpoint(where).load_tensors("small")["small"]
    return "save raised; the old epoch loads" if bool((found == 1).all()) else "save raised; other bytes"


# One bit of a stored tensor is flipped


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _bit_dcp(where: Path) -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(), checkpoint_id=where, no_dist=True)
    _flip(where / "__0_0.distcp")
    state = _state(0.0)
    try:
        dcp.load(state, checkpoint_id=where, no_dist=True)
    except BaseException as error:
        return f"load raised {_short(error)}"
    return "loads" if torch.equal(state["large"], _state()["large"]) else "loads other numbers, no error"


def _bit_ours(where: Path) -> str:
    from torchrelay import JobRunner, open_checkpoint
    from torchrelay.errors import DamagedError

    JobRunner(_job(_state(), 1), where, reuse=False).train()
    (file,) = where.glob("checkpoints/data/e00000001-*/*.safetensors")
    _flip(file)
    try:
        open_checkpoint(where, epoch=1).load_tensors("large")
    except DamagedError as error:
        named = "names block and file" if "block 4 of large" in str(error) and file.name in str(error) else ""
        JobRunner(_job(_state(), 2), where).train()
        return f"load {named or 'raises'}; a run falls back to the epoch before"
    return "loads"


# Ranks have state of their own under one name


def _own_dcp(where: Path) -> str:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dcp.save({"rng": torch.tensor([rank]), "pos": 10 + rank}, checkpoint_id=where)
    state = {"rng": torch.tensor([-1]), "pos": -1}
    dcp.load(state, checkpoint_id=where)
    right = torch.tensor([int(state["rng"].item() == rank), int(state["pos"] == 10 + rank)])
    dist.all_reduce(right)
    dist.destroy_process_group()
    if int(right.min()) == 2:
        return "each rank has its own"
    return f"of 2 ranks {int(right[0])} has its own tensor, {int(right[1])} its own number; no error"


def _own_ours(where: Path) -> str:
    import torch

    import torchrelay

    with torchrelay.init() as session:
        for epochs in (1, 2):
            job = torchrelay.Job("own")
            job.blobs(own=lambda ctx: torch.tensor([ctx.rank]), scope="rank")

            @job.epoch
            def check(ctx: Any) -> None:
                if int(ctx["own"].item()) != ctx.rank:
                    raise ValueError("not its own")

            job.stop_when(torchrelay.max_epochs(epochs))
            torchrelay.JobRunner(job, where).train(session)
    return "each rank has its own"


# A tensor is cut in strides, as FSDP2 over tensor parallel or a view of a column-wise shard has it


def _strided(where: Path) -> Any:
    import torch
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    local = whole.reshape(2, 2, 2)[:, mesh.get_local_rank()].reshape(4).contiguous()
    return DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)


def _strided_dcp(where: Path) -> str:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    tensor = _strided(where)
    before = tensor.to_local().clone()
    try:
        dcp.save({"w": tensor}, checkpoint_id=where)
        tensor.to_local().zero_()
        dcp.load({"w": tensor}, checkpoint_id=where)
    except BaseException as error:
        return f"save raised {_short(error)}"
    return "is restored" if bool((tensor.to_local() == before).all()) else "other numbers come back"


def _strided_ours(where: Path) -> str:
    import torch

    import torchrelay

    with torchrelay.init() as session:
        tensor = _strided(where)
        job = torchrelay.Job("strided", blobs={"w": tensor})
        job.epoch(lambda ctx: None)
        job.stop_when(torchrelay.max_epochs(1))
        torchrelay.JobRunner(job, where).train(session)
    found = torchrelay.open_checkpoint(where).load_tensors("w")["w"]
    return "is restored" if torch.equal(found, torch.arange(8.0)) else "other numbers come back"


# Metadata come from somebody else


class _Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (self.path,))


def _pickle_dcp(where: Path) -> str:
    import pickle  # noqa: TID251 - what somebody else may have written

    import torch.distributed.checkpoint as dcp

    dcp.save(_state(), checkpoint_id=where / "a", no_dist=True)
    (where / "a/.metadata").write_bytes(pickle.dumps(_Payload(str(where / "was run"))))
    try:
        dcp.load(_state(0.0), checkpoint_id=where / "a", no_dist=True)
    except BaseException as error:
        ran = "its code was run" if (where / "was run").exists() else "its code was not run"
        return f"{ran}, then {_short(error)}"
    return "loads"


def _pickle_ours(where: Path) -> str:
    import pickle  # noqa: TID251 - what somebody else may have written

    from torchrelay import JobRunner, open_checkpoint
    from torchrelay.errors import RelayError

    JobRunner(_job(_state(), 1), where / "a", reuse=False).train()
    for file in (where / "a").rglob("manifest.json"):
        file.write_bytes(pickle.dumps(_Payload(str(where / "was run"))))
    try:
        open_checkpoint(where / "a")
    except RelayError as error:
        ran = "its code was run" if (where / "was run").exists() else "its code was not run"
        return f"{ran}; {_short(error)}"
    return "opens"


# A file of a checkpoint in Hugging Face's form is missing


def _hole_dcp(where: Path) -> str:
    import torch
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _three_files(where)
    (where / "model-00002-of-00003.safetensors").unlink()
    state = {"w": torch.full((6, 2), -99.0)}
    try:
        load(state, storage_reader=HuggingFaceStorageReader(str(where)), no_dist=True)
    except BaseException as error:
        return f"load raised {_short(error)}"
    holes = int((state["w"] == -99).any(dim=1).sum())
    return f"loads; {holes} of 6 rows keep their old values; no error" if holes else "loads"


def _three_files(where: Path) -> None:
    """Rows of one tensor, two in each file, as torch's own writer places shards."""
    import json

    from safetensors.torch import save_file

    for number in range(3):
        import torch

        place = {"w": {"saved_offsets": [2 * number, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(place), "DCP_VERSION": "1.0"}
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({"w": torch.full((2, 2), float(number))}, where / name, metadata=metadata)


def _hole_ours(where: Path) -> str:
    import torch

    import torchrelay
    from torchrelay.errors import RelayError

    with torchrelay.LocalSession([f"trainer_{rank}" for rank in range(3)]) as session:
        job = torchrelay.Job("hole")
        job.blobs(w=lambda ctx: torch.nn.Linear(1024, 1024, bias=False), scope="replicated")
        job.stop_when(torchrelay.max_epochs(1))
        job.epoch(lambda ctx: None)
        torchrelay.JobRunner(job, where).train(session)
    tries = sorted((where / "checkpoints/data").glob("e00000000-*/trainer_1*.safetensors"))
    tries[0].unlink()
    try:
        torchrelay.open_checkpoint(where, epoch=1).load_tensors("*")
    except RelayError as error:
        named = "which names the file" if tries[0].name in str(error) else "without the file's name"
        return f"load raised {_short(error)}, {named}"
    return "loads"


CASES = (
    Case("full", "a file cannot be written to its end (quota, full disk)", 1, _full_dcp, _full_ours),
    Case("second", "the second save into a directory does not finish", 1, _second_dcp, _second_ours),
    Case("bit", "one bit of a stored tensor is flipped", 1, _bit_dcp, _bit_ours),
    Case("own", "two ranks have different state under one name", 2, _own_dcp, _own_ours),
    Case(
        "hole",
        "one of three files of a tensor is missing (DCP: its Hugging Face reader)",
        1,
        _hole_dcp,
        _hole_ours,
    ),
    Case(
        "strided",
        "a tensor is cut in strides (FSDP2 x tensor parallel, views)",
        2,
        _strided_dcp,
        _strided_ours,
    ),
    Case("pickle", "the metadata come from an untrusted source", 1, _pickle_dcp, _pickle_ours),
)
