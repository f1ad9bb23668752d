"""Which leaves may be copied behind the next step: what only a known optimizer writes.

Module buffers change in forward, averages and counters whenever the program likes; parameters and
state tensors of stock optimizers change in `step` alone, and before that stands the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.asynchronous.copying import is_plain
from torchrelay.checkpoint.state.dtensor import is_sharded, memory_of_shard
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.gate import takes_gate
from torchrelay.checkpoint.state.leaves.module import parts_of
from torchrelay.checkpoint.state.leaves.optimizer import parameters, state_prefix

Find = Callable[[], Any]
"""Finds the tensor again, as its owner holds it now: of a sharded one the local part."""


def late_leaves(
    objects: Mapping[str, Any], names: Mapping[int, str] | None = None, *, above_bytes: int = -1
) -> dict[str, Find]:
    """The leaves of a node that only registered stock optimizers write, and how to find each again.

    `names` are those of the parameters by id, where they are known; of the optimizers' state only tensors
    of more bytes than `above_bytes` are looked at.

    Left out is what is written elsewhere than in a step that passes the hooks of `torch.optim`:
    parameters that step inside of backward or in CUDA graphs (`capturable`), inference tensors,
    subclasses of Tensor other than DTensor, parameters of scripted modules, whose `load_state_dict` takes no
    gate, weights that a forward pass normalises (`max_norm` of embeddings), and all parameters that an
    unknown optimizer holds too.
    """
    optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
    names = names or parameter_names(objects)
    foreign = {
        id(one) for other in optimizers.values() if not waits_at_the_gate(other) for one in parameters(other)
    }
    ungated = _ungated(objects)
    found: dict[str, Find] = {}
    for blob, optimizer in optimizers.items():
        for parameter in parameters(optimizer):
            if id(parameter) in foreign or not _settled(parameter):
                continue
            name = names[id(parameter)]
            if id(parameter) not in ungated:
                found[name] = partial(_memory_of, parameter)
            prefix = f"{state_prefix(blob)}{name}."
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.nbytes > above_bytes and _settled(value):
                    found[f"{prefix}{key}"] = partial(_state_of, optimizer, parameter, key)
    return found


def _ungated(objects: Mapping[str, Any]) -> set[int]:
    """The parameters, by id, that a module writes without a gate: in `load_state_dict` or in `forward`."""
    modules = (value for value in objects.values() if isinstance(value, nn.Module))
    parts = [part for module in modules for part in parts_of(module)]
    found = {id(one) for part in parts if not takes_gate(part) for one in part.parameters()}
    return found | {id(part.weight) for part in parts if isinstance(part, _NORMALISING) and part.max_norm}


_NORMALISING = (nn.Embedding, nn.EmbeddingBag)
"""With `max_norm` their forward pass scales the rows that it looks up."""


def waits_at_the_gate(optimizer: Optimizer) -> bool:
    """Whether every step of this optimizer passes the pre-step hooks, and nothing else of it writes."""
    stock = type(optimizer).__module__.startswith("torch.optim.")
    graphs = any(group.get("capturable") for group in optimizer.param_groups)
    hooked = getattr(type(optimizer).step, "hooked", False)
    in_backward = any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters(optimizer))
    return stock and bool(hooked) and not graphs and not in_backward


def _settled(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, of a sharded one its local part, is its content in order."""
    memory = _memory_of(tensor)
    return is_plain(memory) and not memory.is_inference()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of_shard(tensor) if is_sharded(tensor) else tensor


def _state_of(optimizer: Optimizer, parameter: torch.Tensor, key: str) -> Any:
    found = optimizer.state.get(parameter, {}).get(key)
    return _memory_of(found) if isinstance(found, torch.Tensor) else found
