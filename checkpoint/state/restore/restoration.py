"""Load leaves into objects in two phases: everything is verified before anything changes.

plan = restoration(objects, specs, values)  # compares and raises; changes nothing
for read in plan.reads: fill(read.memory())                     # into live memory if possible
workspace.update(plan.finish())             # the rest: copies, optimizers, load_state_dict
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.format.position import matches_any
from torchrelay.checkpoint.format.values import decode
from torchrelay.checkpoint.state.flatten import ModuleStates
from torchrelay.checkpoint.state.leaf import (
    NEEDS_OBJECT,
    LeafSpec,
    Role,
    learning,
    order_of,
    shared_across_files,
)
from torchrelay.checkpoint.state.module_leaves import match_strides, named_parameters, orphans, parameters
from torchrelay.checkpoint.state.names import Kind, kind_of, optimizers_in
from torchrelay.checkpoint.state.restore.container import StoredTensor, draft_container, regrouped
from torchrelay.checkpoint.state.restore.findings import USUAL, RestoreOptions
from torchrelay.checkpoint.state.restore.module import draft_module
from torchrelay.checkpoint.state.restore.optimizer import draft_optimizer, draft_shared_parameters
from torchrelay.checkpoint.state.restore.plan import LeafValue, RestorePlan
from torchrelay.checkpoint.state.tensor_memory import Read, not_initialised, outside_inference_mode
from torchrelay.checkpoint.state.tree_leaves import container_tensors, made_by_an_optimizer, tree_tensors
from torchrelay.errors import PartiallyLoadedError, RelayError
from torchrelay.jobs.containers import is_record
from torchrelay.records import Json

Builder = Callable[[], Any]


def draft_stateful(draft: RestorePlan, blob: str, value: Any) -> None:
    """Plan to pass the stored tree to `load_state_dict`.

    Its tensors are new and on the CPU, except those for which the object now has a DTensor or a wrapper
    subclass under the same name: they are made like it.
    """
    spec = _root(draft, blob, value, (Role.STATE,))
    if spec is not None:
        left = _left_out(draft, value, spec)
        tree = LeafValue(draft, spec, draft.models(blob, value, lambda: _shown(draft, blob, value)))
        known = any(one.order is not None for one in draft.specs.values())
        load = partial(_hand_over, value, left, known=known)
        draft.steps.append((blob, lambda: tree.hand_over(load)))
        draft.note_rest(blob)


def _left_out(draft: RestorePlan, value: Any, spec: LeafSpec) -> list[tuple[Any, ...]]:
    """Paths of the state of excluded parameters, in states of optimizers inside an object's state.

    Torch's `state_dict` refers to parameters by number; the object has the optimizer.
    """
    if not draft.options.excluded:
        return []
    optimizers = [[draft.names.get(id(it)) for it in parameters(one)] for one in optimizers_in(value)]
    found: list[tuple[Any, ...]] = []
    tree = decode(draft.json(spec), tensor=lambda name: StoredTensor(str(name)))
    for path, state, groups in _optimizer_states(tree):
        numbers = [number for group in groups for number in group["params"]]
        fitting = [names for names in optimizers if len(names) == len(numbers)]
        if fitting:  # in the object's order, repeated for further states of theirs
            optimizers.append(optimizers.pop(optimizers.index(fitting[0])))
            left = {
                number
                for number, name in zip(numbers, fitting[0], strict=True)
                if name and matches_any(name, draft.options.excluded) and state.get(number)
            }
            found += [(*path, "state", number) for number in state if number in left]
            draft.left_out += [one.name for number in left for one in _inner_tensors(state[number])]
    return found


def _inner_tensors(tree: Any) -> Iterator[StoredTensor]:
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for one in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _inner_tensors(one)


def _optimizer_states(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Results of `Optimizer.state_dict` anywhere in a value: path, `state` and `param_groups`."""
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


def _hand_over(value: Any, left: Sequence[tuple[Any, ...]], state: Any, *, known: bool) -> None:
    for *above, last in left:  # the value was built for this load
        del reduce(getitem, above, state)[last]
    value.load_state_dict(state)
    for optimizer in optimizers_in(value):
        match_strides(optimizer, known=known)
    if isinstance(value, DataLoader):
        # torchdata's loader makes an iterator of its state at the next call, and draws a seed for its
        # workers. Uninterrupted, that draw came earlier: it must precede the restore of the random streams.
        value.state_dict()  # type: ignore[attr-defined]


def restore_learning_rates(objects: Mapping[str, Any], loaded: Container[str]) -> None:
    """Set unregistered optimizers to the learning rates that their loaded schedulers set last.

    Schedulers continue from the rates of their optimizer, which may be registered in part (the local part of
    a ZeroRedundancyOptimizer) or not at all.
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


def _shown(draft: RestorePlan, blob: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of the object's state by name.

    An object whose `state_dict` lacks state before the first step shows it by a method
    `state_dict_to_load_into`; else live optimizers show what their first step makes.
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


def _builder(draft: RestorePlan, blob: str, spec: LeafSpec) -> Builder:
    if spec.kind == "value":
        tree = LeafValue(draft, spec)
        draft.note_rest(blob)
        return lambda: tree(None)
    if (live := draft.live(spec)) is not None:
        return lambda: live
    read = draft.fresh(spec)
    return lambda: learning(read.on(None), spec, None)


def _root(draft: RestorePlan, blob: str, value: Any, roles: tuple[Role, ...]) -> LeafSpec | None:
    """The leaf with the name of its blob, if the stored blob has the right kind."""
    spec = draft.specs.get(blob)
    if spec is not None and spec.role in roles:
        return draft.take(blob)
    if draft.stored(blob) and blob not in draft.kept:
        given = f"a {type(value).__name__} ({kind_of(value).value})"
        draft.unlike(f"{blob} is {given} here, {_stored_kind(draft, blob)} in the checkpoint")
    else:
        draft.take(blob)
    return None


def _stored_kind(draft: RestorePlan, blob: str) -> str:
    spec = draft.specs.get(blob)
    if spec is None:
        return "a module or optimizer"
    if spec.role is Role.STATE:
        return f"a {Kind.STATEFUL.value}"
    if spec.role is Role.SUBCLASS:
        return "a tensor subclass"
    return f"a {Kind.TENSOR.value if spec.kind == 'tensor' else Kind.VALUE.value}"


def restore_requires_grad(objects: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> list[str]:
    """In a resumed run, restore the saved requires_grad of parameters and tensors; changed names."""
    changed: list[str] = []
    for blob, value in objects.items():
        for name, tensor in _with_gradients(blob, value):
            spec = specs.get(name)
            if spec is None or spec.frozen is None or tensor.requires_grad != spec.frozen:
                continue
            if spec.frozen or tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_(not spec.frozen)
                changed.append(name)
    return changed


def stay_as_built(objects: Mapping[str, Any], specs: dict[str, LeafSpec]) -> list[str]:
    """With a process group, keep the built memory order of parameters that training had changed; names.

    A constructed DistributedDataParallel mixes up elements of parameters in another order (torch 2.13), and
    does not show which parameters it holds.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    changed = {name for name, spec in specs.items() if spec.order_changed}
    turned = [
        name
        for blob, value in (objects.items() if changed else ())
        for name, one in (
            orphans(blob, value) if kind_of(value) is Kind.OPTIMIZER else _with_gradients(blob, value)
        )
        if name in changed and one.requires_grad and order_of(one) != specs[name].order
    ]
    specs.update((name, replace(specs[name], order_changed=False)) for name in turned)
    return turned


def _with_gradients(blob: str, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors that a program may train, by the names of their leaves."""
    if isinstance(value, nn.Module):
        return named_parameters(blob, value, ModuleStates())
    found = [(blob, value)] if isinstance(value, torch.Tensor) else []
    if kind_of(value) is Kind.CONTAINER:
        found = list(container_tensors(blob, value))
    return [(name, one) for name, one in found if one.is_leaf]


class Restoration:
    """A load that fits: what to read, and what to do when all of it is read.

    Reads into live memory change user objects, so a failure from the first read on leaves them partly loaded.

    Attributes:
        created: after `finish`, the values, containers and new tensors by blob name.
        missing, unexpected: leaves that `strict=False` has skipped.
        replaced: given values, and containers of another type, that are replaced by new objects.
        left_out: stored leaves that cannot be loaded without excluded ones.
    """

    def __init__(
        self, draft: RestorePlan, builders: Mapping[str, Callable[[], Any]], replaced: Collection[str] = ()
    ) -> None:
        self.reads: tuple[Read, ...] = tuple(draft.reads)
        self.missing: tuple[str, ...] = tuple(draft.findings.missing)
        self.unexpected: tuple[str, ...] = tuple(draft.findings.unexpected)
        self.created: dict[str, object] = {}
        self.replaced: tuple[str, ...] = tuple(replaced)
        self.left_out: tuple[str, ...] = tuple(draft.left_out)
        self._steps = [*draft.fills, *draft.steps]
        draft.steps.clear()  # they refer to the draft
        self._builders = builders

    def finish(self) -> dict[str, object]:
        """Install what was read, and return new objects for the workspace.

        These are all values, containers included, and tensors without a given object. Raises
        PartiallyLoadedError when a user's `load_state_dict` raises.
        """
        with outside_inference_mode(), torch.no_grad():
            for blob, step in self._steps:
                try:
                    step()
                except RelayError:
                    raise
                except Exception as error:
                    raise PartiallyLoadedError(
                        f"blob {blob!r} refused its stored state ({type(error).__name__}: {error}); other "
                        "objects may have changed already: load all of them again "
                    ) from error
            self._steps.clear()  # they refer to what made them
            self.created = {blob: build() for blob, build in self._builders.items()}
        return self.created


def restoration(
    objects: Mapping[str, Any],
    specs: Mapping[str, LeafSpec],
    values: Mapping[str, Json],
    options: RestoreOptions = USUAL,
) -> Restoration:
    """Plan to load the stored leaves `specs`, with the content `values` of values, into `objects`.

    Modules, optimizers, tensors and containers are loaded in place. Stored blobs without an object are
    created, if they are tensors or values; so omit unwanted ones from `specs`, and replaceable tensors from
    `objects`.

    Raises BlobError with a list of all leaves that are missing, unexpected (neither with `strict=False`) or
    of another form, and DamagedError for malformed values. No object changes before the reads.
    """
    stored = {name: spec for name, spec in specs.items() if spec.role not in OF_POSITION}
    stored, values, partial = regrouped(objects, stored, values)
    settled = options.in_place
    stored = shared_across_files(stored, settled)
    if stored or len(settled) < len(objects):
        draft = RestorePlan(stored, values, objects, options)
        given = [blob for blob in objects if not (blob in settled or blob in options.untouched)]
    else:  # all is in place
        draft, given = RestorePlan(stored, values, {}, replace(options, in_place={})), []
    builders = drafted(draft, {blob: objects[blob] for blob in given}, objects, partial)
    draft.conclude()
    draft.findings.check(stored, options)
    fixed = [blob for blob in given if blob in builders and kind_of(objects[blob]) is Kind.VALUE]
    return Restoration(draft, builders, [*draft.replaced, *fixed])


def drafted(
    draft: RestorePlan, given: Mapping[str, Any], objects: Mapping[str, Any], partial: Collection[str]
) -> dict[str, Callable[[], Any]]:
    """Draft the loads into `given`, which are among `objects`, and of stored blobs without an object."""
    builders: dict[str, Callable[[], Any] | None] = {}
    containers = {blob for blob, value in given.items() if kind_of(value) is Kind.CONTAINER}
    # Modules first, because their load hooks may rename parameters for optimizers; and tensors, because a
    # tensor shared with an optimizer may now be two, of which only the optimizer can get a new one.
    fixed_first = sorted(given, key=lambda blob: not isinstance(given[blob], nn.Module | torch.Tensor))
    for blob, value in given.items():
        if isinstance(value, torch.optim.Optimizer):
            draft_shared_parameters(draft, blob, value)
    for blob in fixed_first:
        if blob not in containers:
            builders[blob] = _draft_blob(draft, blob, given[blob])
    for blob in [blob for blob in given if blob in containers]:  # they may hold tensors of the others
        builders[blob] = draft_container(draft, blob, given[blob], partial=blob in partial)
    for blob in [blob for blob in draft.blobs if blob not in objects]:  # only tensors and values can be made
        spec = draft.specs.get(blob)
        if spec is None or spec.role in NEEDS_OBJECT:
            draft.unlike(
                f"{blob} is {_stored_kind(draft, blob)} in the checkpoint, and no object of this name is "
                f"given to load it into: register it as a blob, job.blobs({blob}=object), or as a factory, "
                "which setup calls at every start (a resumed run skips init)"
            )
        else:
            draft.take(blob)
            builders[blob] = _builder(draft, blob, spec)
    return {blob: build for blob, build in builders.items() if build is not None}


def _draft_blob(draft: RestorePlan, blob: str, value: Any) -> Callable[[], Any] | None:
    kind = kind_of(value)
    if kind is Kind.MODULE:
        lazy = [name for name, one in draft.states.of(value).items() if is_lazy(one)]
        if lazy:
            draft.refuse(blob, not_initialised(f"{blob}.{lazy[0]}"))
            return None
    if isinstance(value, torch.optim.Optimizer):
        empty = [one for one in parameters(value) if is_lazy(one) or one.is_meta]
        if empty:
            where = "not initialised yet" if is_lazy(empty[0]) else "on the meta device"
            draft.refuse(
                blob,
                f"{blob} is an optimizer of parameters {where}: give the model its memory first (load "
                "it, model.to_empty(device=...), or a forward pass), and build the optimizer after that",
            )
            return None
    if is_record(value):  # frozen, so a new instance of its class replaces it
        return draft_container(draft, blob, value, partial=False)
    if kind is Kind.VALUE:  # a new tensor or value replaces it in the workspace
        spec = _root(draft, blob, value, (Role.VALUE, Role.TENSOR, Role.PARAMETER))
        return None if spec is None else _builder(draft, blob, spec)
    if kind is not Kind.TENSOR:
        _DRAFTERS[kind](draft, blob, value)
    elif (spec := _root(draft, blob, value, (Role.TENSOR, Role.PARAMETER, Role.SUBCLASS))) is not None:
        draft.into(blob, spec, value)  # it stays the object that closures hold
        draft.note_rest(blob)
    return None


_DRAFTERS: dict[Kind, Callable[[RestorePlan, str, Any], None]] = {
    Kind.MODULE: draft_module,
    Kind.OPTIMIZER: draft_optimizer,
    Kind.STATEFUL: draft_stateful,
}
