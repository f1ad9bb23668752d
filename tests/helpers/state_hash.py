"""SHA-256 of all state that a resumed run must share with the uninterrupted one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from torchrelay.jobs.random import RandomStreams


def sha256_of(thing: Any) -> str:
    """A digest of nested state: tensors by dtype, shape and bytes, mappings sorted, numbers exactly."""
    hashed = hashlib.sha256()
    _feed(hashed, thing)
    return hashed.hexdigest()


def state_of(objects: Mapping[str, Any], *, buffers: bool = True) -> dict[str, Any]:
    """The state of modules (without buffers where DDP may let them differ), optimizers and the like."""
    return {name: _state(thing, buffers) for name, thing in objects.items()}


def hash_of_node(
    objects: Mapping[str, Any], streams: RandomStreams | None = None, *, buffers: bool = True
) -> str:
    """Everything that one node has: its objects and its random states (by default the process's)."""
    coded = (streams or RandomStreams.capture()).encode()
    return sha256_of({"objects": state_of(objects, buffers=buffers), "random": coded})


def _state(thing: Any, buffers: bool) -> Any:
    if isinstance(thing, torch.nn.Module):
        found = {f"parameter {name}": value for name, value in thing.named_parameters()}
        return found | ({f"buffer {name}": value for name, value in thing.named_buffers()} if buffers else {})
    if isinstance(thing, dict):  # a registered group of objects
        return {key: _state(value, buffers) for key, value in thing.items()}
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _feed(hashed: Any, thing: Any) -> None:
    if isinstance(thing, torch.Tensor):
        plain = thing.detach().contiguous()
        hashed.update(f"tensor {plain.dtype} {tuple(plain.shape)} ".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(thing, Mapping):
        hashed.update(f"mapping {len(thing)} ".encode())
        for key in sorted(thing, key=repr):
            hashed.update(repr(key).encode())
            _feed(hashed, thing[key])
    elif isinstance(thing, (list, tuple)):
        hashed.update(f"{type(thing).__name__} {len(thing)} ".encode())
        for item in thing:
            _feed(hashed, item)
    else:
        hashed.update(f"{type(thing).__name__} {thing!r} ".encode())
