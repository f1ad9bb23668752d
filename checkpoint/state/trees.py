"""A stored value with tensors inside, as a load builds it.

What the saved value shared with others it may share again: a live tensor, or a new one of another value. An
object is first given copies of those, because its `load_state_dict` may write into what it is given, or into
its model. Which of them it keeps, its state shows afterwards; it is given the shared ones for these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.value_decoding import ParameterName, decode
from torchrelay.checkpoint.state.dtensors import stand_in
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, learning
from torchrelay.checkpoint.state.reads import dtype_name, put
from torchrelay.checkpoint.state.stateful_leaves import tree_tensors
from torchrelay.checkpoint.state.tensor_names import memory_place
from torchrelay.errors import DamagedError

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.restoring import Draft, Maker


class Tree:
    """The value that a leaf has; call it once everything is read.

    New tensors go to the device that it is called with. Those that `models` has by their names are made like
    these: DTensors placed as they are, subclasses of their class. The form is checked now.
    """

    def __init__(self, draft: Draft, spec: LeafSpec, models: Mapping[str, torch.Tensor] | None) -> None:
        self._draft, self._spec, self._models = draft, spec, models or {}
        self._json: Json = draft.json(spec)
        self._made: dict[str, Maker] = {}
        self._specs: dict[str, LeafSpec] = {}
        decode(self._json, tensor=self._refer)

    def __call__(self, device: torch.device | None) -> Any:
        """Build it; what was one tensor with others is so again."""
        return self._built(device, lambda name: True)[0]

    def hand_over(self, value: Any, load: Callable[[Any], object]) -> None:
        """Let `load` give it to an object, which gets the shared tensors that it keeps."""
        tree, given = self._built(None, lambda name: False)
        load(tree)
        shared = {name: one for name, one in given.items() if self._is_shared(name)}
        if not shared:
            return
        now = tree_tensors(value.state_dict(), self._spec.name)
        kept = {name for name, one in shared.items() if name in now and _in_one_place(now[name], one)}
        if kept:
            with _unchanged([self._common(name, None) for name in shared]):
                load(self._built(None, kept.__contains__)[0])

    def _refer(self, name: Json) -> None:
        draft = self._draft
        inner = draft.specs.get(name) if isinstance(name, str) else None
        if name in draft.kept:
            draft.unlike(f"{self._spec.name} is a value that holds {name}, which cannot be left out alone")
            return
        if inner is None or (inner.kind != "tensor" and inner.role is not Role.SUBCLASS):
            raise DamagedError(
                f"value {self._spec.name!r} refers to tensor {name!r}, which the checkpoint lacks"
            )
        draft.account_for(inner)
        if inner.name in self._specs:
            return
        self._specs[inner.name] = inner
        if inner.alias_of is None:
            self._make(inner)
        else:  # when it is known which tensors are live
            draft.undecided.append(lambda: None if self._live(inner) is not None else self._make(inner))

    def _make(self, inner: LeafSpec) -> None:
        other = stand_in(inner.sharding, inner.shape, self._draft.live_tensors)
        self._made[inner.name] = self._draft.alike(inner, self._models.get(inner.name, other))

    def _built(
        self, device: torch.device | None, linked: Callable[[str], bool]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """The value, and its tensors by name; of those that are shared copies, unless `linked` says so."""
        found: dict[str, torch.Tensor] = {}

        def tensor(name: Json) -> torch.Tensor:
            if name not in found:
                spec, parameter = self._specs[str(name)], type(name) is ParameterName
                one = self._common(str(name), device)
                if not self._is_shared(spec.name):
                    one = learning(one, spec, None, parameter=parameter)
                elif linked(spec.name):
                    one = self._as_it_was(one, spec, parameter=parameter)
                else:
                    one = learning(one.detach().clone(), spec, None, parameter=parameter)
                found[str(name)] = one
            return found[str(name)]

        return decode(self._json, tensor=tensor), found

    def _common(self, name: str, device: torch.device | None) -> torch.Tensor:
        """The tensor that all have who share it."""
        live = self._live(self._specs[name])
        return self._made[name](device) if live is None else live

    def _live(self, spec: LeafSpec) -> torch.Tensor | None:
        """The live tensor that it is, unless that was given another type."""
        live = self._draft.live(spec)
        return live if live is not None and dtype_name(live.dtype) == spec.dtype else None

    def _is_shared(self, name: str) -> bool:
        spec = self._specs[name]
        return spec.alias_of is not None or name in self._draft.aliased or self._live(spec) is not None

    def _as_it_was(self, one: torch.Tensor, spec: LeafSpec, *, parameter: bool) -> torch.Tensor:
        """The shared tensor itself if it was so, else a view of it that learns or does not.

        What learns is compared as it was saved: live tensors learn as they did when all is loaded.
        """
        first = self._draft.specs.get(spec.alias_of or spec.name, spec)
        alike = spec.frozen is None or spec.frozen is (True if first.frozen is None else first.frozen)
        if alike and isinstance(one, nn.Parameter) is parameter:
            return one
        return learning(one.detach(), spec, None, parameter=parameter)


def _in_one_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and memory_place(one) == memory_place(other)


@contextmanager
def _unchanged(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Give these tensors their content back afterwards."""
    before = [(one.detach(), one.detach().clone()) for one in tensors]
    try:
        yield
    finally:
        for one, content in before:
            put(one, content)
