"""Define reads of stored tensors into live or new memory, and rebuild stored trees that contain tensors.

Tensors that were shared in the saved value are shared again: with a live tensor, or a new one of another
value. An object's `load_state_dict` may write into its arguments: shared tensors get their content back
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import as_copied, by_name, torch_dtype
from torchrelay.checkpoint.format.manifest.layouts import LocalTarget
from torchrelay.checkpoint.format.value_decoding import ParameterName, decode
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, is_sharded, learning, order_of, stand_in
from torchrelay.checkpoint.state.wrappers import is_wrapper
from torchrelay.errors import DamagedError
from torchrelay.records import Json

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.restore.plan import Maker, RestorePlan


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


class LeafValue:
    """The value of a leaf; call it once everything is read.

    New tensors go to the device that it is called with. Those with the name of one in `models` are made like
    it: DTensors with its placements, subclasses of its class. The form is checked at construction.
    """

    def __init__(self, draft: RestorePlan, spec: LeafSpec, models: Mapping[str, torch.Tensor] | None) -> None:
        self._draft, self._spec, self._models = draft, spec, models or {}
        self._json: Json = draft.json(spec)
        self._made: dict[str, Maker] = {}
        self._specs: dict[str, LeafSpec] = {}
        decode(self._json, tensor=self._refer)

    def __call__(self, device: torch.device | None) -> Any:
        """Build the value; shared tensors are shared again."""
        found: dict[str, torch.Tensor] = {}

        def tensor(name: Json) -> torch.Tensor:
            if name not in found:
                spec, parameter = self._specs[str(name)], type(name) is ParameterName
                found[str(name)] = self._as_it_was(self._common(str(name), device), spec, parameter=parameter)
            return found[str(name)]

        return decode(self._json, tensor=tensor)

    def hand_over(self, load: Callable[[Any], object]) -> None:
        """Pass the value to `load`; shared tensors keep their content, whether or not it writes there."""
        with _unchanged([self._common(name, None) for name in self._specs if self._is_shared(name)]):
            load(self(None))

    def _refer(self, name: Json) -> None:
        """Note a tensor that the value refers to."""
        draft = self._draft
        inner = draft.specs.get(name) if isinstance(name, str) else None
        if name in draft.kept:
            draft.unlike(f"{self._spec.name} is a value that holds {name}, which cannot be left out alone")
            return
        if inner is None or (inner.kind != "tensor" and inner.role is not Role.SUBCLASS):
            raise DamagedError(
                f"value {self._spec.name!r} refers to tensor {name!r}, which the checkpoint lacks"
            )
        draft.find(inner.name)
        if inner.name in self._specs:
            return
        self._specs[inner.name] = inner
        if inner.alias_of is None:
            self._make(inner)
        else:  # once it is known which tensors are live
            draft.pending_aliases.append(lambda: None if self._live(inner) is not None else self._make(inner))

    def _make(self, inner: LeafSpec) -> None:
        """Plan to make one tensor of the value."""
        other = stand_in(inner.sharding, inner.shape, self._draft.live_tensors)
        self._made[inner.name] = self._draft.alike(inner, self._models.get(inner.name, other))

    def _common(self, name: str, device: torch.device | None) -> torch.Tensor:
        """The tensor that all its holders share."""
        live = self._live(self._specs[name])
        return self._made[name](device) if live is None else live

    def _live(self, spec: LeafSpec) -> torch.Tensor | None:
        """The live tensor for a leaf, unless it has another type."""
        live = self._draft.live(spec)
        return live if live is not None and dtype_name(live.dtype) == spec.dtype else None

    def _is_shared(self, name: str) -> bool:
        """Whether other holders have the tensor."""
        spec = self._specs[name]
        return spec.alias_of is not None or name in self._draft.aliased or self._live(spec) is not None

    def _as_it_was(self, one: torch.Tensor, spec: LeafSpec, *, parameter: bool) -> torch.Tensor:
        """The shared tensor itself if it had the same requires_grad, else a view with the saved one.

        Compared with the saved state: live tensors get their saved requires_grad at the end of the load.
        """
        if not self._is_shared(spec.name):
            return learning(one, spec, None, parameter=parameter)
        if self._live(spec) is None:  # made at the first call, for all holders of the same object
            same = (spec.alias_of or spec.name, parameter, spec.frozen)
            if same not in self._draft.shared_tensors:
                self._draft.shared_tensors[same] = learning(one, spec, None, parameter=parameter)
            return self._draft.shared_tensors[same]
        first = self._draft.specs.get(spec.alias_of or spec.name, spec)
        alike = spec.frozen is None or spec.frozen is (True if first.frozen is None else first.frozen)
        if alike and isinstance(one, nn.Parameter) is parameter:
            return one
        return learning(one.detach(), spec, None, parameter=parameter)


@contextmanager
def _unchanged(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Restore the content of these tensors afterwards."""
    before = [(one.detach(), as_copied(one.detach()).clone()) for one in tensors]
    try:
        yield
    finally:
        for one, content in before:
            put(one, content)
