"""FSDP1 modules as a blob: torch's own `get_state_dict` and `set_state_dict` between the module and us."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.errors import BlobError, UsageError


class FsdpState:
    """The state of a module wrapped by FullyShardedDataParallel, and of its optimizer; see `fsdp_state`."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        if not isinstance(module, nn.Module) or not isinstance(optimizer, Optimizer | None):
            raise UsageError("fsdp_state is given a module and, if there is one, its optimizer")
        self.module = module
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The sharded state by parameter names; all ranks must ask together. Changes nothing.

        An optimizer before its first step has no state, and torch would make that step to get some: then
        only its options are given. Raises BlobError where FSDP was given no device mesh.
        """
        if self.optimizer is None or not self.optimizer.state:
            return {"model": self._model_state(), "optimizer": None, "options": self._options()}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        found = get_optimizer_state_dict(self.module, self.optimizer)
        return {"model": self._model_state(), "optimizer": _checked(found), "options": None}

    def state_dict_to_load_into(self) -> dict[str, Any]:
        """As `state_dict`, of an optimizer after its first step: what a load has to place."""
        if self.optimizer is None or self.optimizer.state:
            return self.state_dict()
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        options = self._options()
        try:
            found = get_optimizer_state_dict(self.module, self.optimizer)
        finally:
            self.optimizer.state.clear()
            self._set_options(options)
        return {"model": self._model_state(), "optimizer": _checked(found), "options": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state of module and optimizer; all ranks must ask together."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        set_model_state_dict(self.module, dict(state["model"]))
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        if state["optimizer"] is not None:
            set_optimizer_state_dict(self.module, self.optimizer, _unshared(state["optimizer"]))
        else:
            self._set_options(state["options"])

    def _model_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(_checked(get_model_state_dict(self.module)))

    def _options(self) -> list[dict[str, Any]]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, options, strict=True):
                group.update(values)


def fsdp_state(module: nn.Module, optimizer: Optimizer | None = None) -> FsdpState:
    """An FSDP1 module (`FullyShardedDataParallel`) and its optimizer as one blob.

    blobs=dict(net=torchrelay.fsdp_state(model, optimizer))

    Every rank stores its shards, as for FSDP2, and an epoch loads onto any number of ranks, also into the
    `fsdp_state` of a plain module. FSDP1 shows its shards only through collectives: this blob's saves and
    loads gather one wrapped unit after another, on all ranks together, over the training's group. FSDP must
    have been given `device_mesh=`. FSDP2 (`fully_shard`) needs none of this: register the module itself.
    """
    return FsdpState(module, optimizer)


def _checked(state: Any) -> Any:
    """Refuse shards that say no mesh."""
    if "ShardedTensor" in _class_names(state):
        raise BlobError(
            "FSDP1 without a device mesh gives ShardedTensors, which cannot be stored: wrap with "
            'FullyShardedDataParallel(..., device_mesh=init_device_mesh("cuda", (world_size,)))'
        )
    return state


def _unshared(state: Any) -> Any:
    """A copy in which no plain tensor stands twice.

    The parameters of one flat parameter share its `step`; where parameters are optimized one by one,
    each of them would count it up.
    """
    if isinstance(state, Mapping):
        return {key: _unshared(value) for key, value in state.items()}
    return state.clone() if type(state) is torch.Tensor else state


def _class_names(state: Any) -> set[str]:
    if not isinstance(state, Mapping):
        return {type(state).__name__}
    return {name for value in state.values() for name in _class_names(value)}
