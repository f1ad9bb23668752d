"""Run by torchrun: leaves on device meshes that differ in their names alone, beside a stage of each rank.

named_meshes.py <folder>     saves two epochs, loads the first, and compares
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs


def main(folder: Path) -> None:
    session = torchrelay.init()
    ranks = session.peers.size
    meshes = {name: init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,)) for name in ("fsdp", "ep")}
    blobs = {name: distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]) for name, mesh in meshes.items()}
    blobs[f"stage{session.peers.rank}"] = torch.ones(3)
    job = Job("named", blobs=blobs)

    @job.epoch
    def add(ctx: Context) -> None:
        for blob in blobs.values():
            blob += 1

    job.stop_when(max_epochs(2))
    runner = JobRunner(job, folder / "run")
    runner.train(session)
    assert runner.load_blobs_from_checkpoints([*meshes], 1, session)
    for blob in meshes:
        assert torch.equal(blobs[blob].full_tensor(), torch.arange(8.0) + 1), blobs[blob]
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
