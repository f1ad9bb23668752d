"""Record calls of modules, to check later that the same call gives the same bits.

    replay/epoch_<k>.safetensors     a file of `save_blobs`: arguments, outputs with the weights of that epoch
                                     in `eval` mode, and the settings that affect bits

Written before the epoch is saved, so that every saved epoch has one; old files are deleted afterwards. Only
rank 0 records, and alone: modules with sharded tensors cannot be called that way, which is reported once.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blob_files import save_blobs
from torchrelay.errors import UsageError
from torchrelay.jobs.data.loader import Batch, MappingBatch, make_batch
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import Json
from torchrelay.runners.training.plan import Recipe

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from torchrelay.runners.training.journal import Journal


_PLAIN = (type(None), bool, int, float, str)


def taken_apart(tree: Any, tensors: list[torch.Tensor]) -> Json:
    """Return the structure of a tree, and append CPU copies of its tensors. UsageError for other objects."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach().to("cpu", copy=True).contiguous())
        return ["tensor", len(tensors) - 1]
    if type(tree) in _PLAIN:
        return ["value", tree]
    if isinstance(tree, (Batch, MappingBatch)):
        inside = [taken_apart(one, tensors) for one in (tree.data, tree.indices)]
        return ["batch", *inside, float(tree.weight)]
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return ["dict", [[name, taken_apart(one, tensors)] for name, one in tree.items()]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [taken_apart(one, tensors) for one in tree]]
    raise UsageError(f"cannot record a {type(tree).__name__}: expected tensors, numbers, texts or containers")


def put_together(form: Json, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
    """Rebuild a tree with its tensors on a device; a mapping becomes a dict."""
    match form:
        case ["tensor", int(number)]:
            return tensors[number].to(device)
        case ["value", value]:
            return value
        case ["batch", data, indices, float(weight)]:
            parts = [put_together(one, tensors, device) for one in (data, indices)]
            return make_batch(parts[0], weight=weight, indices=parts[1])
        case ["dict", [*items]]:
            return {str(name): put_together(one, tensors, device) for name, one in items}
        case [("list" | "tuple") as kind, [*items]]:
            found = [put_together(one, tensors, device) for one in items]
            return found if kind == "list" else tuple(found)
    raise UsageError(f"invalid structure of inputs or outputs: {str(form)[:100]}")


SEED = 0
_MOST_THREADS = 1024  # limit for values read from files: more would end the process


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first tensor; the CPU without tensors."""
    for one in (*module.parameters(), *module.buffers()):
        return one.device
    return torch.device("cpu")


def play(module: nn.Module, form: Json, tensors: Sequence[torch.Tensor]) -> tuple[Json, list[torch.Tensor]]:
    """Call the module with recorded arguments; return structure and tensors of the outputs.

    Module, buffers and random streams are restored. Raises UsageError for outputs that cannot be recorded,
    and the errors of `forward`.
    """
    args, kwargs = put_together(form, tensors, device_of(module))
    modes = {inner: inner.training for inner in module.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    streams = RandomStreams.capture()
    torch.manual_seed(SEED)
    try:
        module.eval()
        with torch.no_grad():
            outputs = module(*args, **kwargs)
    finally:
        for inner, training in modes.items():
            inner.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        streams.restore()
    found: list[torch.Tensor] = []
    return taken_apart(outputs, found), found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two CPU tensors have the same type, shape and bytes, NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def settings_now(device: torch.device) -> dict[str, Any]:
    """Return the settings that affect bits, besides code, weights and inputs."""
    cuda = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


@contextmanager
def as_it_was(settings: dict[str, Any]) -> Iterator[None]:
    """Apply recorded settings while the block runs, as far as possible."""
    before = settings_now(torch.device("cpu"))
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    threads, precision = settings.get("threads"), settings.get("matmul_precision")
    if type(threads) is int and 0 < threads <= _MOST_THREADS:
        torch.set_num_threads(threads)
    if precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(str(precision))
    torch.use_deterministic_algorithms(settings.get("deterministic") is True)
    dtype = getattr(torch, str(settings.get("default_dtype")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)


FOLDER, FACTS = "replay", "replay"
MOST_BYTES = 256 << 20
"""Longer arguments are not recorded."""
KEPT = 2
"""Files to keep: the newest epoch may not get saved."""


class Recorder:
    """Recorder of one run; does nothing without recipes, without a run directory and on other ranks."""

    def __init__(self, recipes: Mapping[str, Recipe], run: RunDirectory | None, journal: Journal) -> None:
        self._recipes = dict(recipes)
        self._folder = None if run is None else run.path / FOLDER
        self._journal = journal
        self._modules: dict[str, nn.Module] = {}
        self._calls: dict[str, tuple[Json, list[torch.Tensor]]] = {}
        self._hooks: dict[str, RemovableHandle] = {}

    def watch(self, workspace: Workspace, rank: int) -> None:
        """Wait for the first call of each module; raises UsageError for names that are not modules."""
        for name in self._recipes:
            module = workspace.get(name)
            if not isinstance(module, nn.Module):
                raise UsageError(f"replay names {name!r}, which is not a registered module")
            if rank == 0 and self._folder is not None:
                self._modules[name] = module
                self._hooks[name] = module.register_forward_pre_hook(
                    partial(self._take, name), with_kwargs=True
                )

    def record(self, epoch: int) -> None:
        """Repeat the recorded calls with the current weights, and write the outputs."""
        if self._folder is None or not self._calls:
            return
        blobs: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        for name in list(self._calls):
            try:
                facts[name] = self._replay(name, blobs)
            except Exception as error:  # the user's forward may raise anything in `eval`
                self._skip(name, f"{type(error).__name__}: {error}")
        if not facts:
            return
        blobs[FACTS] = {"epoch": epoch, "attempt": self._journal.attempt, "calls": facts}
        try:
            save_blobs(self._folder / f"epoch_{epoch}.safetensors", blobs, overwrite=True)
            for old in files_of(self._folder.parent)[:-KEPT]:
                with suppress(OSError):
                    old[1].unlink()
        except Exception as error:  # a missing recording must not end the run
            self._journal.warn(f"the call of epoch {epoch} is not recorded: {error}")

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _take(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments of the first call."""
        self._hooks.pop(name).remove()
        try:
            if any(hasattr(one, "placements") for one in module.parameters()):
                raise UsageError("its parameters are sharded, and rank 0 cannot call it alone")
            tensors: list[torch.Tensor] = []
            form = taken_apart((tuple(args), dict(kwargs)), tensors)
            if (size := sum(one.nbytes for one in tensors)) > MOST_BYTES:
                raise UsageError(f"its arguments have {size} bytes, more than {MOST_BYTES}")
            self._calls[name] = form, tensors
        except Exception as error:
            self._skip(name, str(error))

    def _replay(self, name: str, blobs: dict[str, Any]) -> dict[str, Any]:
        """Repeat a call and return its record."""
        module, (form, inputs) = self._modules[name], self._calls[name]
        gives, outputs = play(module, form, inputs)
        for what, tensors in (("takes", inputs), ("gives", outputs)):
            for number, tensor in enumerate(tensors):
                blobs[f"{what}.{name}.{number}"] = tensor
        return {
            "recipe": self._recipes[name].to_json(),
            "takes": form,
            "gives": gives,
            "inputs": len(inputs),
            "outputs": len(outputs),
            "settings": settings_now(device_of(module)),
        }

    def _skip(self, name: str, why: str) -> None:
        """Record this module no more, with a warning."""
        self._calls.pop(name, None)
        self._journal.warn(f"no call of {name} is recorded for `verify --replay`: {why}")


def files_of(run: Path) -> list[tuple[int, Path]]:
    """Return the recorded calls of a run by epoch, ascending."""
    found = []
    for path in (run / FOLDER).glob("epoch_*.safetensors"):
        number = path.stem.removeprefix("epoch_")
        if number.isascii() and number.isdigit():
            found.append((int(number), path))
    return sorted(found)
