"""Load leaves back into an optimizer: its state becomes exactly the stored one.

Nothing is cast (`load_state_dict` casts state to the parameter's element type) and no step is made. Tensors
that exist in the right form are loaded in place; dicts keep their identity, for schedulers and graphs that
hold them. A parameter is found by its name, or, if no given module names it, by its place, so that an
optimizer can be loaded without its modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from torchrelay.checkpoint.format.position import matches_any
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, blob_of, is_sharded, learning
from torchrelay.checkpoint.state.module_leaves import (
    PARAMS,
    group_prefix,
    groups_prefix,
    orphans,
    parameters,
    shared_name,
    state_prefix,
    steps_as_torch,
)
from torchrelay.checkpoint.state.names import local_part
from torchrelay.checkpoint.state.restore.container import fits_in_place
from torchrelay.checkpoint.state.restore.plan import LeafValue, RestorePlan
from torchrelay.checkpoint.state.tensor_memory import (
    device_for,
    dtype_name,
    empty,
    is_wrapper,
    outside_inference_mode,
    same_form,
    take_memory_of,
    with_strides_of,
)
from torchrelay.checkpoint.state.tree_leaves import container_tensors, description, made_state
from torchrelay.errors import BlobError
from torchrelay.records import dataclass

Builder = Callable[[torch.device | None], Any]
"""Returns an entry once everything is read; new tensors go to the device."""


def draft_optimizer(draft: RestorePlan, blob: str, optimizer: Optimizer) -> None:
    """Plan to load an optimizer."""
    groups: list[list[str]] = []  # the parameter names of each stored group
    while (name := f"{group_prefix(blob, len(groups))}{PARAMS}") in draft.specs:
        spec = draft.take(name)
        groups.append(draft.value(spec) if spec else [])
    if not groups:
        if draft.stored(blob):
            draft.unlike(f"{blob} is an optimizer here, and something else in the checkpoint")
        elif not any(name.startswith(group_prefix(blob, 0)) for name in draft.kept):
            draft.lacks(blob)
        return
    mine = {id(one) for one in parameters(optimizer)}
    # Groups that the program added in training are added again: their parameters are found by name or in
    # containers. None is, if one is not found or is in a group already.
    wanted = [
        [_in_container(draft, name) if (one := draft.parameters.get(name)) is None else one for name in names]
        for names in groups[len(optimizer.param_groups) :]
    ]
    added = [[one for one in group if one is not None and id(one) not in mine] for group in wanted]
    added = added if list(map(len, added)) == list(map(len, wanted)) else []
    members = _members(draft, blob, optimizer, groups, added)
    if members is None:
        return
    _Load(draft, blob, optimizer, members, added).plan(groups[0])


def draft_shared_parameters(draft: RestorePlan, blob: str, optimizer: Optimizer) -> None:
    """Plan parameters that no other blob holds and that an earlier optimizer shares."""
    for name, parameter in orphans(blob, optimizer) if draft.aliased else ():
        spec = draft.specs.get(name)
        if name in draft.aliased and spec is not None and spec.blob == blob and draft.fits(spec, parameter):
            draft.into(blob, spec, parameter)


def _in_container(draft: RestorePlan, name: str) -> torch.Tensor | None:
    """The tensor of this name in a container: the live one if that fits, else a new one; None without."""
    spec = draft.specs.get(name)
    if spec is None or spec.blob not in draft.containers or spec.kind != "tensor" or spec.sharding:
        return None
    if (found := draft.live(spec)) is None:
        found = dict(container_tensors(spec.blob, draft.containers[spec.blob])).get(name)
        usable = found is not None and found.is_leaf and not found.is_inference()
        if found is None or not usable or not fits_in_place(draft, spec, found):
            with outside_inference_mode():
                found = learning(empty(spec, device_for(spec) or "cpu"), spec, None)
        draft.into(spec.blob, spec, found)
    return found


def _lies_in_container(draft: RestorePlan, name: str) -> bool:
    spec = draft.specs.get(name)
    return spec is not None and spec.blob in draft.containers and spec.kind == "tensor"


def _members(
    draft: RestorePlan,
    blob: str,
    optimizer: Optimizer,
    groups: list[list[str]],
    added: list[list[torch.Tensor]],
) -> dict[str, torch.Tensor] | None:
    """Live parameters by stored name, also if they have others now; None, noted, if the groups differ."""
    live = [*(group[PARAMS] for group in optimizer.param_groups), *added]
    here, there = [len(group) for group in live], [len(group) for group in groups]
    if here != there:
        draft.unlike(f"{blob} has groups of {here} parameters here, of {there} in the checkpoint")
        return None
    members: dict[str, torch.Tensor] = {}
    for index, (live_ones, names) in enumerate(zip(live, groups, strict=True)):
        stored = dict.fromkeys(names)
        for place, parameter in enumerate(live_ones):
            known = draft.names.get(id(parameter), orphan := f"{blob}.param.{index}.{place}")
            held = names[place] == orphan and orphan in draft.specs  # no blob had it when it was saved
            name = names[place] if known == orphan or held else draft.called(parameter, stored)
            if name is None and known not in draft.parameters and _lies_in_container(draft, names[place]):
                name = names[place]  # it was put into the container, or moved within it, since the launch
            if name is None:
                draft.unlike(text := f"{blob} has {known} in group {index} here, and not in the checkpoint")
                draft.findings.members[text] = known
            members[name or known] = parameter
            stored.pop(name or known, None)
        draft.findings.strangers += stored
    return members


_SCHEDULERS_OPTIONS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


@dataclass
class _Load:
    """The plan for one optimizer whose parameters are matched."""

    draft: RestorePlan
    blob: str
    optimizer: Optimizer
    members: dict[str, torch.Tensor]
    added: list[list[torch.Tensor]]

    def __post_init__(self) -> None:
        self.local = local_part(self.optimizer)
        self._made: dict[int, Mapping[str, Any]] = {}
        self._builders: dict[str, Builder] = {}
        stored = {id(one): self.draft.specs.get(name) for name, one in self.members.items()}
        self._orders = {key: None if spec is None else spec.order for key, spec in stored.items()}
        self._as_torch = steps_as_torch(self.local)

    def plan(self, first: list[str]) -> None:
        """Plan all; `first` are the stored names of the parameters in the first group."""
        self._contents()
        rest_name = shared_name(self.blob)  # state that belongs to no parameter
        spec = self.draft.take(rest_name) if rest_name in self.draft.specs else None
        shared: Builder = (lambda device: {}) if spec is None else LeafValue(self.draft, spec)
        if isinstance(self.local, LBFGS):
            self._check_joint_state(first)
        if self.draft.kept or self.draft.options.cast is not None:
            # Raise for a partial exclusion of a parameter's state, and let state follow its type.
            prefix = state_prefix(self.blob)
            owners: dict[str, torch.Tensor] = {}
            for spec in self._beginning(prefix):
                name = blob_of(spec.name[len(prefix) :].rpartition(".")[0], self.members)
                if name is None:
                    continue
                owner = owners[name] = self.members[name]
                stored = self.draft.specs.get(name)
                followed = (
                    stored is not None and stored.dtype == spec.dtype and self.draft.fits(stored, owner)
                )
                key = spec.name[len(prefix) + len(name) + 1 :]
                followed = followed and self.draft.specs.get(spec.stored_as, spec).blob == self.blob
                if followed and spec.dtype != dtype_name(owner.dtype) and key != "step":
                    self.draft.converted[spec.stored_as] = owner.dtype
            left = [one[len(prefix) :] for one in self.draft.kept if one.startswith(prefix)]
            parts = {blob_of(one.rpartition(".")[0], self.members) for one in left}
            for name in filter(parts.__contains__, owners):
                self.draft.unlike(f"{prefix}{name} is left out in part, and its parameter needs all of it")
        rest = self.draft.rest(self.blob)
        values = [spec for spec in rest if spec.kind == "value" and spec.role is not Role.SUBCLASS]
        # Building them takes the tensors inside, which are not entries themselves.
        trees: dict[str, Builder] = {spec.name: LeafValue(self.draft, spec) for spec in values}
        groups = self._groups(trees)
        state = self._state(trees)
        self.draft.note_rest(self.blob)
        self.draft.steps.append((self.blob, lambda: self._install(groups, state, shared)))

    def _check_joint_state(self, order: list[str]) -> None:
        """LBFGS keeps one vector for all parameters, under the first: it depends on all, and their order."""
        begun = self._beginning(state_prefix(self.blob))
        if any(matches_any(name, self.draft.options.excluded) for name in self.members):
            self.draft.left_out += [spec.name for spec in begun if self.draft.find(spec.name)]
            self.draft.kept = self.draft.kept.union(self.draft.left_out)
            return
        size = sum(one.numel() * (1 + one.is_complex()) for one in parameters(self.local))
        stored = next((spec for spec in begun if spec.name.endswith((".d", ".prev_flat_grad"))), None)
        if stored is not None and stored.shape not in ((), (size,)):
            self.draft.unlike(
                f"{self.blob} is an LBFGS of {size} elements here, of {stored.shape[0]} in the checkpoint"
            )
        elif stored is not None and [*self.members] != order:
            self.draft.unlike(
                f"{self.blob} is an LBFGS of parameters in another order than in the checkpoint, where "
                f"{order[0]} is the first, and its state depends on that order"
            )

    def _contents(self) -> None:
        """Plan parameters stored with the optimizer, and check the shapes of the others."""
        for name, parameter in self.members.items():
            spec = self.draft.specs.get(name)
            moved = self.draft.names.get(id(parameter)) != name and _lies_in_container(self.draft, name)
            if spec is not None and moved:
                self.draft.into(spec.blob, spec, parameter)  # the container receives it
            elif spec is not None and spec.blob == self.blob:
                self.draft.take(name)
                self.draft.into(self.blob, spec, parameter)
                twice = self.draft.specs.get(self.draft.names.get(id(parameter), name))
                if twice is not None and twice is not spec:  # a container that did not hold it had a copy
                    self.draft.into(twice.blob, twice, parameter)
            elif spec is not None and spec.role is not Role.SUBCLASS and not self.draft.fits(spec, parameter):
                self.draft.unlike(
                    f"{name} in {self.blob} is {list(parameter.shape)} here, {spec} in the checkpoint"
                )

    def _groups(self, trees: Mapping[str, Builder]) -> list[dict[str, Builder]]:
        prefix = groups_prefix(self.blob)
        keyed: defaultdict[str, list[tuple[str, LeafSpec]]] = defaultdict(list)
        for spec in self._beginning(prefix):
            index, _, key = spec.name[len(prefix) :].partition(".")
            keyed[index].append((key, spec))
        stored = {key for found in keyed.values() for key, _ in found}
        known = {key for group in self.optimizer.param_groups for key in group}
        lacking = sorted(set(self.optimizer.defaults) - stored)
        foreign = sorted(stored - known - set(_SCHEDULERS_OPTIONS))
        # Another version of torch has more options, or fewer, and schedulers add theirs. Only another class
        # both lacks options of this one and has options unknown to it.
        if lacking and foreign:
            self.draft.unlike(
                f"{self.blob} is a {type(self.optimizer).__name__} here; the checkpoint has the options "
                f"{', '.join(foreign)} and lacks {', '.join(lacking)}: it is another kind of optimizer"
            )
        live = [*self.optimizer.param_groups, *({} for _ in self.added)]
        return [
            {key: self._entry(key, spec, group.get(key), trees, None) for key, spec in keyed[str(number)]}
            for number, group in enumerate(live)
        ]

    def _state(self, trees: Mapping[str, Builder]) -> dict[str, dict[str, Builder]]:
        prefix = state_prefix(self.blob)
        keyed: defaultdict[str, list[tuple[str, LeafSpec]]] = defaultdict(list)
        begun = self._beginning(prefix)
        wrapped = tuple(f"{spec.name}." for spec in begun if spec.role is Role.SUBCLASS)
        for spec in begun:
            rest = spec.name[len(prefix) :]
            owner = None if spec.name.startswith(wrapped) else blob_of(rest.rpartition(".")[0], self.members)
            if owner is not None:
                keyed[owner].append((rest[len(owner) + 1 :], spec))
        live = {} if self.draft.rehearsed else self.local.state  # a new one has none
        state: dict[str, dict[str, Builder]] = {}
        for name, found in keyed.items():
            parameter = self.members[name]
            own = live.get(parameter, {})
            state[name] = {key: self._entry(key, spec, own.get(key), trees, parameter) for key, spec in found}
        return state

    def _beginning(self, prefix: str) -> list[LeafSpec]:
        """The remaining leaves of the blob with this prefix."""
        return [spec for spec in self.draft.rest(self.blob) if spec.name.startswith(prefix)]

    def _model(self, spec: LeafSpec, key: str, owner: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor that a wrapper subclass is made like: its parameter, or the result of a first step."""
        if owner is None:
            return None
        if is_wrapper(owner) and description(owner, spec.name) == self.draft.json(spec):
            return owner
        if id(owner) not in self._made:
            try:
                self._made[id(owner)] = made_state(self.local, owner)
            except BlobError as error:
                self._made[id(owner)] = {}
                self.draft.unlike(f"{spec.name} cannot be made: {error}")
        made = self._made[id(owner)].get(key)
        return made if isinstance(made, torch.Tensor) else None

    def _entry(
        self, key: str, spec: LeafSpec, live: Any, trees: Mapping[str, Builder], owner: torch.Tensor | None
    ) -> Builder:
        self.draft.take(spec.name)
        if spec.kind == "value" and spec.role is not Role.SUBCLASS:
            return trees[spec.name]
        source = spec.stored_as
        if source in self._builders:
            return self._builders[source]  # tied tensors are tied again
        builder = self._builders[source] = self._tensor(key, spec, live, owner)
        return builder

    def _tensor(self, key: str, spec: LeafSpec, live: Any, owner: torch.Tensor | None) -> Builder:
        subclass = spec.role is Role.SUBCLASS
        fits = isinstance(live, torch.Tensor) and (subclass or same_form(spec, live))
        if not subclass and (spec.alias_of is not None or spec.name in self.draft.aliased):
            # The live tensor of another blob or optimizer that the entry was tied to. A container gets the
            # entry's own tensor, if that fits, because the program may hold it.
            shared = self.draft.live(spec)
            if shared is None and not fits:
                shared = _in_container(self.draft, spec.stored_as)
            if shared is not None:
                return self._as_shared(shared, live, owner, fits=fits)
        if fits and (subclass or self.draft.is_free_for(spec, live)):
            self.draft.into(self.blob, spec, live)
            return lambda device: live
        if subclass:
            return self.draft.alike(spec, self._model(spec, key, owner))
        # State of a sharded parameter is sharded too, unless it is one value for all of it.
        in_parts = spec.sharding is not None or (owner is not None and () != spec.shape == tuple(owner.shape))
        if owner is not None and is_sharded(owner) and in_parts:
            made = self.draft.fresh_like(spec, owner)
            return lambda device: made
        read = self.draft.fresh(spec)
        home = live.device if isinstance(live, torch.Tensor) else None
        if owner is None or not self._as_torch or spec.order != self._orders.get(id(owner)):
            return lambda device: read.on(home or device)
        placed: dict[torch.device, torch.Tensor] = {}

        def as_owner(device: torch.device | None) -> torch.Tensor:
            """Give it its parameter's memory order, as torch's first step does, for fused kernels."""
            found = read.on(home or device)
            return placed.setdefault(found.device, with_strides_of(owner, found))

        return as_owner

    def _as_shared(
        self, shared: torch.Tensor, live: Any, owner: torch.Tensor | None, *, fits: bool
    ) -> Builder:
        """The shared tensor; or the entry's own one, with the memory of the other.

        A program may hold and change either of the two. Not so if other objects of the load have the own one.
        """
        if shared is live:
            return lambda device: shared
        plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in (shared, live))
        free = fits and plain and self.draft.names.get(id(live)) is None and not self.draft.is_read(live)
        if free and live.device == shared.device:
            self.draft.fills.append((self.blob, lambda: take_memory_of(shared, live)))
            return lambda device: live
        if owner is not None and shared.requires_grad:
            shared = shared.detach()
        return lambda device: shared

    def _install(
        self, groups: list[dict[str, Builder]], state: dict[str, dict[str, Builder]], shared: Builder
    ) -> None:
        for added in self.added:
            self.optimizer.add_param_group({PARAMS: added})
        for group, entries in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: build(None) for key, build in entries.items()})
        devices = {
            id(parameter): parameter.device  # if kernels read `step`; else torch keeps it on the CPU
            if group.get("capturable") or group.get("fused")
            else torch.device("cpu")
            for group in self.optimizer.param_groups
            for parameter in group[PARAMS]
        }
        before = dict(self.local.state)
        self.local.state.clear()
        stepped = {id(one) for one in parameters(self.local)}  # not those of other ranks
        for name, parameter in self.members.items():  # in the form of most programs
            if name not in state or id(parameter) not in stepped:
                continue
            built = {
                key: build(devices[id(parameter)] if key == "step" else parameter.device)
                for key, build in state[name].items()
            }
            kept = before.get(parameter, {})
            kept.clear()
            kept.update(built)
            self.local.state[parameter] = kept
        for name, parameter in self.members.items():
            prefix = f"{state_prefix(self.blob)}{name}."
            stays = name not in state and parameter in before
            if stays and any(kept.startswith(prefix) for kept in self.draft.kept):
                self.local.state[parameter] = before[parameter]
        self.local.state.update(shared(None))
