"""Run by torchrun: what DDP's buckets do to the bits of a run that is resumed in the middle."""

import copy
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.jobs.data.data_parallel import bare_ddp_instances, broadcast_buffers, data_parallel, drop

STEPS, CUT = 6, 3


class Crossed(nn.Module):
    """Uses its layers in another order than it registers them, as real models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (4, 0, 5, 2, 1, 3):
            x = torch.tanh(self.layers[index](x))
        return x


def train(wrap, module: nn.Module, optimizer_state: dict | None, steps: range) -> tuple[nn.Module, dict]:
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if optimizer_state is not None:
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    wrapped = wrap(module)
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + distributed.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randn(8, 256, generator=generator)).square().sum().backward()
        optimizer.step()
    return module, optimizer.state_dict()


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def resumed_equals_uninterrupted(wrap) -> bool:
    torch.manual_seed(0)
    fresh = Crossed()
    whole, _ = train(wrap, fresh, None, range(STEPS))
    half, state = train(wrap, fresh, None, range(CUT))
    resumed, _ = train(wrap, half, state, range(CUT, STEPS))
    return digest(resumed) == digest(whole)


class Normed(nn.Module):
    """A module with buffers in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def registry() -> dict:
    ours, bare, silent = Normed(), Normed(), Normed()
    wrapper, bare_wrapper = data_parallel(ours), DistributedDataParallel(bare)
    kept_alone = data_parallel(silent, broadcast_buffers=False)
    averaging = copy.deepcopy(wrapper)
    for one in (wrapper, bare_wrapper, kept_alone):
        one(torch.ones(2, 2)).sum().backward()
    copied = copy.deepcopy(wrapper)
    sent = {id(buffer) for buffer in broadcast_buffers()}
    found = {
        "not_sent_by_what_never_ran": not {id(buffer) for buffer in averaging.buffers()} & sent,
        "not_sent_by_a_copy_of_what_ran": not {id(buffer) for buffer in copied.buffers()} & sent,
        "sent_by_ours": {id(buffer) for buffer in ours.buffers()} <= sent,
        "sent_by_bare": {id(buffer) for buffer in bare.buffers()} <= sent,
        "sent_of_parts": {id(buffer) for buffer in ours.norm.buffers()} <= sent,
        "not_sent": not {id(buffer) for module in (silent, Normed()) for buffer in module.buffers()} & sent,
        "alive": wrapper is not kept_alone,
        "bare": [w is bare_wrapper for w in bare_ddp_instances()] == [True],
    }
    drop()
    found["dropped_is_still_not_bare"] = [w is bare_wrapper for w in bare_ddp_instances()] == [True]
    return found


def main() -> None:
    """Write what was found."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = registry()
    found["bare_resumes"] = resumed_equals_uninterrupted(DistributedDataParallel)
    found["ours_resumes"] = resumed_equals_uninterrupted(data_parallel)
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # live DDP objects may abort a process that ends in the ordinary way


if __name__ == "__main__":
    main()
