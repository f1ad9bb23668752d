"""The state of the ranks: a network, sharded or not, with or without AdamW; every tensor by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MOST_WIDTH = 1024


class Block(nn.Module):
    """Two layers that tensor parallelism can pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks with about so many bytes of parameters together."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        width = MOST_WIDTH
        while width > 16 and 16 * width * width * 4 > nbytes:
            width //= 2
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(max(1, round(nbytes / (16 * width * width)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class State:
    """What is saved; `tensors` are all of it, as they lie in the live objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    @property
    def objects(self) -> dict[str, Any]:
        """What a user of torchrelay registers."""
        return {"model": self.model} | ({"optimizer": self.optimizer} if self.optimizer else {})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the parameters and of the optimizer's state."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            state = self.optimizer.state[parameter] if self.optimizer else {}
            found |= {f"{name}.{key}": one for key, one in state.items() if isinstance(one, torch.Tensor)}
        return found


def build(layout: str, nbytes: int, *, optimizer: bool) -> State:
    """A state of about so many bytes; `layout` is plain, fsdp, or tp (2 ranks, under FSDP2)."""
    model = Net(nbytes // 3 if optimizer else nbytes)
    if layout == "fsdp":
        _shard(model)
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fs", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        _shard(model, mesh=mesh["fs"])
    return State(model, _with_state(model) if optimizer else None)


def _shard(model: Net, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _with_state(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made its state."""
    found = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found.step()
    found.zero_grad(set_to_none=True)
    return found
