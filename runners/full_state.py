"""The whole state of a module under the names that its bare form has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WRAPPERS = frozenset({"module", "_orig_mod"})


def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Clone a module's state to the CPU; DTensors are gathered, which all ranks must do together.

    Names are those of the bare module: what DistributedDataParallel (`module.`) and torch.compile
    (`_orig_mod.`) put before or between them is taken off; a submodule that is itself called `module`
    keeps its name. Extra states that are no tensors are handed out as they are.
    """
    wrappers = _wrapper_paths(module)
    return {_bare(name, wrappers): _on_cpu(value) for name, value in module.state_dict().items()}


def _wrapper_paths(module: torch.nn.Module) -> frozenset[str]:
    """The paths of children that stand for their parent: `module` in DDP, `_orig_mod` when compiled."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    found = set()
    for path, part in module.named_modules(remove_duplicate=False):
        wraps = isinstance(part, (DistributedDataParallel, DataParallel)) or hasattr(part, "_orig_mod")
        for name in _WRAPPERS & part._modules.keys() if wraps else ():
            found.add(f"{path}.{name}" if path else name)
    return frozenset(found)


def _bare(name: str, wrappers: frozenset[str]) -> str:
    parts = name.split(".")
    return ".".join(part for index, part in enumerate(parts) if ".".join(parts[: index + 1]) not in wrappers)


def _on_cpu(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True)
