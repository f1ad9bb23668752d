"""Plan a restore of a new structure before it is saved, to find what a resume would refuse.

The listed leaves are planned into their own objects, as a later launch makes them: without optimizer state,
and with those wrapper subclasses in objects with `state_dict` that were there at the first save or load.
Nothing is made, read or called. Modules, tensors and optimizers are also compared with what this launch had
built when its `setup` ended, because the next one builds the same: a layer added later would have no place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.format.names import LONGEST_NAME
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.state.flatten import ModuleStates, classes_of
from torchrelay.checkpoint.state.leaf import (
    Leaf,
    LeafSpec,
    Role,
    Value,
    is_sharded,
    order_of,
    shared_across_files,
)
from torchrelay.checkpoint.state.module_leaves import PARAMS, orphans, show_shards
from torchrelay.checkpoint.state.names import (
    EXTRA_STATE,
    Kind,
    TensorNames,
    kind_of,
    module_parts,
    overlaps_of,
)
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.plan import Maker, RestorePlan
from torchrelay.checkpoint.state.restore.restoration import drafted
from torchrelay.checkpoint.state.tensor_memory import InPlace, fitting, form, is_wrapper
from torchrelay.checkpoint.state.tree_leaves import container_tensors, in_words, made_by_an_optimizer
from torchrelay.errors import BlobError
from torchrelay.jobs.containers import is_array
from torchrelay.records import Json, dataclass


@dataclass(frozen=True)
class _Built:
    """A tensor of a module, or a registered one; `alias_of` is the name of the tensor that it shares."""

    is_buffer: bool
    form: str
    alias_of: str | None
    is_sharded: bool = False


class NodeStructure:
    """The structure of the modules, tensors and optimizers of a node; holds none of them."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.tensors: dict[str, _Built] = {}
        self.parts: set[str] = set()
        """Prefixes of names of tensors in modules."""
        self.groups: dict[str, list[set[str]]] = {}
        """Names of the parameters in each group of an optimizer."""
        self.arrays = arrays_of(objects)
        self.classes = classes_of(objects)
        self.loose: set[tuple[str, int]] = set()
        """The groups, by optimizer and number, with a parameter that no blob holds."""
        alone: dict[str, torch.Tensor] = {}
        first, names = TensorNames(), dict[int, str]()
        for name, tensor, is_buffer in self._found(objects):
            names.setdefault(id(tensor), name)
            if is_lazy(tensor):
                self.tensors[name] = _Built(is_buffer, "not initialised", None)
                continue
            built = f"{type(tensor).__qualname__} {form(tensor)}" if is_wrapper(tensor) else form(tensor)
            alias = first.earlier(tensor, name)
            self.tensors[name] = _Built(is_buffer, built, alias, is_sharded(tensor))
            if alias is None:
                alone[name] = tensor
        self.overlaps = overlaps_of(alone)
        """Tensors that share memory with another one, and are not the same."""
        for blob, value in objects.items():
            if kind_of(value) is Kind.OPTIMIZER:
                own = {id(one): name for name, one in orphans(blob, value)}
                groups = [[id(one) for one in group[PARAMS]] for group in value.param_groups]
                self.groups[blob] = [{names.get(one, own[one]) for one in group} for group in groups]
                held = set(names)
                if not held >= own.keys():  # else containers need no look
                    containers = [one for one in objects.items() if kind_of(one[1]) is Kind.CONTAINER]
                    held |= {id(one) for pair in containers for _, one in container_tensors(*pair)}
                self.loose.update((blob, n) for n, group in enumerate(groups) if not held >= set(group))

    def _found(self, objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """All tensors by name, and whether each is a buffer."""
        for blob, value in objects.items():
            kind = kind_of(value)
            if kind is Kind.TENSOR:
                yield blob, value, False
            parts = module_parts(value) if kind is Kind.MODULE else []
            show_shards(blob, parts)
            for path, _, part in parts:
                self.parts.add(f"{blob}.{path}")
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    self.tensors[f"{blob}.{path}{EXTRA_STATE}"] = _Built(False, "an extra state", None)
                passing = part._non_persistent_buffers_set
                for name, one in part._parameters.items():
                    if one is not None:
                        yield f"{blob}.{path}{name}", one, False
                for name, buffer in part._buffers.items():
                    if buffer is not None and name not in passing:
                        yield f"{blob}.{path}{name}", buffer, True

    def placed(self, now: NodeStructure) -> list[str]:
        """Tensors that are sharded `now` and were not, or the reverse."""
        before = self.tensors
        return [
            name
            for name, built in now.tensors.items()
            if name in before and built.is_sharded != before[name].is_sharded
        ]

    def differences(self, now: NodeStructure) -> Iterator[tuple[str, str]]:
        """Names and texts of what a load of the objects `now` would refuse."""
        for name, built in now.tensors.items():
            before = self.tensors.get(name)
            if before is None:
                if not built.is_buffer or f"{name.rpartition('.')[0]}." not in self.parts:
                    yield name, "came after the start"
            elif before.is_buffer != built.is_buffer:
                now_is, was = ("a buffer" if one.is_buffer else "a parameter" for one in (built, before))
                yield name, f"is {now_is} now, and was {was} at the start"
            elif before.form != built.form and not (
                built.is_buffer and before.form.partition("[")[0] == built.form.partition("[")[0]
            ):
                yield name, f"is {built.form} now, and was {before.form} at the start"
            elif before.alias_of != built.alias_of:
                now_is, was = (
                    "a tensor of its own" if one.alias_of is None else f"the same tensor as {one.alias_of}"
                    for one in (built, before)
                )
                yield name, f"is {now_is} now, and was {was} at the start"
        for name, place in self.overlaps.items():
            other, _ = place
            alike = all(self.tensors[one] == now.tensors.get(one) for one in (name, other))
            if alike and now.overlaps.get(name) != place:  # unlike ones get separate memory from a load
                yield name, f"shared memory with {other} at the start, and does not share it now"
        remedy = "put a new one in its place"
        yield from ((name, "is gone since the start") for name in self.tensors if name not in now.tensors)
        yield from (
            (blob, f"is {one} now, and was {was} at the start: {remedy}, ctx[{blob!r}] = ...")
            for blob, was in self.arrays.items()
            if (one := now.arrays.get(blob, was)) != was
        )
        for blob, groups in self.groups.items():
            kept = now.groups.get(blob, groups)[: len(groups)]
            if kept != groups:
                yield blob, "has other parameters in its groups than at the start"
            for number in sorted(n for one, n in now.loose if one == blob and n >= len(groups)):
                yield blob, f"has parameters in group {number}, added since the start, that no blob holds"


def orders_of(objects: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Memory order of tensors that a load fills in place, see `order_of`."""
    orders: dict[str, tuple[int, ...] | None] = {}

    def note(name: str, one: Any) -> None:
        if type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided and not one.is_nested:
            orders[name] = order_of(one)

    for blob, value in objects.items():
        kind = kind_of(value)
        if kind is Kind.TENSOR:
            note(blob, value)
        elif kind is Kind.CONTAINER:
            for name, tensor in container_tensors(blob, value):
                note(name, tensor)
        elif kind is Kind.OPTIMIZER:  # a parameter that no blob holds
            for name, tensor in orphans(blob, value):
                note(name, tensor)
        for path, _, part in module_parts(value) if kind is Kind.MODULE else ():
            for own in (part._parameters, part._buffers):
                for name, one in own.items():
                    note(f"{blob}.{path}{name}", one)
    return orders


def arrays_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Forms of numpy arrays among the blobs: a load fills them, and changes neither type nor shape."""
    arrays = ((blob, one) for blob, one in objects.items() if is_array(one))
    return {blob: f"an array of {one.dtype}{list(one.shape)}" for blob, one in arrays}


def rehearse(
    objects: Mapping[str, Any],
    leaves: Sequence[Leaf],
    specs: Sequence[LeafSpec],
    states: ModuleStates,
    where: str,
    *,
    kept: Collection[str] = (),
    shown: Collection[str] | None = None,
    changed: Sequence[str] = (),
) -> None:
    """Plan to load `leaves`, as just listed, into these objects; raise BlobError for what would not fit.

    `objects` are those that are registered, as a later launch makes them. `states` are those of modules that
    were listed, and `where` is the node, for messages. `shown`: see `Rehearsal`. `changed` are differences
    from what the program built, which raise as well. Nothing is read or made, and no listed object is called.
    """
    stored = {spec.name: spec for spec in specs if spec.role not in OF_POSITION}
    for spec in specs:
        if len(spec.name) > LONGEST_NAME:
            raise BlobError(
                f"{spec.name:.80}... of {where} would have a name of {len(spec.name)} characters, and "
                f"{LONGEST_NAME} can be stored: give it, or what it lies in, a shorter name or key"
            )
    values = {leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)}
    asked = {blob for blob, value in objects.items() if kind_of(value) is Kind.STATEFUL}
    listed = {
        leaf.name: leaf.content
        for leaf in leaves
        if leaf.blob in asked and not isinstance(leaf.content, Value)
    }
    in_place = _in_place(objects, stored)
    stored = {name: spec for name, spec in stored.items() if name not in in_place.tensors}
    stored = shared_across_files(stored, in_place.tensors)
    # tied tensors have one content
    options = RestoreOptions(kept=kept, in_place=in_place.tensors, same_content=lambda *_: True)
    draft = Rehearsal(stored, values, objects, options, listed, shown, states)
    drafted(draft, in_place.rest(objects), objects, ())
    draft.conclude()
    draft.steps.clear()  # they refer to what made them
    found = draft.findings
    lines = [
        *(*found.refused, *found.unlike),
        *(f"{name} would not be stored" for name in found.missing if name not in kept),
        *(f"{name} would have no place to be loaded into" for name in found.unexpected),
        *changed,
    ]
    if lines:
        raise BlobError(_refusal(lines, dict.fromkeys([*objects, *draft.blobs]), where, changed))


def _refusal(lines: Sequence[str], blobs: Collection[str], where: str, changed: Sequence[str]) -> str:
    refused = [
        blob
        for blob in blobs
        if any(line == blob or line.startswith((f"{blob}.", f"{blob} ", f"{blob}:")) for line in lines)
    ]
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    text = "\n  ".join(lines[:8])
    remedy = f"Build the object at every start as it is saved, or leave it out with exclude={refused!r}"
    if changed:
        remedy = (
            "Make this change before training, where the job is built or in @job.setup. If every start "
            "builds the object as the epoch that it resumes from has it, declare it with rebuilt=True"
        )
    return (
        f"blob {', '.join(map(repr, refused))} of {where}: a resume by the same program could not load what "
        f"is to be saved, so nothing is:\n  {text}{more}\n{remedy}"
    )


def _in_place(objects: Mapping[str, Any], stored: Mapping[str, LeafSpec]) -> InPlace:
    """Registered tensors that fit without further checks."""
    times = Counter(spec.blob for spec in stored.values())
    specs = [
        spec
        for name, spec in stored.items()
        if spec.blob == name
        and times[name] == 1
        and spec.role in (Role.TENSOR, Role.PARAMETER)
        and name in objects
    ]
    forms = [form_of(spec.dtype or "", spec.shape) for spec in specs]
    return fitting(objects, [spec.name for spec in specs], forms)


class Rehearsal(RestorePlan):
    """A restoration of just listed leaves, to find what it would refuse. Makes no tensor.

    `listed` are tensors of objects with `state_dict`, by leaf name, which are not called again. `shown` are
    wrapper subclasses that such objects had initially, None if unknown.
    """

    rehearsed = True

    def __init__(
        self,
        specs: Mapping[str, LeafSpec],
        values: Mapping[str, Json],
        objects: Mapping[str, Any],
        options: RestoreOptions,
        listed: Mapping[str, torch.Tensor],
        shown: Collection[str] | None,
        states: ModuleStates,
    ) -> None:
        super().__init__(specs, values, objects, options, states)
        self._listed = listed
        self._shown = shown
        self._shows: dict[str, bool] = {}
        self._makes: dict[str, bool] = {}
        """Whether some live optimizer makes a wrapper of this form."""

    def models(
        self, blob: str, value: Any, ask: Callable[[], Mapping[str, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """The listed tensors."""
        self._shows[blob] = callable(getattr(value, "state_dict_to_load_into", None))
        return self._listed

    def fresh_like(self, spec: LeafSpec, model: torch.Tensor) -> torch.Tensor:
        """Nothing is read, so any tensor will do."""
        return model

    def wrapper_alike(self, spec: LeafSpec, model: torch.Tensor | None) -> Maker:
        """Without a model, one that the object had initially or shows will do."""
        if model is not None:
            return super().wrapper_alike(spec, model)
        stored = self.json(spec)
        self._take_inner(spec)
        known = self._shown is None or spec.name in self._shown or self._shows.get(spec.blob)
        if not known and (form := repr(stored)) not in self._makes:
            self._makes[form] = made_by_an_optimizer(stored) is not None
        if not known and not self._makes[repr(stored)]:
            self.unlike(
                f"{spec.name} is {in_words(stored)}, which came after the start, so a load could not build "
                "it: give its class a method state_dict_to_load_into() that returns the state with such "
                "tensors in it"
            )
        return lambda device: torch.empty(0)

    def _take_inner(self, spec: LeafSpec) -> None:
        stored = self.json(spec)
        for name in stored.get("inner", ()) if isinstance(stored, dict) else ():
            if (inner := self.take(f"{spec.name}.{name}")) is not None and inner.role is Role.SUBCLASS:
                self._take_inner(inner)
