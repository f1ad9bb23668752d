"""Blobs: the named entries of a job's state, as they are declared.

What a blob's content is worth (its leaves, its inferred scope) is decided where it is saved; here
only names, sources and what the user forced are kept.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.names import check_blob_names
from torchrelay.jobs.step import call_style

Reshard = str | Callable[..., Any] | None
Kind = Literal["tensor", "stateful", "value"]

RESHARD_POLICIES = ("error", "drop", "by_rank")
"""What may happen to a `rank` blob on another number of ranks; a callable decides by itself."""

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Scope(str, Enum):
    """Who owns the content of a blob."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    RANK = "rank"
    HOST = "host"
    TRANSIENT = "transient"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class Blob:
    """One declared name: `source` is the object or its factory, `scope` and `reshard` what was forced.

    `scope` None means inferred; `reshard` None means "error".
    """

    name: str
    source: Any
    scope: Scope | None = None
    reshard: Reshard = None

    @property
    def is_factory(self) -> bool:
        """Whether the source makes the object, once per node in `setup`; it takes what steps take."""
        return is_factory(self.source)


def kind_of(value: object) -> Kind:
    """Return what `value` is as a blob: a tensor, an object with state, or a plain (JSON) value."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "stateful" if is_stateful(value) else "value"


def is_stateful(value: object) -> bool:
    """Whether `value` has `state_dict` and `load_state_dict`, as modules and optimizers do."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_factory(value: object) -> bool:
    """Whether `value` is a function, method or partial, and nothing that has state of its own."""
    return isinstance(value, _FUNCTIONS) and not hasattr(value, "state_dict")


class BlobRegistry:
    """The blobs of a job in the order of their declaration: `job.blobs(model=model)`, `for b in job.blobs`.

    A dict that holds (at any depth) a tensor, an object with state or a factory is a group:
    `blobs(ema=dict(weight=w, step=0))` declares `ema.weight` and `ema.step`. Any other dict is one
    JSON value. Blobs can be added until `setup` ends; those that `setup` added are declared anew by
    the `setup` of the next start.
    """

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self._declared: tuple[str, ...] | None = None
        self._frozen = False

    def __iter__(self) -> Iterator[Blob]:
        return iter(tuple(self._blobs.values()))

    def __len__(self) -> int:
        return len(self._blobs)

    def __contains__(self, name: object) -> bool:
        return name in self._blobs

    def __getitem__(self, name: str) -> Blob:
        return self._blobs[name]

    def __repr__(self) -> str:
        return f"BlobRegistry({', '.join(self._blobs)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The declared names in order."""
        return tuple(self._blobs)

    def __call__(
        self,
        mapping: Mapping[str, Any] | None = None,
        /,
        *,
        scope: Scope | str | None = None,
        reshard: Reshard = None,
        **named: Any,
    ) -> None:
        """Do the same as `add`."""
        self.add(mapping, scope=scope, reshard=reshard, **named)

    def add(
        self,
        mapping: Mapping[str, Any] | None = None,
        /,
        *,
        scope: Scope | str | None = None,
        reshard: Reshard = None,
        **named: Any,
    ) -> None:
        """Declare blobs, all or none of them; `scope` and `reshard` hold for all that are given.

        Raises UsageError for bad, repeated or mixing names, one object under two names, an unknown
        scope or policy; NotAllowedNowError after `setup`.
        """
        if self._frozen:
            raise NotAllowedNowError(
                f"blobs can be added until setup ends; {_listed([*(mapping or {}), *named])} came later: "
                "declare it where the job is built or in a task of @job.setup"
            )
        forced = _scope(scope)
        _check_reshard(reshard)
        merged = dict(self._blobs)
        for given in (mapping or {}, named):
            for name, source in _flat(given):
                if name in merged:
                    raise UsageError(f"there are two blobs with the name {name!r}: rename one of them")
                merged[name] = Blob(name, _checked_source(name, source), forced, reshard)
        check_blob_names(merged)
        _check_objects(merged.values())
        self._blobs = merged

    def begin_setup(self) -> None:
        """Open the registry for the `setup` of a start and forget what an earlier `setup` added."""
        if self._declared is None:
            self._declared = self.names
        self._blobs = {name: self._blobs[name] for name in self._declared}
        self._frozen = False

    def freeze(self) -> None:
        """End the time in which blobs can be added; called when `setup` has ended."""
        if self._declared is None:
            self._declared = self.names
        self._frozen = True


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"blobs are named, as in blobs=dict(model=model, optimizer=optimizer); got {type(given).__name__}"
        )
    for key, value in given.items():
        if not isinstance(key, str):
            raise UsageError(f"{prefix or 'blobs'}: the key {key!r} is no str, so it cannot name a blob")
        name = prefix + key
        if _is_group(value):
            yield from _flat(value, name + ".")
        else:
            yield name, value


def _is_group(value: object) -> bool:
    if not isinstance(value, dict) or is_stateful(value):
        return False
    return any(_is_group(v) or kind_of(v) != "value" or is_factory(v) for v in value.values())


def _scope(scope: Scope | str | None) -> Scope | None:
    if scope is None:
        return None
    try:
        return Scope(scope)
    except ValueError:
        raise UsageError(f"{scope!r} is not a scope: use one of {_listed(s.value for s in Scope)}") from None


def _check_reshard(reshard: Reshard) -> None:
    if reshard is None or callable(reshard) or reshard in RESHARD_POLICIES:
        return
    raise UsageError(f"{reshard!r} is not a reshard policy: use {_listed(RESHARD_POLICIES)} or a callable")


def _checked_source(name: str, source: object) -> object:
    if isinstance(source, type):
        raise UsageError(
            f"blob {name!r} is the class {source.__name__}: give an object, or a factory such as "
            f"lambda ctx: {source.__name__}(...)"
        )
    if is_factory(source):
        _check_factory(name, source)
    return source


def _check_factory(name: str, source: Any) -> None:
    try:
        call_style(source)
    except UsageError as error:
        raise UsageError(f"blob {name!r} is a function, so it must make the blob: {error}") from error


def _check_objects(blobs: Any) -> None:
    names: dict[int, str] = {}
    for blob in blobs:
        if kind_of(blob.source) == "value":
            continue
        first = names.setdefault(id(blob.source), blob.name)
        if first != blob.name:
            raise UsageError(
                f"blobs {first!r} and {blob.name!r} are one object: register it once, under one name"
            )


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names)
