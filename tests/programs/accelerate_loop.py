"""A loop of accelerate, killed at `--kill EPOCH.STEP`; it saves within epochs `--every` so many steps."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from torchrelay.integrations.accelerate import AcceleratorCheckpointer

EPOCHS = 3

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill", default="")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--dispatch", action="store_true")
    given = parser.parse_args()
    set_seed(3)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=given.seedable, dispatch_batches=given.dispatch or None
        ),
    )
    if given.sharded:  # FSDP 2. accelerate refuses it on CPUs, where torch can do it
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
    data = TensorDataset(torch.randn(70, 6), torch.randn(70, 1))
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.LayerNorm(8) if given.sharded else torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(8, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
    loader = DataLoader(data, batch_size=given.batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    blobs = dict(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
    ckpt = AcceleratorCheckpointer(accelerator, given.folder, blobs)
    start = ckpt.resume()
    print(f"start {start}", flush=True)
    for epoch in range(start.epoch + 1 if start else 1, EPOCHS + 1):
        for x, y in ckpt.batches(loader):
            print(f"batch {epoch} {ckpt.step} {' '.join(map(str, x[:, 0].tolist()))}", flush=True)
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if given.every and ckpt.step % given.every == 0:
                ckpt.save(epoch - 1, ckpt.step)
            if given.kill == f"{epoch}.{ckpt.step}" and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(epoch, asynchronous=True)
    ckpt.close()
    inner = accelerator.unwrap_model(model)
    parts = [*inner.state_dict().values(), torch.rand(1)]
    parts += [optimizer.state[one][name] for one in inner.parameters() for name in ("exp_avg", "exp_avg_sq")]
    assert given.sharded == any(isinstance(one, DTensor) for one in parts)
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in parts]
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in parts)).hexdigest()
    print(f"digest {digest} rate {scheduler.get_last_lr()}", flush=True)
