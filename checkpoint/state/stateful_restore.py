"""Leaves back into objects with `load_state_dict`, into registered tensors, and into new names."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchrelay.checkpoint.state.kinds import Kind, attributes, kind_of
from torchrelay.checkpoint.state.leaf import NEEDS_OBJECT, LeafSpec, Role, learning
from torchrelay.checkpoint.state.optimizer_leaves import parameters
from torchrelay.checkpoint.state.restoring import Draft
from torchrelay.checkpoint.state.stateful_leaves import tree_tensors
from torchrelay.checkpoint.state.subclasses import made_by_an_optimizer
from torchrelay.checkpoint.wildcards import matches_any

Builder = Callable[[], Any]


def draft_stateful(draft: Draft, blob: str, value: Any) -> None:
    """Plan to hand the stored tree to `load_state_dict`.

    Its tensors are fresh and lie on the CPU, but where the object now has a DTensor or a wrapper
    subclass under the same name, they are made like it.
    """
    spec = _root(draft, blob, value, (Role.STATE,))
    if spec is not None:
        _check_excluded(draft, blob, value)
        tree = draft.tree(spec, draft.models(blob, value, lambda: _shown(draft, blob, value)))
        draft.steps.append((blob, lambda: _hand_over(value, tree(None))))
        draft.note_rest(blob)


def _check_excluded(draft: Draft, blob: str, value: Any) -> None:
    """Refuse the `state_dict` of an optimizer, or of what holds one, with state of what is left out."""
    if not draft.excluded or not any(spec.kind == "tensor" for spec in draft.stored(blob)):
        return
    for one in (value, *attributes(value)):
        names = [draft.names.get(id(p)) for p in parameters(one)] if isinstance(one, Optimizer) else []
        left = next((name for name in names if name and matches_any(name, draft.excluded)), None)
        if left is not None:
            draft.unlike(
                f"{blob} gives the state of {left}, which is left out, together with all other state"
            )
            return


def _hand_over(value: Any, state: Any) -> None:
    value.load_state_dict(state)
    if isinstance(value, DataLoader):
        # torchdata's makes an iterator of its state when it is asked next, and draws a seed for its workers.
        # Undisturbed, that draw was part of the past: it belongs before the random streams are restored.
        value.state_dict()  # type: ignore[attr-defined]


def restore_learning_rates(objects: Mapping[str, Any], loaded: Container[str]) -> None:
    """Give optimizers that are no blob the learning rates that their loaded schedulers set last.

    Schedulers go on from the rates of their optimizer. That is not loaded where it is registered in part,
    as the local part of a ZeroRedundancyOptimizer is, or not at all.
    """
    known = {id(one) for one in objects.values()}
    for blob, value in objects.items():
        if blob not in loaded or not isinstance(value, LRScheduler) or id(value.optimizer) in known:
            continue
        for group, rate in zip(value.optimizer.param_groups, getattr(value, "_last_lr", ()), strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(torch.as_tensor(rate))
            else:
                group["lr"] = float(rate)


def _shown(draft: Draft, blob: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of the object's state by their names.

    An object whose `state_dict` leaves out what it does not have yet (the state of an optimizer before
    its first step) shows it by a method `state_dict_to_load_into`; else live optimizers are asked what
    their first step makes.
    """
    ask = getattr(value, "state_dict_to_load_into", value.state_dict)
    found = tree_tensors(ask(), blob)
    wrappers = [spec for spec in draft.stored(blob) if spec.role is Role.SUBCLASS]
    for spec in wrappers:
        inner = any(spec.name.startswith(f"{other.name}.") for other in wrappers)
        if spec.name not in found and not inner:
            model = made_by_an_optimizer(draft.json(spec))
            found.update({} if model is None else {spec.name: model})
    return found


def draft_tensor(draft: Draft, blob: str, value: torch.Tensor) -> None:
    """Plan to load a tensor in place: it stays the object that closures hold."""
    spec = _root(draft, blob, value, (Role.TENSOR, Role.PARAMETER, Role.SUBCLASS))
    if spec is not None:
        draft.into(blob, spec, value)
        draft.note_rest(blob)


def draft_value(draft: Draft, blob: str, value: Any) -> Builder | None:
    """Plan to make the tensor or value anew that takes the place of a value in the workspace."""
    spec = _root(draft, blob, value, (Role.VALUE, Role.TENSOR, Role.PARAMETER))
    return None if spec is None else _builder(draft, blob, spec)


def draft_new(draft: Draft, blob: str) -> Builder | None:
    """Plan to make a stored blob for which no object is given; only tensors and values can be made."""
    spec = draft.specs.get(blob)
    if spec is None or spec.role in NEEDS_OBJECT:
        draft.unlike(
            f"{blob} is {_stored_kind(draft, blob)} in the checkpoint, and no object of this name is given to"
            f" load it into: register it as a blob, job.blobs({blob}=object), or as a factory, which setup"
            " calls at every start (init does not run when a run is resumed)"
        )
        return None
    draft.take(blob)
    return _builder(draft, blob, spec)


def _builder(draft: Draft, blob: str, spec: LeafSpec) -> Builder:
    if spec.kind == "value":
        tree = draft.tree(spec)
        draft.note_rest(blob)
        return lambda: tree(None)
    if (live := draft.live(spec)) is not None:
        return lambda: live
    read = draft.fresh(spec)
    return lambda: learning(read.memory(), spec, None)


def _root(draft: Draft, blob: str, value: Any, roles: tuple[Role, ...]) -> LeafSpec | None:
    """The leaf that is called like its blob, if the stored blob is of the right sort."""
    spec = draft.specs.get(blob)
    if spec is not None and spec.role in roles:
        return draft.take(blob)
    if draft.stored(blob) and blob not in draft.kept:
        given = f"a {type(value).__name__} ({kind_of(value).value})"
        draft.unlike(f"{blob} is {given} here, {_stored_kind(draft, blob)} in the checkpoint")
    else:
        draft.take(blob)
    return None


def _stored_kind(draft: Draft, blob: str) -> str:
    spec = draft.specs.get(blob)
    if spec is None:
        return "a module or optimizer"
    if spec.role is Role.STATE:
        return f"a {Kind.STATEFUL.value}"
    if spec.role is Role.SUBCLASS:
        return "a tensor subclass"
    return f"a {Kind.TENSOR.value if spec.kind == 'tensor' else Kind.VALUE.value}"
