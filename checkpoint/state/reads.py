"""Define reads of stored tensors into live or new memory, and how their memory is laid out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from torchrelay.checkpoint.format.dtypes import as_copied, by_name, torch_dtype
from torchrelay.checkpoint.format.mesh_geometry import LocalTarget
from torchrelay.checkpoint.state.leaf import LeafSpec, is_sharded, order_of
from torchrelay.checkpoint.state.wrappers import is_wrapper


class Read:
    """One tensor to be read: the stored leaf `leaf`, into `memory()`.

    `live` is a tensor of an object, `destination` the same if it can be written in place; otherwise
    `memory()` is new, and the restoration copies it into `live`. With a `target` the memory takes only these
    boxes of the leaf. A new tensor made of it gets the type `becomes`.
    """

    def __init__(
        self,
        leaf: str,
        spec: LeafSpec,
        live: torch.Tensor | None = None,
        target: LocalTarget | None = None,
        *,
        becomes: torch.dtype | None = None,
    ) -> None:
        self.leaf = leaf
        self.spec = spec
        self.live = live
        as_stored = live is not None and spec.dtype == dtype_name(live.dtype)
        in_order = live is not None and live.is_cpu and live.is_contiguous()
        flipped = live is not None and (live.is_conj() or live.is_neg())
        self.destination = live if as_stored and in_order and not flipped else None
        self.target = target
        self.becomes = becomes
        self._placed: dict[str, torch.Tensor] | None = None

    def memory(self) -> torch.Tensor:
        """The contiguous CPU tensor to fill; fresh memory is allocated at the first call."""
        if self.destination is not None:
            return self.destination
        if not hasattr(self, "_fresh"):
            self._fresh = self.fresh()
        return self._fresh

    def fresh(self) -> torch.Tensor:
        """New memory of the size that is to be filled."""
        shape = self.spec.shape if self.target is None else self.target.shape
        with outside_inference_mode():
            return torch.empty(shape, dtype=self.dtype, device="cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The stored element type; a live tensor may have another one."""
        return torch_dtype(by_name(self.spec.dtype or ""))

    def settle(self) -> None:
        """Copy new memory into the live tensor."""
        if self.live is not None and hasattr(self, "_fresh"):
            put(self.live, self._fresh)

    def on(self, device: torch.device | None) -> torch.Tensor:
        """The memory, once all of it is read, on a device: one shared tensor per device.

        Without a device it goes to that of the saved tensor, see `device_for`.
        """
        where = str(device or device_for(self.spec) or "cpu")
        self._placed = {} if self._placed is None else self._placed
        if where not in self._placed:
            found = self.memory().to(where, self.becomes or self.dtype)
            self._placed[where] = found
            if self.live is None and self.spec.order is not None:
                put(new := empty(self.spec, where, found.dtype), found)
                self._placed[where] = new
        return self._placed[where]


def device_for(spec: LeafSpec) -> torch.device | None:
    """The GPU that a new tensor goes to: this process's for a tensor saved on a GPU.

    None, for the CPU, if it was saved there, or if this process does not compute on GPUs yet.
    """
    if spec.device is None or not torch.cuda.is_initialized():
        return None
    distance = int(spec.device.partition(":")[2] or 0)
    return torch.device("cuda", (torch.cuda.current_device() + distance) % torch.cuda.device_count())


def empty(
    spec: LeafSpec, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """New memory for a whole tensor, in the memory order in which it was saved."""
    order = range(len(spec.shape)) if spec.order is None else spec.order
    dtype = dtype or torch_dtype(by_name(spec.dtype or ""))
    with outside_inference_mode():
        return torch.empty_permuted(spec.shape, list(order), dtype=dtype, device=device)


def outside_inference_mode() -> AbstractContextManager[object]:
    """Context without inference mode, because loaded tensors are trained afterwards."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def with_strides_of(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if a plain model of its shape has other strides: fused kernels need equal ones."""
    plain = type(tensor) is torch.Tensor and tensor.layout is model.layout is torch.strided
    if (
        not plain
        or is_sharded(model)
        or is_wrapper(model)
        or tensor.shape != model.shape
        or tensor.stride() == model.stride()
    ):
        return tensor
    with outside_inference_mode():
        put(new := torch.empty_like(model, dtype=tensor.dtype, device=tensor.device), tensor)
        return new


def lay_as_saved(live: torch.Tensor, spec: LeafSpec) -> None:
    """Give a tensor the memory order in which it was saved, in new memory."""
    if order_of(live) != spec.order:
        put(new := empty(spec, live.device, live.dtype), live)
        take_memory_of(new, live)


def take_memory_of(other: torch.Tensor, live: torch.Tensor) -> None:
    """Give a live tensor the memory of another one; hooks on its gradient, as those of DDP, stay."""
    if live.is_inference():
        with torch.inference_mode():
            live.set_(other)  # type: ignore[call-overload]
    else:
        live.data = other


def same_form(spec: LeafSpec, live: torch.Tensor) -> bool:
    """Whether a stored leaf is a tensor of this shape and element type."""
    return spec.kind == "tensor" and spec.dtype == dtype_name(live.dtype) and spec.shape == live.shape


def form(tensor: torch.Tensor) -> str:
    """Element type and shape as `LeafSpec` prints them: float32[2, 3]."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name, as in a `LeafSpec`."""
    return str(dtype).removeprefix("torch.")


def put(live: torch.Tensor, content: torch.Tensor) -> None:
    """Copy into a live tensor, also into an inference tensor."""
    with torch.inference_mode() if live.is_inference() else nullcontext():
        as_copied(live).copy_(as_copied(content))
