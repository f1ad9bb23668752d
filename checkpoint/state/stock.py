"""Objects whose leaves are listed by torch's code and ours alone: asked once more, they are as before.

A `state_dict` of somebody else may count its calls, make an iterator, or wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.jobs.session import Session

_SCHEDULERS = "torch.optim.lr_scheduler"
_FSDP2 = "torch.distributed.fsdp._fully_shard"
"""Its hooks only put sharded parameters into place; those of FSDP1 gather."""
_METHODS = ("state_dict", "get_extra_state", "_save_to_state_dict")


def all_stock(session: Session, members: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether every process has only such objects among the members of its nodes. All processes together."""
    spaces = [(session.workspace(place.name), members.get(place.name, {})) for place in session.local_nodes]
    try:
        here = all(is_stock(space[name]) for space, names in spaces for name in names if name in space)
    except Exception:  # an object's own `modules` or attributes: the others must be told all the same
        here = False
    return all(session.peers.exchange("rehearsal: whose code", here))


def is_stock(value: Any) -> bool:
    """Whether listing the leaves of a blob calls nothing but what is known to change nothing."""
    kind = kind_of(value)
    if kind is Kind.MODULE:
        return all(map(_is_stock_module, value.modules()))
    return kind is not Kind.STATEFUL or _module_of(getattr(type(value), "state_dict", None)) == _SCHEDULERS


def _is_stock_module(module: nn.Module) -> bool:
    own = all(getattr(type(module), name, None) is getattr(nn.Module, name) for name in _METHODS)
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return own and all(_module_of(hook).startswith(_FSDP2) for hook in hooks)


def _module_of(function: object) -> str:
    """Where a function is defined; of what is none, nowhere known."""
    return str(getattr(function, "__module__", None))
