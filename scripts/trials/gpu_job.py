"""The training that `gpu-check` interrupts: CUDA random state in every step, saved behind the next one.

    python gpu_job.py RUN DEVICE EPOCHS MIB [HOLD]     alone, or under torchrun with `DEVICE` cuda or cpu

In epoch HOLD every process says its id after two steps, and waits to be killed. Prints a line when an epoch
begins, and at the end the digest of all that was trained: of weights, averages, optimizer and a number drawn
last.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Before CUDA begins: without it cuBLAS may add up in another order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from gpu_cases import digest

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, data_parallel, max_epochs

WIDTH, BATCH, SAMPLES = 64, 16, 64
HOLD_SECS = 300.0


def train(run: Path, device: str, epochs: int, mib: int = 1, hold: int = 0) -> str:
    """Train up to `epochs`, from wherever the run is; the digest of the state."""
    torch.use_deterministic_algorithms(True)
    session = torchrelay.init(seed=5, device=device)
    where = session.device
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    wide = max(WIDTH, mib * (1 << 20) // (3 * 4 * WIDTH * 2))  # with two states of AdamW
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, wide), torch.nn.BatchNorm1d(wide), torch.nn.Dropout(0.2),
        torch.nn.ReLU(), torch.nn.Linear(wide, WIDTH),
    ).to(where)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = EpochLoader((data,), batch_size=BATCH)
    trained = data_parallel(model)
    job = Job("gpu-check", blobs=dict(model=model, optimizer=optimizer, loader=loader))

    @job.epoch
    def learn(ctx: Context) -> None:
        print(f"epoch {ctx.epoch} begins", flush=True)
        for number, batch in enumerate(ctx.steps(loader)):
            if (ctx.epoch, number) == (hold, 2):
                print(f"holding {os.getpid()}", flush=True)
                time.sleep(HOLD_SECS)
            (sample,) = batch
            sample = sample.to(where)
            noisy = sample + 0.1 * torch.randn(sample.shape, device=where)  # the device's own random state
            loss = (trained(noisy) - sample).square().mean()
            optimizer.zero_grad()
            (loss * batch.weight).backward()
            optimizer.step()
            ctx.log("loss", loss)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, asynchronous=True, keep_last=3).train(session)
    found = digest({"model": model, "optimizer": optimizer}, torch.rand(4, device=where))
    session.close()
    return found


if __name__ == "__main__":
    to, on, *numbers = sys.argv[1:]
    told = train(Path(to), on, *map(int, numbers))
    if os.environ.get("RANK", "0") == "0":
        print(f"digest {told}", flush=True)
