"""The parts of a restoration: what is stored, what does not fit, what to read, what to do afterwards.

A `Draft` collects these for all blobs while nothing is changed. Each kind of blob has a function that
adds its share (`module_restore`, `optimizer_restore`, `stateful_restore`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.dtypes import by_name, torch_dtype
from torchrelay.checkpoint.disk.values import decode
from torchrelay.checkpoint.disk.windows import Target
from torchrelay.checkpoint.state.dtensors import empty_like, is_sharded, memory_of_shard, target_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.checkpoint.state.subclasses import (
    description,
    inner_tensors,
    is_wrapper,
    plain,
    rebuilder,
    told,
)
from torchrelay.errors import BlobError, DamagedError

_NEAREST_FOR = 20
"""Missing leaves for which the nearest stored names are looked up; the search is quadratic."""


Maker = Callable[[torch.device | None], torch.Tensor]
"""Gives a tensor once everything is read; plain ones go to the device."""


class Read:
    """One tensor to be read: the stored leaf `leaf`, into `memory()`.

    `destination` is memory of a live object, written in place; None means that `memory()` is fresh.
    With a `target` the memory takes only these boxes of the leaf, without it the whole.
    """

    def __init__(
        self,
        leaf: str,
        spec: LeafSpec,
        destination: torch.Tensor | None = None,
        target: Target | None = None,
    ) -> None:
        self.leaf = leaf
        self.spec = spec
        self.destination = destination
        self.target = target

    def memory(self) -> torch.Tensor:
        """The contiguous CPU tensor to fill; fresh memory is allocated at the first call."""
        if self.destination is not None:
            return self.destination
        if not hasattr(self, "_fresh"):
            element = by_name(self.spec.dtype or "")
            shape = self.spec.shape if self.target is None else self.target.shape
            self._fresh = torch.empty(shape, dtype=torch_dtype(element), device="cpu")
        return self._fresh


@dataclass
class Findings:
    """Everything in which the given objects and the checkpoint differ."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    def check(
        self,
        stored: Mapping[str, LeafSpec],
        *,
        strict: bool,
        kept: Collection[str] = (),
        why_absent: Callable[[str], str] = lambda name: "",
    ) -> None:
        """Raise one BlobError that lists all differences; without `strict` only the unlike ones count."""
        lines = [f"differs: {text}" for text in self.unlike]
        reasons: dict[str, str] = {}
        if strict:
            missing = [name for name in self.missing if name not in kept]
            near = missing[:_NEAREST_FOR]
            reasons = {
                name: f" (the save left it out: {why})" for name in missing if (why := why_absent(name))
            }
            hints = {**{name: _nearest(name, stored) for name in near if name not in reasons}, **reasons}
            lines += [f"not in the checkpoint: {name}{hints.get(name, '')}" for name in missing]
            lines += [f"only in the checkpoint: {name}" for name in self.unexpected]
        if lines:
            raise BlobError(
                "the checkpoint does not fit the given objects; nothing was changed:\n  "
                + "\n  ".join(lines)
                + "\nBuild the objects as they were when it was saved, or load only blobs that fit, "
                "with open_checkpoint or ctx.load_blobs"
                + (" (their strict=False skips leaves that only one side has)" if not self.unlike else "")
                + ("; a run resumes with the include and exclude of the save" if reasons else "")
            )


class Draft:
    """A restoration in the making. Adding to it changes no object of the user's.

    Into the tensors `in_place` leaves of their names are read by others.
    """

    def __init__(
        self,
        specs: Mapping[str, LeafSpec],
        values: Mapping[str, Json],
        names: Mapping[int, str],
        kept: Collection[str] = (),
        in_place: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        settled = in_place or {}
        self.specs = specs
        self.values = values
        self.names = names
        self.kept = frozenset(kept)
        self.findings = Findings()
        self.reads: list[Read] = []
        self.steps: list[tuple[str, Callable[[], None]]] = []
        self._by_blob: dict[str, list[LeafSpec]] = {}
        self._taken: set[str] = set()
        self._sources: dict[int, str] = {id(live): source for source, live in settled.items()}
        self._read_into: set[int] = set(self._sources)
        self._fresh: dict[str, Read] = {}
        self._live: dict[str, torch.Tensor] = dict(settled)
        for spec in specs.values():
            self._by_blob.setdefault(spec.blob, []).append(spec)

    @property
    def blobs(self) -> tuple[str, ...]:
        """Names of the stored blobs, in order."""
        return tuple(self._by_blob)

    def stored(self, blob: str) -> list[LeafSpec]:
        """The stored leaves of a blob."""
        return self._by_blob.get(blob, [])

    def take(self, name: str) -> LeafSpec | None:
        """The stored leaf of this name, now accounted for; None if there is none.

        That is noted as missing, unless the leaf is one of those that keep their content.
        """
        if (spec := self.specs.get(name)) is None:
            if name not in self.kept:
                self.findings.missing.append(name)
            return None
        self._taken.add(name)
        return spec

    def rest(self, blob: str) -> list[LeafSpec]:
        """The stored leaves of a blob that nobody has taken."""
        return [spec for spec in self.stored(blob) if spec.name not in self._taken]

    def note_rest(self, blob: str) -> None:
        """Note what nobody has taken as unexpected."""
        self.findings.unexpected += [spec.name for spec in self.rest(blob)]

    def unlike(self, text: str) -> None:
        """Note a difference that no option skips."""
        self.findings.unlike.append(text)

    def into(self, blob: str, spec: LeafSpec, live: torch.Tensor) -> None:
        """Read a leaf into a live tensor, in place; a tensor of several names is read once.

        Of a wrapper subclass its inner tensors are read, where both are of the same description.
        """
        source = _source(spec)
        if spec.role is Role.SUBCLASS or is_wrapper(live):
            self._parts(spec, live, lambda inner, part: self.into(blob, inner, part))
            return
        if not self._fits(spec, live):
            return
        known = self._sources.setdefault(id(live), source)
        if known != source:
            self.unlike(f"{spec.name} and {known} are one tensor here and two in the checkpoint")
        elif id(live) not in self._read_into:
            self._read_into.add(id(live))
            self._live.setdefault(source, live)
            sharded = is_sharded(live)
            local = plain(memory_of_shard(live) if sharded else live)
            target = target_of(live, spec.name) if sharded else None
            read = Read(source, spec, _own_memory(local), target)
            self.reads.append(read)
            if read.destination is None:
                self.steps.append((blob, lambda: _copy(local, read)))

    def _parts(
        self, spec: LeafSpec, live: torch.Tensor, add: Callable[[LeafSpec, torch.Tensor], None]
    ) -> bool:
        """Take the inner leaves of a wrapper; False, noted, where the live tensor is another one."""
        stored = self._value(spec) if spec.role is Role.SUBCLASS else None
        here = description(live, spec.name) if is_wrapper(live) else None
        known = spec.role is Role.SUBCLASS and isinstance(stored, dict)
        for name in stored.get("inner", ()) if known and stored != here and isinstance(stored, dict) else ():
            self.take(f"{spec.name}.{name}")
        if here is None or stored != here:
            self.unlike(
                f"{spec.name} is {told(here) if here else form(live)} here, "
                f"{told(stored) if known else spec} in the checkpoint"
            )
            return False
        for name, part in inner_tensors(live, spec.name).items():
            if (inner := self.take(f"{spec.name}.{name}")) is not None:
                add(inner, part)
        return True

    def alike(self, spec: LeafSpec, model: torch.Tensor | None) -> Maker:
        """A function that makes a new tensor from a leaf once all is read: a DTensor if `model` is one.

        A wrapper subclass needs a `model` of its description; its parts are made like the model's.
        """
        if spec.role is Role.SUBCLASS:
            return self._wrapper_alike(spec, model)
        if model is not None and is_sharded(model):
            as_saved = None if tuple(model.shape) == spec.shape else spec.sharding
            made = self.fresh_like(replace(spec, sharding=as_saved), model)
            return lambda device: made
        read = self.fresh(spec)
        return lambda device: read.memory().to(device or "cpu")

    def _wrapper_alike(self, spec: LeafSpec, model: torch.Tensor | None) -> Maker:
        if model is None or not is_wrapper(model):
            self.unlike(
                f"{spec.name} is {told(self._value(spec))} in the checkpoint, and there is no such tensor "
                "here that it could be made like"
            )
            return lambda device: torch.empty(0)
        build = rebuilder(model)
        parts: dict[str, Maker] = {}
        self._parts(spec, model, lambda inner, part: parts.update({inner.name: self.alike(inner, part)}))
        cut = len(spec.name) + 1
        return lambda device: build({name[cut:]: part(device) for name, part in parts.items()})

    def fresh(self, spec: LeafSpec) -> Read:
        """Read a leaf into fresh memory, the same for all its names."""
        source = _source(spec)
        if source not in self._fresh:
            self._fresh[source] = Read(source, spec)
            self.reads.append(self._fresh[source])
        return self._fresh[source]

    def fresh_like(self, spec: LeafSpec, model: torch.Tensor) -> torch.Tensor:
        """Read a leaf into a new DTensor on the mesh of the DTensor `model`."""
        dtype = torch_dtype(by_name(spec.dtype or ""))
        found = empty_like(model, spec.shape, dtype, spec.sharding)
        self.into(spec.blob, spec, found)
        return found

    def live(self, spec: LeafSpec) -> torch.Tensor | None:
        """The live tensor that a leaf, or the leaf it is an alias of, is read into."""
        return self._live.get(_source(spec))

    def tree(
        self, spec: LeafSpec, models: Mapping[str, torch.Tensor] | None = None
    ) -> Callable[[torch.device | None], Any]:
        """A stored value as a function that builds it once everything is read.

        The tensors inside go to the device that the function is given. Those that `models` has by their
        names are made like these: DTensors placed as they are, subclasses of their class. The form is
        checked now.
        """
        json = self._value(spec)
        made: dict[str, Maker] = {}

        def refer(name: Json) -> None:
            inner = self.specs.get(name) if isinstance(name, str) else None
            if inner is None or (inner.kind != "tensor" and inner.role is not Role.SUBCLASS):
                raise DamagedError(
                    f"value {spec.name!r} refers to tensor {name!r}, which the checkpoint lacks"
                )
            self._taken.add(inner.name)
            if inner.name not in made:
                made[inner.name] = self.alike(inner, (models or {}).get(inner.name))

        decode(json, tensor=refer)
        return lambda device: decode(json, tensor=lambda name: made[name](device))

    def value(self, spec: LeafSpec) -> Any:
        """A stored value without tensors in it."""
        return decode(self._value(spec))

    def _value(self, spec: LeafSpec) -> Json:
        if _source(spec) not in self.values:
            raise DamagedError(f"the checkpoint describes value {spec.name!r} and does not hold it")
        return self.values[_source(spec)]

    def _fits(self, spec: LeafSpec, live: torch.Tensor) -> bool:
        if not same_form(spec, live):
            self.unlike(f"{spec.name} is {form(live)} here, {spec} in the checkpoint")
            return False
        return True


def same_form(spec: LeafSpec, live: torch.Tensor) -> bool:
    """Whether a stored leaf is a tensor of this shape and element type."""
    return spec.kind == "tensor" and spec.dtype == dtype_name(live.dtype) and spec.shape == live.shape


def form(tensor: torch.Tensor) -> str:
    """Element type and shape as `LeafSpec` prints them: float32[2, 3]."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name, as a `LeafSpec` has it."""
    return str(dtype).removeprefix("torch.")


def _source(spec: LeafSpec) -> str:
    return spec.alias_of or spec.name


def _own_memory(plain: torch.Tensor) -> torch.Tensor | None:
    """The detached tensor itself where its memory is what is stored, in order."""
    direct = plain.is_cpu and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    return plain if direct else None


def _copy(live: torch.Tensor, read: Read) -> None:
    live.copy_(read.memory())


def _nearest(name: str, stored: Mapping[str, LeafSpec]) -> str:
    near = difflib.get_close_matches(name, stored, n=2)
    return f" (there is {', '.join(near)})" if near else ""
