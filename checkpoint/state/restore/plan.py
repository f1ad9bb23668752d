"""Collect a restoration: what is stored, what does not fit, what to read, what to do afterwards.

A `RestorePlan` collects these for all blobs while nothing is changed. Each kind of blob has a function that
adds its share (`module.py`, `optimizer.py`, `restoration.py`).

Tensors that were shared in a saved value are shared again, with a live tensor or a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import as_copied, by_name, torch_dtype
from torchrelay.checkpoint.format.value_decoding import ParameterName, decode
from torchrelay.checkpoint.state.flatten import ModuleStates, parameter_names
from torchrelay.checkpoint.state.leaf import (
    LeafSpec,
    Role,
    empty_like,
    is_sharded,
    learning,
    memory_of_shard,
    stand_in,
    target_of,
)
from torchrelay.checkpoint.state.module_leaves import named_parameters
from torchrelay.checkpoint.state.names import Extents, Kind, TensorNames, current_names, kind_of, spellings
from torchrelay.checkpoint.state.restore.findings import USUAL, Mismatches, RestoreOptions
from torchrelay.checkpoint.state.tensor_memory import (
    Read,
    admitted_in_place,
    all_torch_memory,
    dtype_name,
    form,
    is_wrapper,
    lay_as_saved,
    put,
    same_form,
    take_memory_of,
    unwritable,
)
from torchrelay.checkpoint.state.tree_leaves import description, in_words, inner_tensors, rebuilder
from torchrelay.errors import BlobError, DamagedError
from torchrelay.records import Json

Maker = Callable[[torch.device | None], torch.Tensor]
"""Returns a tensor once everything is read; plain ones go to the device."""


class RestorePlan:
    """A restoration being planned. Adding to it changes no object of the user's.

    `late` has plans for stored buffers that a module has not created yet, and whether it has a place for
    them; `reshaped` describes those that it has in another shape. Both are differences if there are any
    others. `names` are those of the parameters of the given objects, by id; `states` those of modules that
    were listed before.
    """

    rehearsed = False
    """Whether objects are taken as a later launch makes them, without state of optimizers."""

    def __init__(
        self,
        specs: Mapping[str, LeafSpec],
        values: Mapping[str, Json],
        objects: Mapping[str, Any],
        options: RestoreOptions = USUAL,
        states: ModuleStates | None = None,
    ) -> None:
        settled, self.options = options.in_place, options
        self._offered = frozenset(options.offered)
        self._may_lack = tuple(f"{blob}." for blob in options.may_lack)  # no blob's name begins another's
        self.specs = specs
        self.values = values
        self.kept = frozenset(options.kept)
        self.converted: dict[str, torch.dtype] = {}
        """New tensors that get another type than the stored one, by the leaf's name."""
        self.left_out: list[str] = []
        """Stored leaves that cannot be loaded without excluded ones."""
        self.states = states or ModuleStates()
        self.names = parameter_names(objects, self.states)
        self._modules = {blob: one for blob, one in objects.items() if isinstance(one, nn.Module)}
        self._tensors = {blob: one for blob, one in objects.items() if isinstance(one, torch.Tensor)}
        self.containers = {blob: one for blob, one in objects.items() if kind_of(one) is Kind.CONTAINER}
        self.objects = objects
        self.adopted: set[int] = set()
        """Live containers that were changed, by id."""
        self.made: dict[tuple[str, Role, bool | None], torch.Tensor] = {}
        """New tensors of containers, by the leaf that owns them, and their form."""
        self.replaced: list[str] = []
        """Containers whose stored value is of another type."""
        self.findings = Mismatches()
        self.reads: list[Read] = []
        self.reshaped: list[str] = []
        self.late: dict[str, tuple[Callable[[], None], bool]] = {}
        self.destinations: list[tuple[str, torch.Tensor]] = []
        self.fills: list[tuple[str, Callable[[], None]]] = []
        """Changes that live tensors need before anything else uses them."""
        self.steps: list[tuple[str, Callable[[], None]]] = []
        self._by_blob: dict[str, list[LeafSpec]] = {}
        self._taken: set[str] = set()
        self._read_into, self._extents = TensorNames(), Extents()
        self._absent: list[tuple[str, torch.Tensor | None]] = []
        self._twofold: list[tuple[str, str]] = []
        self._called: dict[int, str] = {}
        self._fresh: dict[str, Read] = {}
        self.shared_tensors: dict[tuple[str, bool, bool | None], torch.Tensor] = {}
        """New tensors that several values share, by leaf, and by whether they are parameters and frozen."""
        self.pending_aliases: list[Callable[[], None]] = []
        self._live: dict[str, torch.Tensor] = dict(settled)
        self.live_tensors = list(settled.values())
        """The live tensors that leaves are read into, in the order in which they were found."""
        if not self._read_into.add_new(list(settled), list(settled.values())):
            for source, live in settled.items():
                self._read_into.earlier(live, source)
        for spec in specs.values():
            self._by_blob.setdefault(spec.blob, []).append(spec)

    @property
    def blobs(self) -> tuple[str, ...]:
        """Names of the stored blobs, in order, without those that are optional."""
        return tuple(
            blob
            for blob, specs in self._by_blob.items()
            if not self._offered or any(one.name not in self._offered for one in specs)
        )

    def stored(self, blob: str) -> list[LeafSpec]:
        """The stored leaves of a blob."""
        return self._by_blob.get(blob, [])

    def take(self, name: str, live: torch.Tensor | None = None) -> LeafSpec | None:
        """The stored leaf of this name, marked as used; None, noted as missing, without one."""
        if (spec := self.find(name)) is None:
            self.lacks(name, live)
        return spec

    def find(self, name: str) -> LeafSpec | None:
        """The stored leaf of this name, or an older form of it, marked as used."""
        if (spec := self.known(name)) is not None:
            self._taken.add(spec.name)
        return spec

    def known(self, name: str) -> LeafSpec | None:
        """The same, not marked as used."""
        spec = self.specs.get(name)
        if spec is None and name not in self.kept:
            spec = self._renamed.get(name)
        return spec

    def renamed(self, live: torch.Tensor, stored: str) -> None:
        """Note that load code of a module reads a leaf of another name into its tensor."""
        self._called[id(live)] = stored

    def lacks(self, name: str, live: torch.Tensor | None = None) -> None:
        """Note a leaf as missing, unless it keeps its content, or its tensor is read by another name."""
        if name not in self.kept and not f"{name}.".startswith(self._may_lack):
            self._absent.append((name, live))

    def called(self, parameter: torch.Tensor, stored: Collection[str]) -> str | None:
        """Which of these stored names a parameter has or once had; None without any."""
        name = self.names.get(id(parameter))
        if name in stored:
            return name
        if self._called.get(id(parameter)) in stored:
            return self._called[id(parameter)]
        own = {*self._spellings.get(id(parameter), ()), *([name] if name else [])}
        return next((one for one in stored if one in own or not own.isdisjoint(current_names(one))), None)

    @cached_property
    def _spellings(self) -> Mapping[int, set[str]]:
        found: defaultdict[int, set[str]] = defaultdict(set)
        for blob, module in self._modules.items():
            for number, names in spellings(module).items():
                found[number].update(f"{blob}.{one}" for one in names)
        return found

    @cached_property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters of given modules, and registered ones, by name."""
        found = (named_parameters(blob, module, ModuleStates()) for blob, module in self._modules.items())
        return {**self._tensors, **{name: one for named in found for name, one in named}}

    @cached_property
    def _renamed(self) -> Mapping[str, LeafSpec]:
        """Stored leaves by their current names, if an older version named them otherwise."""
        names = ((name, spec) for spec in self.specs.values() for name in current_names(spec.name))
        return dict(reversed(list(names)))  # the first of one name counts

    def rest(self, blob: str) -> list[LeafSpec]:
        """Stored leaves of a blob that are not used."""
        return [spec for spec in self.stored(blob) if spec.name not in self._taken]

    def note_rest(self, blob: str) -> None:
        """Note unused leaves as unexpected."""
        self.findings.unexpected += [spec.name for spec in self.rest(blob) if spec.name not in self._offered]

    def unlike(self, text: str) -> None:
        """Note a difference that no option skips."""
        self.findings.unlike.append(text)

    def refuse(self, blob: str, why: str) -> None:
        """Note that nothing can be loaded into an object."""
        self.findings.refused.append(why)
        self._taken.update(spec.name for spec in self.stored(blob))

    def into(self, blob: str, spec: LeafSpec, live: torch.Tensor) -> None:
        """Read a leaf into a live tensor, once for all its names; for a wrapper that is alike its parts."""
        source = spec.stored_as
        if spec.role is Role.SUBCLASS or is_wrapper(live):
            self._parts(spec, live, lambda inner, part: self.into(blob, inner, part))
            return
        sharded = is_sharded(live)
        try:
            local = admitted_in_place(memory_of_shard(live) if sharded else live, spec.name)
        except BlobError as error:
            self.findings.refused.append(str(error))
            return
        if not self.fits(spec, live):
            self.unlike(f"{spec.name} is {form(live)} here, {spec} in the checkpoint")
            return
        known = self._read_into.earlier(live, source)
        if source not in self._live:
            self._live[source] = live
            self.live_tensors.append(live)
        if known is None:
            self.destinations.append((spec.name, local))
            target = target_of(live, spec.name) if sharded else None
            read = Read(source, spec, local, target)
            self.reads.append(read)
            if read.destination is None:
                self.fills.append((blob, read.settle))
            if spec.order_changed and not sharded:
                self.fills.append((blob, partial(lay_as_saved, live, spec)))
        elif known != source and (source, known) not in self._twofold:
            self._twofold.append((source, known))
        elif spec.order_changed and (first := self._live[source]) is not live:
            self.fills.append((blob, partial(take_memory_of, first, live)))

    def conclude(self) -> None:
        """Decide what needed all leaves.

        - Two stored leaves may be read into one tensor if they have the same bytes.
        - A leaf is not missing if its tensor is read by another name.
        - Buffers that a module has not created yet are planned if nothing else differs.
        """
        strict = self.options.strict
        late_buffers = strict or self.options.late_buffers
        for plan in self.pending_aliases:  # now it is known which tensors are live
            plan()
        for source, known in self._twofold:
            if not self.options.same_content(source, known):
                self.unlike(
                    f"{source} and {known} are one tensor here and two in the checkpoint, which differ: "
                    f"leave out one of them, exclude=[{source!r}]"
                )
        missing = [(name, live) for name, live in self._absent if live is None or not self.is_read(live)]
        self.findings.lack(missing)
        if self.findings.differ(strict=strict, kept=self.kept):
            self.findings.unlike += self.reshaped
        late = {name: plan for name, plan in self.late.items() if name not in self._offered}
        if late_buffers and not self.findings.differ(strict=strict, kept=self.kept):
            for plan, _ in late.values():
                plan()
        else:
            self.findings.unexpected += (
                name for name, (_, has_place) in late.items() if not (late_buffers and has_place)
            )
        if not all_torch_memory([memory.untyped_storage() for _, memory in self.destinations]):
            self.findings.refused += unwritable(self.destinations)

    def is_free_for(self, spec: LeafSpec, live: torch.Tensor) -> bool:
        """Whether no other leaf is read into a tensor, unless it has the same bytes."""
        known, source = self._read_into.of(live), spec.stored_as
        return known in (None, source) or (known is not None and self.options.same_content(source, known))

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares a byte with one that a leaf is read into."""
        return self._extents.overlap(tensor, self.live_tensors)

    def is_read(self, live: torch.Tensor) -> bool:
        """Whether a leaf is read into a tensor, or into all parts of a wrapper."""
        if is_wrapper(live):
            return all(self.is_read(part) for part in inner_tensors(live, "").values())
        return self._read_into.of(live) is not None

    def _parts(
        self, spec: LeafSpec, live: torch.Tensor, add: Callable[[LeafSpec, torch.Tensor], None]
    ) -> bool:
        """Use the inner leaves of a wrapper; False, noted, if the live tensor is another one."""
        stored = self.json(spec) if spec.role is Role.SUBCLASS else None
        here = description(live, spec.name) if is_wrapper(live) else None
        known = spec.role is Role.SUBCLASS and isinstance(stored, dict)
        for name in stored.get("inner", ()) if known and stored != here and isinstance(stored, dict) else ():
            self.take(f"{spec.name}.{name}")
        if here is None or stored != here:
            self.unlike(
                f"{spec.name} is {in_words(here) if here else form(live)} here, "
                f"{in_words(stored) if known else spec} in the checkpoint"
            )
            return False
        for name, part in inner_tensors(live, spec.name).items():
            if (inner := self.take(f"{spec.name}.{name}", part)) is not None:
                add(inner, part)
        return True

    def alike(self, spec: LeafSpec, model: torch.Tensor | None) -> Maker:
        """Returns what makes a new tensor once all is read: a DTensor or wrapper like `model`, or plain."""
        if spec.role is Role.SUBCLASS:
            return self.wrapper_alike(spec, model)
        if model is not None and is_sharded(model):
            as_saved = None if tuple(model.shape) == spec.shape else spec.sharding
            made = self.fresh_like(replace(spec, sharding=as_saved), model)
            return lambda device: made
        return self.fresh(spec).on

    def wrapper_alike(self, spec: LeafSpec, model: torch.Tensor | None) -> Maker:
        """The same for a wrapper subclass; noted if the model has another description."""
        if model is None or not is_wrapper(model):
            self.unlike(
                f"{spec.name} is {in_words(self.json(spec))} in the checkpoint, and there is no such tensor "
                "here to make it like"
            )
            return lambda device: torch.empty(0)
        build = rebuilder(model)
        parts: dict[str, Maker] = {}
        self._parts(spec, model, lambda inner, part: parts.update({inner.name: self.alike(inner, part)}))
        cut = len(spec.name) + 1
        return lambda device: build({name[cut:]: part(device) for name, part in parts.items()})

    def fresh(self, spec: LeafSpec) -> Read:
        """Read a leaf into new memory, the same for all its names."""
        source = spec.stored_as
        if source not in self._fresh:
            own = self.specs.get(source, spec)
            self._fresh[source] = Read(source, own, becomes=self.converted.get(source))
            self.reads.append(self._fresh[source])
        return self._fresh[source]

    def fresh_like(self, spec: LeafSpec, model: torch.Tensor) -> torch.Tensor:
        """Read a leaf into a new DTensor on the mesh of the DTensor `model`."""
        dtype = self.converted.get(spec.name) or torch_dtype(by_name(spec.dtype or ""))
        found = empty_like(model, spec.shape, dtype, spec.sharding)
        self.into(spec.blob, spec, found)
        return found

    def models(
        self, blob: str, value: Any, ask: Callable[[], Mapping[str, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of an object's current state, from `ask`; called only if needed."""
        special = any(spec.sharding or spec.role is Role.SUBCLASS for spec in self.stored(blob))
        return ask() if special else {}

    def live(self, spec: LeafSpec) -> torch.Tensor | None:
        """The live tensor that a leaf, or the leaf it is an alias of, is read into."""
        return self._live.get(spec.stored_as)

    @cached_property
    def aliased(self) -> frozenset[str]:
        """Leaves that have aliases."""
        return frozenset(spec.alias_of for spec in self.specs.values() if spec.alias_of is not None)

    def value(self, spec: LeafSpec) -> Any:
        """A stored value without tensors in it."""
        return decode(self.json(spec))

    def json(self, spec: LeafSpec) -> Json:
        """The typed form of a stored value."""
        if spec.stored_as not in self.values:
            raise DamagedError(f"the checkpoint describes value {spec.name!r} but does not hold it")
        return self.values[spec.stored_as]

    def fits(self, spec: LeafSpec, live: torch.Tensor) -> bool:
        """Whether a leaf can be read into a tensor, converted if `cast` has that type for it."""
        if same_form(spec, live):
            return True
        number = spec.kind == "tensor" and torch_dtype(by_name(spec.dtype or "")).is_floating_point
        if not number or not live.is_floating_point() or spec.shape != live.shape:
            return False
        self.findings.types[spec.name] = live.dtype
        wanted = self.options.cast(spec.name) if self.options.cast is not None else None
        return live.dtype in (wanted, self.converted.get(spec.name))


class LeafValue:
    """The value of a leaf; call it once everything is read.

    New tensors go to the device that it is called with. Those with the name of one in `models` are made like
    it: DTensors with its placements, subclasses of its class. The form is checked at construction.
    """

    def __init__(
        self, plan: RestorePlan, spec: LeafSpec, models: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        self._plan, self._spec, self._models = plan, spec, models
        self._json: Json = plan.json(spec)
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
        shared = [self._common(name, None).detach() for name in self._specs if self._is_shared(name)]
        before = [as_copied(one).clone() for one in shared]
        try:
            load(self(None))
        finally:
            for one, content in zip(shared, before, strict=True):
                put(one, content)

    def _refer(self, name: Json) -> None:
        """Note a tensor that the value refers to."""
        plan = self._plan
        inner = plan.specs.get(name) if isinstance(name, str) else None
        if name in plan.kept:
            plan.unlike(f"{self._spec.name} is a value that holds {name}, which cannot be left out alone")
            return
        if inner is None or (inner.kind != "tensor" and inner.role is not Role.SUBCLASS):
            raise DamagedError(
                f"value {self._spec.name!r} refers to tensor {name!r}, which the checkpoint lacks"
            )
        plan.find(inner.name)
        if inner.name in self._specs:
            return
        self._specs[inner.name] = inner
        if inner.alias_of is None:
            self._make(inner)
        else:  # once it is known which tensors are live
            plan.pending_aliases.append(lambda: None if self._live(inner) is not None else self._make(inner))

    def _make(self, inner: LeafSpec) -> None:
        other = stand_in(inner.sharding, inner.shape, self._plan.live_tensors)
        self._made[inner.name] = self._plan.alike(inner, self._models.get(inner.name, other))

    def _common(self, name: str, device: torch.device | None) -> torch.Tensor:
        live = self._live(self._specs[name])
        return self._made[name](device) if live is None else live

    def _live(self, spec: LeafSpec) -> torch.Tensor | None:
        """The live tensor for a leaf, unless it has another type."""
        live = self._plan.live(spec)
        return live if live is not None and dtype_name(live.dtype) == spec.dtype else None

    def _is_shared(self, name: str) -> bool:
        """Whether other holders have the tensor."""
        spec = self._specs[name]
        return spec.alias_of is not None or name in self._plan.aliased or self._live(spec) is not None

    def _as_it_was(self, one: torch.Tensor, spec: LeafSpec, *, parameter: bool) -> torch.Tensor:
        """The shared tensor itself if it had the same requires_grad, else a view with the saved one.

        The saved state decides: live tensors get their saved requires_grad at the end of the load.
        """
        if not self._is_shared(spec.name):
            return learning(one, spec, None, parameter=parameter)
        if self._live(spec) is None:  # made at the first call, for all holders of the same object
            same = (spec.stored_as, parameter, spec.frozen)
            if same not in self._plan.shared_tensors:
                self._plan.shared_tensors[same] = learning(one, spec, None, parameter=parameter)
            return self._plan.shared_tensors[same]
        first = self._plan.specs.get(spec.stored_as, spec)
        alike = spec.frozen is None or spec.frozen is (True if first.frozen is None else first.frozen)
        if alike and isinstance(one, nn.Parameter) is parameter:
            return one
        return learning(one.detach(), spec, None, parameter=parameter)
