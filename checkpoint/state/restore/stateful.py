"""Leaves back into objects with `load_state_dict`, into registered tensors, and into new names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchrelay.checkpoint.format.manifest.position import matches_any
from torchrelay.checkpoint.format.values import decode
from torchrelay.checkpoint.state.kinds import Kind, kind_of, optimizers_in
from torchrelay.checkpoint.state.leaf import NEEDS_OBJECT, LeafSpec, Role, learning
from torchrelay.checkpoint.state.leaves.optimizer import match_strides, parameters
from torchrelay.checkpoint.state.leaves.tree import tree_tensors
from torchrelay.checkpoint.state.restore.plan import Draft
from torchrelay.checkpoint.state.subclasses import made_by_an_optimizer

Builder = Callable[[], Any]


def draft_stateful(draft: Draft, blob: str, value: Any) -> None:
    """Plan to hand the stored tree to `load_state_dict`.

    Its tensors are fresh and lie on the CPU, but where the object now has a DTensor or a wrapper
    subclass under the same name, they are made like it.
    """
    spec = _root(draft, blob, value, (Role.STATE,))
    if spec is not None:
        left = _left_out(draft, value, spec)
        tree = draft.tree(spec, draft.models(blob, value, lambda: _shown(draft, blob, value)))
        load = partial(_hand_over, value, left, known=draft.knows_order)
        draft.steps.append((blob, lambda: tree.hand_over(load)))
        draft.note_rest(blob)


def _left_out(draft: Draft, value: Any, spec: LeafSpec) -> list[tuple[Any, ...]]:
    """The paths of the state of excluded parameters, in the states of optimizers that an object gives.

    A `state_dict` of torch's says by its numbers whose state it is; the object has the optimizer.
    """
    if not draft.excluded:
        return []
    optimizers = [[*map(draft.name_of, parameters(one))] for one in optimizers_in(value)]
    found: list[tuple[Any, ...]] = []
    tree = decode(draft.json(spec), tensor=_Inner)
    for path, state, groups in _optimizer_states(tree):
        numbers = [number for group in groups for number in group["params"]]
        fitting = [names for names in optimizers if len(names) == len(numbers)]
        if fitting:  # in the order in which the object has them, and again for further states of theirs
            optimizers.append(optimizers.pop(optimizers.index(fitting[0])))
            left = {
                number
                for number, name in zip(numbers, fitting[0], strict=True)
                if name and matches_any(name, draft.excluded) and state.get(number)
            }
            found += [(*path, "state", number) for number in state if number in left]
            draft.left_out += [one.name for number in left for one in _inner_tensors(state[number])]
    return found


class _Inner:
    """A tensor of a stored value, by its name."""

    def __init__(self, name: Any) -> None:
        self.name = str(name)


def _inner_tensors(tree: Any) -> Iterator[_Inner]:
    if isinstance(tree, _Inner):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for one in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _inner_tensors(one)


def _optimizer_states(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """What an `Optimizer.state_dict` gave, anywhere in a value: its path, `state` and `param_groups`."""
    if isinstance(tree, Mapping):
        state, groups = tree.get("state"), tree.get("param_groups")
        listed = isinstance(groups, list) and all(
            isinstance(one, Mapping)
            and isinstance(one.get("params"), list)
            and set(map(type, one["params"])) <= {int}
            for one in groups
        )
        if isinstance(state, Mapping) and listed:
            yield path, state, groups
            return
        for key, one in tree.items():
            yield from _optimizer_states(one, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, one in enumerate(tree):
            yield from _optimizer_states(one, (*path, number))


def _without(tree: Any, paths: Sequence[tuple[Any, ...]]) -> Any:
    """A built value without what lies at these paths; it is nobody else's."""
    for *above, last in paths:
        del reduce(getitem, above, tree)[last]
    return tree


def _hand_over(value: Any, left: Sequence[tuple[Any, ...]], state: Any, *, known: bool) -> None:
    value.load_state_dict(_without(state, left))
    for optimizer in optimizers_in(value):
        match_strides(optimizer, known=known)
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
    return lambda: learning(read.on(None), spec, None)


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
