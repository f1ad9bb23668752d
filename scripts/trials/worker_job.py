"""The job of the worker hunt: a small training whose samples come out of worker processes.

    python scripts/trials/worker_job.py RUN WHAT

WHAT is the JSON of a `Program`. Rank 0 prints `at EPOCH STEP` in every step, and `bits DIGEST` at the end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from window_hunt import digest

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs

EPOCHS, SAMPLES, BATCH = 3, 40, 4


@dataclass(frozen=True)
class Program:
    """Whose loader, how it starts workers, whether they stay, whether they are greeted; seconds of a step."""

    loader: str = "EpochLoader"
    method: str = "fork"
    persistent: bool = False
    greeted: bool = True
    step_secs: float = 0.0
    asynchronous: bool = False

    def __str__(self) -> str:
        said = ", persistent" if self.persistent else ""
        return f"{self.loader}, {self.method}{said}" + (", worker_init_fn" if self.greeted else "")

    def text(self) -> str:
        """What the job takes as WHAT."""
        return json.dumps(asdict(self))


class Samples(Dataset[torch.Tensor]):
    """Numbers with noise of all three streams, where it is of one epoch alone (`noisy`)."""

    def __init__(self, *, noisy: bool) -> None:
        self.noisy = noisy
        self.all = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.noisy:
            return self.all[index]
        noise = random.random() + float(np.random.rand())
        return self.all[index] + 0.1 * torch.rand(6) + 0.01 * noise


def greet(number: int) -> None:
    """What programs do in a `worker_init_fn`."""
    seed = torch.initial_seed() % (1 << 32)
    np.random.seed((seed + number) % (1 << 32))
    random.seed(seed + number)


def loader_of(program: Program) -> Any:
    """The loader that the program trains over."""
    # Noise of workers that stay hangs on all that they made before; a resume begins them anew.
    own = program.loader == "EpochLoader"
    data = Samples(noisy=own or not program.persistent)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": program.method}
    options |= {"persistent_workers": program.persistent}
    options |= {"worker_init_fn": greet} if program.greeted else {}
    if own:
        return EpochLoader(data, batch_size=BATCH, **options)
    kind: Any = DataLoader
    if program.loader == "StatefulDataLoader":
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options["generator"] = torch.Generator() if program.persistent else None
    if world > 1:
        return kind(data, batch_size=BATCH // world, sampler=DistributedSampler(data), **options)
    return kind(data, batch_size=BATCH, shuffle=not program.persistent, **options)


def train(run: str, program: Program, tell: Callable[[str], None]) -> Any:
    """One start; returns its result, or raises what `train()` raises."""
    torchrelay.seed(0)
    rank = torchrelay.init().env.rank if torch.distributed.is_torchelastic_launched() else 0
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained, loader = data_parallel(model), loader_of(program)
    blobs = {"model": model, "optimizer": optimizer}
    job = Job("workers", blobs=blobs if type(loader) is DataLoader else {**blobs, "loader": loader})

    @job.epoch
    def epoch(ctx: Any) -> None:
        for batch in ctx.steps(loader):
            inputs = batch if torch.is_tensor(batch) else batch[0]
            optimizer.zero_grad()
            trained(inputs).square().mean().backward()
            optimizer.step()
            if rank == 0:
                tell(f"at {ctx.epoch} {ctx.step}")
            time.sleep(program.step_secs)

    job.stop_when(max_epochs(EPOCHS))
    runner = JobRunner(job, run, best=None, code=False, asynchronous=program.asynchronous)
    result = runner.train()
    if rank == 0 and result.status == "FINISHED":
        tell(f"bits {digest(model, optimizer)}")
    return result


def main(run: str, what: str) -> None:
    """Be the program that people start."""
    from torchrelay.runners.training.exit import code_of_result, run_and_leave

    torch.set_num_threads(1)

    def tell(text: str) -> None:
        print(text, flush=True)

    run_and_leave(lambda: code_of_result(train(run, Program(**json.loads(what)), tell)))


if __name__ == "__main__":
    main(*sys.argv[1:])
