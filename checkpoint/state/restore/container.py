"""Load leaves back into containers, in place.

A load builds the stored tree, then changes the live container to match it. Objects at the same place stay the
same objects, tensors of the same form included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from operator import is_
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.format.value_decoding import decode, holds_only_tensors, references
from torchrelay.checkpoint.format.values import encode, tagged
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, LeafSpec, Role, is_sharded, learning, stand_in
from torchrelay.checkpoint.state.restore.plan import RestorePlan
from torchrelay.checkpoint.state.tensor_memory import (
    admitted_in_place,
    device_for,
    empty,
    is_wrapper,
    same_form,
)
from torchrelay.errors import BlobError, DamagedError
from torchrelay.jobs.blobs import is_factory, is_stateful
from torchrelay.jobs.containers import (
    MAPPINGS,
    classes_of_fields,
    found_inside,
    is_container,
    is_generator,
    is_record,
    record_fields,
    registered_record,
)
from torchrelay.jobs.session import warn
from torchrelay.records import Json, dataclass

Builder = Callable[[], Any]
_ABSENT: Any = object()


@dataclass(eq=False)
class _Record:
    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a stored value, by its name."""

    name: str


@dataclass(frozen=True)
class _Blob:
    name: str


def regrouped(
    objects: Mapping[str, Any], specs: Mapping[str, LeafSpec], values: Mapping[str, Json]
) -> tuple[dict[str, LeafSpec], dict[str, Json], set[str]]:
    """Convert stored leaves to those that the objects need, if a dict was saved in another form.

    Containers without a stored tree get one made of the leaves with their names. Such leaves are of earlier
    epochs, in which every entry of a dict was a blob, or were requested alone. The third result names these
    containers, whose other content stays. A module takes the tensors of a dict of tensors, such as a state
    dict.
    """
    found, content, partial = dict(specs), dict(values), set()
    for blob, live in objects.items():
        if isinstance(live, nn.Module):
            if blob in values and holds_only_tensors(values[blob]):
                del found[blob]
            continue
        if type(live) is torch.Tensor or blob in specs or not is_container(live):
            continue
        mine = [
            spec
            for spec in specs.values()
            if spec.name.startswith(f"{blob}.") and (spec.blob == blob or spec.blob not in objects)
        ]
        trees = {
            spec.name: values[spec.name] for spec in mine if spec.role is Role.VALUE and spec.name in values
        }
        inner = {name for tree in trees.values() for name in references(tree)}
        roots = {**trees, **{s.name: tagged("tensor", s.name) for s in mine if s.role in _TENSOR_ROLES}}
        if not (roots := {name: root for name, root in roots.items() if name not in inner}):
            continue
        partial.add(blob)
        for spec in mine:
            if spec.name in trees:
                del found[spec.name]
            else:
                found[spec.name] = replace(spec, blob=blob)
        content[blob] = _nested(live, {name[len(blob) + 1 :]: root for name, root in roots.items()})
        found[blob] = LeafSpec(blob, blob, Role.VALUE, MAIN_GROUP, "value", None, (), 0)
    return found, content, partial


_TENSOR_ROLES = (Role.TENSOR, Role.PARAMETER, Role.BUFFER, Role.SUBCLASS)


def _nested(live: Any, roots: Mapping[str, Json]) -> Json:
    """A dict of the values at these dotted paths; keys with dots are recognised by the live dict."""
    below: dict[str, dict[str, Json]] = {}
    pairs: dict[str, Json] = {}
    for path, root in roots.items():
        keys = [key for key in live if isinstance(key, str)] if isinstance(live, MAPPINGS) else []
        dicts = [key for key in keys if path.startswith(f"{key}.")]
        if dicts and path not in keys:
            below.setdefault(dicts[0], {})[path[len(dicts[0]) + 1 :]] = root
        else:
            pairs[path] = root
    pairs.update({key: _nested(live[key], inner) for key, inner in below.items()})
    return tagged("dict", [[key, item] for key, item in pairs.items()])


def draft_container(draft: RestorePlan, blob: str, live: Any, *, partial: bool) -> Builder | None:
    """Plan to change a container to the stored one; the builder returns it, once all is read.

    If the stored value has another type, the builder returns a new object for the workspace, and the blob is
    among `draft.replaced`. `partial`: entries of a dict that are not stored stay.
    """
    spec = draft.specs.get(blob)
    if spec is None and not draft.stored(blob):
        inside = [found for _, found in found_inside(live, "", lambda _, found: not is_container(found))]
        if inside and all(is_stateful(found) or is_factory(found) for found in inside):
            return None  # only blobs
    if (spec := draft.take(blob)) is None:
        return None
    if spec.role is not Role.VALUE:
        draft.unlike(f"{blob} is a {type(live).__name__} here and {spec} in the checkpoint")
        return None
    json = draft.json(spec)
    shown = decode(json, tensor=lambda name: _shown(draft, str(name)), blob=_Blob, record=_Record)
    if not (_alike(live, shown) or (partial and isinstance(live, MAPPINGS))):
        draft.replaced.append(blob)
        live = _ABSENT
    found = list(_twins(live, shown, {}, blob, root=True))
    twins = {name: twin for name, twin in reversed(found) if twin is not None}  # the first of each name
    made = {name: _maker(draft, blob, name, twins.get(name)) for name in dict.fromkeys(references(json))}
    draft.note_rest(blob)

    def build() -> Any:
        tensors: dict[str, torch.Tensor] = {}

        def tensor(name: Json) -> torch.Tensor:
            if name not in tensors:
                tensors[str(name)] = made[str(name)]()
            return tensors[str(name)]

        new = decode(json, tensor=tensor, blob=_Blob, record=_Record)
        return _Adoption(draft.objects, draft.adopted, partial=partial).adopt(live, new, {}, root=True)

    return build


def _shown(draft: RestorePlan, name: str) -> Any:
    """Stand-in for a tensor in a plan; for an array or list of numbers one without content."""
    spec = draft.specs.get(name)
    if spec is None or spec.role is not Role.VALUE:
        return StoredTensor(name)
    return empty(spec)


def _alike(live: Any, shown: Any) -> bool:
    """Whether a live object can be changed to match the stored one."""
    if isinstance(shown, _Record):
        return is_record(live)
    if is_generator(shown):
        return type(live) is type(shown) and _source_of(live) == _source_of(shown)
    if isinstance(shown, torch.Tensor) or not is_container(live):
        return False
    if type(live) is not type(shown):
        return False
    return not hasattr(live, "dtype") or (
        (live.dtype, live.shape) == (shown.dtype, shown.shape) and live.flags.writeable
    )


def _source_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return generator.device.type
    return type(getattr(generator, "bit_generator", getattr(generator, "_bit_generator", None))).__name__


def _twins(
    live: Any, shown: Any, classes: Mapping[str, type], path: str, *, root: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every stored tensor with the live one at its place or None; raises BlobError for unknown classes."""
    if isinstance(shown, StoredTensor):
        yield shown.name, live if isinstance(live, torch.Tensor) else None
    elif isinstance(shown, _Record):
        kind = _class_of(live, shown, classes, path, root=root)
        of_fields = classes_of_fields(kind)
        for name, item in shown.fields.items():
            yield from _twins(getattr(live, name, None), item, of_fields.get(name, {}), f"{path}.{name}")
    elif isinstance(shown, MAPPINGS):
        known = live if isinstance(live, MAPPINGS) else {}
        for key, item in shown.items():
            yield from _twins(known.get(key), item, classes, f"{path}.{key}")
    elif isinstance(shown, (list, tuple, deque, set, frozenset)):
        ordered = isinstance(live, (list, tuple, deque)) and not isinstance(shown, (set, frozenset))
        for index, (item, twin) in enumerate(zip_longest(shown, live if ordered else (), fillvalue=_ABSENT)):
            if item is not _ABSENT:
                yield from _twins(twin, item, classes, f"{path}[{index}]")


def _class_of(
    live: Any, shown: _Record, classes: Mapping[str, type], path: str, *, root: bool = False
) -> type:
    if is_record(live) and (root or type(live).__qualname__ == shown.name):
        return type(live)
    if (kind := classes.get(shown.name) or registered_record(shown.name)) is None:
        raise BlobError(
            f"{path} is an instance of the dataclass {shown.name} in the checkpoint, and its class is "
            "unknown here: "
            + ("register an instance" if root else "name that class in the annotation of the field")
        )
    return kind


def _maker(draft: RestorePlan, blob: str, name: str, twin: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """Returns a tensor of a container: the live one at its place, filled, or a new one."""
    if name in draft.kept:
        if twin is None:
            draft.findings.refused.append(
                f"{name} is left out, and {blob} has no tensor there that could stay: leave out all of "
                f"it, exclude=[{blob!r}]"
            )
        return lambda: torch.empty(0) if twin is None else twin
    spec = draft.take(name)
    if spec is None or (spec.kind != "tensor" and spec.role is not Role.SUBCLASS):
        raise DamagedError(f"value {blob!r} refers to tensor {name!r}, which the checkpoint lacks")

    def as_saved(memory: torch.Tensor, twin: torch.Tensor | None) -> torch.Tensor:
        """The leaf in new memory, once: a parameter and its detached tensor are separate."""
        form = spec.stored_as, spec.role, spec.frozen
        if form not in draft.made:
            draft.made[form] = learning(memory.detach(), spec, twin)
        return draft.made[form]

    if (known := draft.live(spec)) is not None:
        first = draft.specs.get(spec.stored_as, spec)
        detached = spec.role is Role.TENSOR and spec.frozen and known.requires_grad
        if not detached and (first.frozen is spec.frozen or None in (first.frozen, spec.frozen)):
            return lambda: known
        return lambda: as_saved(known, None)
    if twin is not None and fits_in_place(draft, spec, twin):
        draft.into(blob, spec, twin)
        return lambda: twin
    if twin is None:
        model = stand_in(spec.sharding, spec.shape, draft.live_tensors)
    else:
        model = twin if is_sharded(twin) or is_wrapper(twin) else None
    make = draft.alike(spec, model)
    device = device_for(spec) or (None if twin is None or twin.is_meta else twin.device)

    return lambda: as_saved(make(device), twin)


def fits_in_place(draft: RestorePlan, spec: LeafSpec, twin: torch.Tensor) -> bool:
    """Whether a leaf can be read into a live tensor whose memory is not used elsewhere in the load."""
    if spec.role is Role.SUBCLASS or is_wrapper(twin):
        return spec.role is Role.SUBCLASS and is_wrapper(twin)
    try:
        admitted_in_place(twin, spec.name)  # first: a tensor without memory has few other properties
    except BlobError:
        return False
    device = device_for(spec) or twin.device  # a task may have put one on the GPU in its place
    return same_form(spec, twin) and twin.device == device and not draft.shares_memory(twin)


def change_container(live: Any, value: Any) -> Any:
    """Change a live container or generator to match a value of its type; returns it."""
    return _Adoption({}, set(), partial=False).adopt(live, value, {}, root=True)


class _Adoption:
    def __init__(self, objects: Mapping[str, Any], adopted: set[int], *, partial: bool) -> None:
        self._objects, self._adopted, self._partial = objects, adopted, partial

    def adopt(self, live: Any, new: Any, classes: Mapping[str, type], *, root: bool = False) -> Any:
        """The live object, changed if possible, else the new one."""
        if isinstance(new, _Blob):
            inside = live is not _ABSENT and (is_factory(live) or new.name not in self._objects)
            return live if inside else self._objects.get(new.name)
        if isinstance(new, _Record):
            return self._record(live, new, classes, root=root)
        if type(new) is tuple:
            before = live if type(live) is tuple else ()
            made = tuple(self._items(before, new, classes))
            same = len(before) == len(made) and all(map(is_, before, made))
            return before if same else made
        if id(live) in self._adopted and _is_like(live, new):
            return live  # it has two names, and was changed under the first
        place = live if _alike(live, new) and id(live) not in self._adopted else None
        if place is not None:
            self._adopted.add(id(place))
        if is_generator(new):
            return new if place is None else continue_generator(place, new)
        if isinstance(new, MAPPINGS):
            return self._mapping(live, new, place, classes)
        if isinstance(new, (list, deque)):
            return self._sequence(live, new, place, classes, root=root)
        if isinstance(new, (set, frozenset)):
            items = {self.adopt(_ABSENT, item, classes) for item in new}
            if isinstance(new, frozenset) or place is None:
                return type(new)(items)
            place.clear()
            place.update(items)
            return place
        if place is None:
            return new
        place[... if hasattr(new, "dtype") else slice(None)] = new  # an array of numpy or a bytearray
        return place

    def _mapping(self, live: Any, new: Any, place: Any, classes: Mapping[str, type]) -> Any:
        before = live if isinstance(live, MAPPINGS) else {}
        items = {key: self.adopt(before.get(key, _ABSENT), item, classes) for key, item in new.items()}
        if self._partial and isinstance(live, MAPPINGS):
            place, items = live, {**live, **items}
        target = new if place is None else place
        target.clear()
        for key, item in items.items():  # update() of a Counter adds
            target[key] = item
        return target

    def _sequence(self, live: Any, new: Any, place: Any, classes: Mapping[str, type], *, root: bool) -> Any:
        items = self._items(live if isinstance(live, (list, tuple, deque)) else (), new, classes)
        if isinstance(place, deque) and not root and place.maxlen != new.maxlen:
            place = None
        target = new if place is None else place
        target.clear()
        target.extend(items)
        return target

    def _items(self, before: Any, new: Any, classes: Mapping[str, type]) -> list[Any]:
        pairs = list(zip_longest(new, before, fillvalue=_ABSENT))[: len(new)]
        return [self.adopt(twin, item, classes) for item, twin in pairs]

    def _record(self, live: Any, new: _Record, classes: Mapping[str, type], *, root: bool) -> Any:
        same = is_record(live) and (root or type(live).__qualname__ == new.name)
        if same and id(live) in self._adopted and _is_like(live, new):
            return live
        kind = _class_of(live, new, classes, new.name, root=root)
        of_fields = classes_of_fields(kind)
        known = {*record_fields(live)} if same else {*kind.__dataclass_fields__}  # type: ignore[attr-defined]
        gone = [name for name in new.fields if name not in known and name not in kind.__dataclass_fields__]  # type: ignore[attr-defined]
        if gone:
            warn(
                f"{kind.__qualname__} has no {', '.join(gone)} any more: the stored value is ignored",
                stacklevel=2,
            )
        fields = {
            name: self.adopt(getattr(live, name, _ABSENT) if same else _ABSENT, item, of_fields.get(name, {}))
            for name, item in new.fields.items()
            if name not in gone
        }
        frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        in_place = same and not frozen and id(live) not in self._adopted
        target = live if in_place else object.__new__(kind)
        self._adopted.add(id(target))
        for name, item in fields.items():
            object.__setattr__(target, name, item) if frozen else setattr(target, name, item)
        return target


def _is_like(live: Any, new: Any) -> bool:
    """Whether a container that was changed already equals another stored value."""
    if isinstance(new, _Record):
        fields = new.fields.items()
        return is_record(live) and all(_is_like(getattr(live, name, _ABSENT), item) for name, item in fields)
    if type(live) is not type(new):
        return False
    if isinstance(new, MAPPINGS):
        return [*live] == [*new] and all(_is_like(live[key], item) for key, item in new.items())
    if isinstance(new, (list, tuple, deque)):
        return len(live) == len(new) and all(map(_is_like, live, new))
    if isinstance(new, torch.Tensor):
        return live is new
    if hasattr(new, "dtype") or is_generator(new):
        return bool(encode(live, "") == encode(new, ""))
    return bool(live == new or live is new)


def continue_generator(live: Any, new: Any) -> Any:
    """Give a generator the state of another one that was made from the stored form."""
    if isinstance(live, torch.Generator):
        live.set_state(new.get_state())
    elif hasattr(live, "setstate"):
        live.setstate(new.getstate())
    elif hasattr(live, "bit_generator"):
        bits, stored = live.bit_generator, new.bit_generator
        seeds = getattr(stored, "seed_seq", None)
        if seeds is not None and getattr(bits, "seed_seq", None) is not None:
            bits.__setstate__((stored.state, seeds))  # with the seeds that spawned ones come from
        bits.state = stored.state
    else:
        live.set_state(new.get_state(legacy=False))
    return live


def check_changed(blobs: Collection[str], objects: Mapping[str, Any], ask: str) -> None:
    """Raise BlobError for `blobs` that could only be replaced; `ask` is a call for the value of `{0}`."""
    if blobs:
        shown = ", ".join(f"{blob} ({type(objects[blob]).__name__})" for blob in blobs)
        raise BlobError(
            f"{shown} cannot be changed in place to the stored value; nothing was changed: use "
            f"{ask.format(repr(next(iter(blobs))))}"
        )
