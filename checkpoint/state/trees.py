"""A stored value with tensors inside, as a load builds it.

What the saved value shared with others it shares again: a live tensor, or a new one of another value. An
object's `load_state_dict` may write into what it is given: what others have is put back behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.dtypes import as_copied
from torchrelay.checkpoint.format.value_decoding import ParameterName, decode
from torchrelay.checkpoint.state.dtensors import stand_in
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, learning
from torchrelay.checkpoint.state.reads import dtype_name, put
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
        found: dict[str, torch.Tensor] = {}

        def tensor(name: Json) -> torch.Tensor:
            if name not in found:
                spec, parameter = self._specs[str(name)], type(name) is ParameterName
                found[str(name)] = self._as_it_was(self._common(str(name), device), spec, parameter=parameter)
            return found[str(name)]

        return decode(self._json, tensor=tensor)

    def hand_over(self, load: Callable[[Any], object]) -> None:
        """Let `load` give it to an object; shared tensors keep their content, whatever it writes there."""
        with _unchanged([self._common(name, None) for name in self._specs if self._is_shared(name)]):
            load(self(None))

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
        draft.find(inner.name)
        if inner.name in self._specs:
            return
        self._specs[inner.name] = inner
        if inner.alias_of is None:
            self._make(inner)
        else:  # when it is known which tensors are live
            draft.pending_aliases.append(lambda: None if self._live(inner) is not None else self._make(inner))

    def _make(self, inner: LeafSpec) -> None:
        other = stand_in(inner.sharding, inner.shape, self._draft.live_tensors)
        self._made[inner.name] = self._draft.alike(inner, self._models.get(inner.name, other))

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
        if not self._is_shared(spec.name):
            return learning(one, spec, None, parameter=parameter)
        if self._live(spec) is None:  # the first that asks makes it, for all that had the same object
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
    """Give these tensors their content back afterwards."""
    before = [(one.detach(), as_copied(one.detach()).clone()) for one in tensors]
    try:
        yield
    finally:
        for one, content in before:
            put(one, content)
