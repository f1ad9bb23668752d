"""Declared blobs, the named entries of a job's state, and the calling convention of steps.

A step takes nothing, a workspace (a parameter named `ws` or `workspace`), or a context (any other
name, usually `ctx`). Only a parameter without a default is filled.

Only names, sources and explicit options are kept here; leaves and inferred scopes are determined on save.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal

import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import check_blob_names
from torchrelay.jobs.containers import found_inside, is_container, is_fixed, is_generator, note_records
from torchrelay.records import dataclass

Step = Callable[..., Any]
CallStyle = Literal["nothing", "workspace", "context"]

_WORKSPACE_NAMES = ("ws", "workspace")
_FILLABLE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def call_style(step: Step) -> CallStyle:
    """Return the kind of argument that `step` takes; raises UsageError if it cannot be a step."""
    parameter = _open_parameter(step)
    if parameter is None:
        return "nothing"
    return "workspace" if parameter.name in _WORKSPACE_NAMES else "context"


def invoke(step: Step, workspace: Any, ctx: Any) -> Any:
    """Call `step` with its argument and return the result."""
    parameter = _open_parameter(step)
    if parameter is None:
        return step()
    argument = workspace if parameter.name in _WORKSPACE_NAMES else ctx
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        return step(**{parameter.name: argument})
    return step(argument)


def step_name(step: Step) -> str | None:
    """Return the name of the function under `step`; None for a lambda or an object without one."""
    name = getattr(getattr(step, "func", step), "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else None


def _open_parameter(step: Step) -> inspect.Parameter | None:
    if not callable(step) or isinstance(step, type):
        raise UsageError(f"{step!r} is not a step; expected a function, such as `lambda ctx: ...`")
    if any(kind(step) for kind in _LAZY_KINDS):
        raise UsageError(
            f"{_described(step)} is async or a generator, so a call would not run it; use a plain def"
        )
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(
            f"{_described(step)} has no readable signature; wrap it, such as in `lambda ctx: ...`"
        ) from None
    open_ones = [p for p in parameters if p.kind in _FILLABLE and p.default is p.empty]
    if len(open_ones) > 1:
        raise UsageError(
            f"{_described(step)} takes {', '.join(p.name for p in open_ones)}; a step takes nothing, `ws` or "
            "`ctx`: give the other parameters values with functools.partial or defaults"
        )
    return open_ones[0] if open_ones else None


_LAZY_KINDS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _described(step: Step) -> str:
    name = step_name(step)
    return f"step {name!r}" if name else f"step {step!r}"


Reshard = str | Callable[..., Any] | None
Kind = Literal["tensor", "stateful", "value"]

RESHARD_POLICIES = ("error", "drop", "by_rank")
"""Policies for a `rank` blob when the number of ranks changes; a callable is a custom policy."""

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Scope(str, Enum):
    """Owner of the content of a blob.

    Attributes:
        REPLICATED: All nodes together; it is saved once.
        SHARDED: All nodes together, each with a part.
        RANK: Each rank.
        HOST: Each host.
        TRANSIENT: No node; it is not saved.

    Example:
        job.blobs(counts=counts, scope=Scope.RANK)
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    RANK = "rank"
    HOST = "host"
    TRANSIENT = "transient"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class Blob:
    """A declared blob: its source is the object or its factory.

    `scope` and policy are the explicit ones. `container` is the name of the container blob that holds the
    object. `rebuilt`: the program rebuilds it to match the epoch that a launch resumes from.
    """

    name: str
    source: Any
    scope: Scope | None = None
    reshard: Reshard = None
    container: str | None = None
    rebuilt: bool = False

    @property
    def is_factory(self) -> bool:
        """True if the source is a factory, called once per node in `setup` like a step."""
        return is_factory(self.source)


def kind_of(value: object) -> Kind:
    """Return the kind of `value` as a blob: a tensor, an object with state, or a plain (JSON) value."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "stateful" if is_stateful(value) else "value"


def is_stateful(value: object) -> bool:
    """Return True if `value` has `state_dict` and `load_state_dict`, as modules and optimizers do."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_factory(value: object) -> bool:
    """Return True if `value` is a function, method or partial without state."""
    return isinstance(value, _FUNCTIONS) and not hasattr(value, "state_dict")


class LoopBlobs:
    """The blobs of a program with its own training loop, which holds them in its own variables.

    A load reaches such a program only through objects that are filled in place, and a save sees only the
    registered objects. So immutable values, and entries that are replaced or added later, are refused, and
    functions unless there may be `factories`.
    """

    def __init__(self, given: Mapping[str, Any] | None, *, factories: bool) -> None:
        self._live: Mapping[str, Any] = {} if given is None else given
        self._registered = dict(self._live) if isinstance(self._live, Mapping) else {}
        numpy: Any = sys.modules.get("numpy")  # without numpy loaded there are no numpy values
        fixed = _IMMUTABLE if numpy is None else (*_IMMUTABLE, numpy.generic, numpy.dtype)
        for name, value in self._registered.items():
            if isinstance(value, fixed) or is_fixed(value):
                raise UsageError(
                    f"blob {name!r} is {value!r:.80}, which cannot change in place, so its next value would "
                    f"not be saved: put it into a dict, state=dict({name}=...), and update that"
                )
            if not factories and is_factory(value):
                raise UsageError(f"blob {name!r} is a function: register the object that it returns")

    def check_registered(self) -> None:
        """Raise UsageError if the mapping has another object for a name, or a new name."""
        for name in self._live:
            if name not in self._registered:
                raise UsageError(
                    f"blobs[{name!r}] was added after the blobs were registered, and it is not saved: "
                    "add it before"
                )
        for name, value in self._registered.items():
            if self._live.get(name, value) is not value:
                raise UsageError(
                    f"blobs[{name!r}] was replaced after it was registered, and the new object is not saved: "
                    "change the registered object in place"
                )


_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), torch.dtype, torch.device)


class BlobRegistry:
    """The blobs of a job in declaration order: `job.blobs(model=model)`, `for b in job.blobs`.

    - A container (a dict, list, set, deque or dataclass instance) is one blob; its content at the end of each
      epoch is saved.
    - Objects with state and factories inside it, at any depth, are separate blobs:
      `blobs(parts=dict(model=model, step=0))` declares `parts.model`, and `parts` for everything else.
    - Blobs can be added until `setup` ends; those added by `setup` are declared again at each launch.
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
        """Names of the blobs in declaration order."""
        return tuple(self._blobs)

    def add(
        self,
        mapping: Mapping[str, Any] | None = None,
        /,
        *,
        scope: Scope | str | None = None,
        reshard: Reshard = None,
        rebuilt: bool = False,
        **named: Any,
    ) -> None:
        """Declare blobs, all or none of them; `scope`, `reshard` and `rebuilt` hold for all that are given.

        A save is refused where modules, tensors or groups of optimizers are others than when `setup` ended,
        because the next start could not load them. With `rebuilt` it is not: the program then builds these
        objects at each start as the epoch has them.

        Raises UsageError for bad, repeated or mixing names, one object under two names, an unknown
        scope or policy; NotAllowedNowError after `setup`.
        """
        if self._frozen:
            raise NotAllowedNowError(
                f"blobs can be added until setup ends, not {_listed([*(mapping or {}), *named])} after it: "
                "declare it when the job is built or in a task of @job.setup"
            )
        forced = _scope(scope)
        if not (reshard is None or callable(reshard) or reshard in RESHARD_POLICIES):
            policies = _listed(RESHARD_POLICIES)
            raise UsageError(f"{reshard!r} is not a reshard policy: use {policies} or a callable")
        merged = dict(self._blobs)
        for given in (mapping or {}, named):
            for name, source, container in _flat(given):
                if name in merged:
                    raise UsageError(f"two blobs have the name {name!r}: rename one of them")
                merged[name] = Blob(name, _checked_source(name, source), forced, reshard, container, rebuilt)
        check_blob_names(merged, {blob.name: blob.container for blob in merged.values() if blob.container})
        names: dict[int, str] = {}
        for blob in merged.values():
            if kind_of(blob.source) == "value" and not is_container(blob.source):
                continue
            first = names.setdefault(id(blob.source), blob.name)
            if first != blob.name:
                raise UsageError(
                    f"blobs {first!r} and {blob.name!r} are one object: register it once, under one name"
                )
        self._blobs = merged

    __call__ = add

    def begin_setup(self) -> None:
        """Open the registry for `setup` and drop the blobs added by an earlier `setup`."""
        if self._declared is None:
            self._declared = self.names
        self._blobs = {name: self._blobs[name] for name in self._declared}
        self._frozen = False

    def freeze(self) -> None:
        """Refuse further blobs; called when `setup` has ended."""
        if self._declared is None:
            self._declared = self.names
        self._frozen = True


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str | None]]:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"blobs are named, as in blobs=dict(model=model, optimizer=optimizer); got {type(given).__name__}"
        )
    for key, value in given.items():
        if not isinstance(key, str):
            raise UsageError(f"{prefix or 'blobs'}: the key {key!r} is not a str, so it cannot name a blob")
        name = prefix + key
        if is_container(value):
            note_records(value)
            yield from ((inner, found, name) for inner, found in objects_inside(value, name))
        elif isinstance(value, dict) and not is_stateful(value) and holds_live(value):
            yield from _flat(value, name + ".")  # a class of the user cannot be loaded as a value
            continue
        yield name, value, None


def objects_inside(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Return the objects with state in a container and the factories in its dicts, by dotted name."""
    known: set[int] = set()
    for path, found in found_inside(value, name, _is_object):
        if id(found) not in known:
            known.add(id(found))
            yield path, found


def holds_live(value: object) -> bool:
    """Return True if the value is or holds a tensor, an object with state, a generator or a factory."""
    return _is_live(None, value) or next(found_inside(value, "", _is_live), None) is not None


def _is_live(holder: object, value: object) -> bool:
    return kind_of(value) != "value" or is_generator(value) or _makes(holder, value)


def _is_object(holder: object, value: object) -> bool:
    """Return True if the value can be a separate blob; objects in a set have no stable name."""
    return (is_stateful(value) and not isinstance(holder, (set, frozenset))) or _makes(holder, value)


def _makes(holder: object, value: object) -> bool:
    return isinstance(holder, dict) and is_factory(value)


def _scope(scope: Scope | str | None) -> Scope | None:
    if scope is None:
        return None
    try:
        return Scope(scope)
    except ValueError:
        raise UsageError(f"{scope!r} is not a scope: use one of {_listed(s.value for s in Scope)}") from None


def _checked_source(name: str, source: object) -> object:
    if isinstance(source, type):
        raise UsageError(
            f"blob {name!r} is the class {source.__name__}: give an object, or a factory such as "
            f"lambda ctx: {source.__name__}(...)"
        )
    if is_factory(source):
        try:
            call_style(source)  # type: ignore[arg-type]
        except UsageError as error:
            raise UsageError(
                f"blob {name!r} is a function, so it must be a factory of the blob: {error}"
            ) from error
    if is_fixed(source) and holds_live(source):
        raise UsageError(
            f"blob {name!r} is a {type(source).__name__} that holds tensors or objects, and what the program "
            "puts in its place later cannot be followed: give a list, a dict or a dataclass (not frozen)"
        )
    return source


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names)
