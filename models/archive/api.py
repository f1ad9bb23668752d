"""States of a model by name, written to one file and loaded atomically, and what `compile` recorded.

Names are those of torch's state dict without the prefixes of torch's wrappers (DistributedDataParallel,
torch.compile, activation checkpointing), so a wrapped and a bare model share archives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrelay.checkpoint.files.publish import Where
from torchrelay.checkpoint.format import dtypes, values
from torchrelay.checkpoint.format.dtypes import all_strided
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.load.tensors import naming_what_changed, runs_of
from torchrelay.checkpoint.state.flatten import ModuleStates
from torchrelay.checkpoint.state.leaf import Role
from torchrelay.checkpoint.state.module_leaves import ModuleEntry, module_entries, named_parameters, parts_of
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.restore.module import has_load_code
from torchrelay.checkpoint.state.steps import gate
from torchrelay.checkpoint.state.tensor_memory import (
    NOTHING,
    admitted,
    admitted_in_place,
    fitting,
    form,
    is_wrapper,
    put,
    unwritable,
)
from torchrelay.errors import BlobError, PartiallyLoadedError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.models.archive.manifest import (
    BUFFER,
    MODEL,
    OTHER,
    PARAMETER,
    STATES,
    ArchiveEntry,
    ArchiveFile,
    Contents,
    States,
    TensorToStore,
    open_archive_file,
    write_contents,
)
from torchrelay.records import Json, dataclass


def get_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the live parameters by dotted name, tied ones once under their first name."""
    first: dict[int, tuple[str, Any]] = {}
    for name, parameter in named_parameters("m", checked(module), ModuleStates()):
        first.setdefault(id(parameter), (name.removeprefix("m."), parameter))
    return dict(first.values())


def get_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters and persistent buffers by dotted name, tied ones under their first name.

    States other than tensors (`get_extra_state`) are not included; `save_states` stores these too.
    """
    first = TensorNames()
    entries = [entry for entry in entries_of(module) if isinstance(entry.value, torch.Tensor)]
    return {one.name: one.value for one in entries if first.earlier(one.value, one.name) is None}


def checked(module: Any) -> nn.Module:
    """Return the module; raises UsageError for anything else."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, not {type(module).__name__}")
    return module


def entries_of(module: nn.Module) -> list[ModuleEntry]:
    """Return the entries of the state dict by canonical name, in its order."""
    state = checked(module).state_dict(keep_vars=True)
    entries = module_entries("m", module, state)
    return [ModuleEntry(one.key, one.name.removeprefix("m."), one.value, one.role) for one in entries]


def unready(module: nn.Module) -> list[str]:
    """Return states without content: of uninitialised lazy modules, and on the meta device."""
    return [
        entry.name
        for entry in entries_of(module)
        if nn.parameter.is_lazy(entry.value)
        or (isinstance(entry.value, torch.Tensor) and entry.value.is_meta)
    ]


def states_of(module: nn.Module) -> States:
    """Return the states of a model; UsageError without content, BlobError if one cannot be stored."""
    if names := unready(module):
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UsageError(
            f"{len(names)} states have no content yet: {', '.join(names[:8])}{more}; "
            "torchrelay.compile(model, inputs) initialises lazy and meta modules"
        )
    tensors: dict[str, TensorToStore] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Json] = {}
    first = TensorNames()
    entries = entries_of(module)
    for entry in entries:
        value = entry.value
        if not isinstance(value, torch.Tensor):
            extra[entry.name] = values.encode(value, entry.name)
        elif (known := first.earlier(value, entry.name)) is not None:
            ties[entry.name] = known
        else:
            if hasattr(value, "full_tensor"):
                raise BlobError(
                    f"{entry.name} is a sharded tensor (DTensor): use a model with full tensors, "
                    "as from ctx.full_state_dict(module)"
                )
            role = {Role.PARAMETER: PARAMETER, Role.BUFFER: BUFFER}.get(entry.role, OTHER)  # type: ignore[arg-type]
            content = admitted_in_place(value, entry.name)
            tensors[entry.name] = TensorToStore(content, role, value.requires_grad)
    return States(tensors, ties, extra, tuple(entry.name for entry in entries))


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter with several names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def tie_again(model: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Tie the parameters with these names to the first one."""
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, first)


@dataclass(frozen=True)
class Recorded:
    """Example inputs, dynamic sizes and signature of a compiled model."""

    inputs: Any
    dynamic: Any
    signature: Signature


_known: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def record(model: nn.Module, found: Recorded) -> None:
    """Store the record for as long as the model lives."""
    _known[model] = found


def recorded_call(model: nn.Module) -> Recorded | None:
    """Return the record of `compile` for this model; None if it was not called."""
    return _known.get(model)


def save_states(
    path: Where, model: nn.Module, aux_states: Mapping[str, Any] | None = None, *, overwrite: bool = False
) -> None:
    """Write the states of a model and `aux_states` to one zip file, for `load_states`.

    The file is written atomically. After `compile(model, inputs)` it also contains the signature of the
    model, which `summary(path)` shows.

    Args:
        path: File name or fsspec URL.
        model: The model.
        aux_states: Values by name: numbers, strings, bytes, tensors, `optimizer.state_dict()`, and lists,
            tuples, sets and dicts of these.
        overwrite: Replace an existing file.

    Raises:
        UsageError: The file exists, an aux name is also the name of a state, or states have no content yet.
        BlobError: A value cannot be stored; has its path.
        StorageError: Writing failed.

    Example:
        save_states("model.zip", model, {"epoch": 3, "optimizer": optimizer.state_dict()})
    """
    states = states_of(checked(model))
    known = recorded_call(model)
    signature = None if known is None else known.signature.to_json()
    contents = Contents(STATES, states, aux_of(aux_states or {}, states), signature=signature)
    write_contents(path, contents, overwrite=overwrite)


def aux_of(given: Mapping[str, Any], states: States) -> tuple[Json, dict[str, TensorToStore]]:
    """Return the values as JSON, in order, and their tensors by placeholder name."""
    if not isinstance(given, Mapping):
        raise UsageError(f'aux_states must be a mapping such as {{"epoch": 3}}, not {type(given).__name__}')
    taken = {*states.tensors, *states.ties, *states.extra}
    found: dict[str, TensorToStore] = {}
    names: dict[int, str] = {}

    def keep(path: str, tensor: torch.Tensor) -> Json:
        if (known := names.get(id(tensor))) is not None:
            return known
        name, count = path, 1
        while name in found:
            count += 1
            name = f"{path}#{count}"
        found[name] = TensorToStore(admitted(tensor, path))
        names[id(tensor)] = name
        return name

    pairs: list[Json] = []
    for key, value in given.items():
        if type(key) is not str:
            raise UsageError(f"aux_states has names, and {key!r} is none")
        if key in taken:
            raise UsageError(f"{key!r} is the name of a state of the model: rename the aux value")
        pairs.append([key, values.encode(value, key, tensor=keep)])
    return {"names": [key for key, _ in pairs], "values": dict(pairs)}, found


@dataclass(frozen=True)
class StateReport:
    """Result of a load, by name of the states.

    Attributes:
        loaded: Loaded states.
        missing: States of the model that are not in the archive.
        unexpected: States of the archive that are not in the model.
        unlike: Descriptions of states with another shape or element type.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if all states were loaded."""
        return not (self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} states loaded"]
        for what, names in (
            ("missing from the archive", self.missing),
            ("unknown to the model", self.unexpected),
        ):
            if names:
                parts.append(f"{len(names)} {what}: {', '.join(names)}")
        return "; ".join([*parts, *self.unlike])

    def check(self, what: str) -> None:
        """Raise BlobError with all differences, if any."""
        if not self.complete:
            text = str(replace(self, loaded=())).removeprefix("0 states loaded; ")
            raise BlobError(
                f"{what} does not fit the model: {text}. strict=False loads what fits and reports the rest"
            )


def compared(archive: ArchiveFile, wanted: Mapping[str, ModuleEntry]) -> StateReport:
    """Compare model and archive before a load; `loaded` are the states that can be loaded."""
    stored = archive.tensors(MODEL).entries
    every = {**stored, **{name: stored[first] for name, first in archive.ties.items()}}
    have = {*every, *archive.extra}
    unlike = {name: text for name, entry in wanted.items() if (text := _unlike(name, entry, every, archive))}
    first: dict[int, str] = {}  # of tensors that are shared in the model, and may differ in the archive
    for name, entry in wanted.items():
        if name in every and isinstance(entry.value, torch.Tensor):
            known = first.setdefault(id(entry.value), name)
            if known != name and every[known].digests != every[name].digests:
                unlike[name] = f"{name} and {known} are one tensor in the model and differ in the archive"
    return StateReport(
        tuple(name for name in wanted if name in have and name not in unlike),
        tuple(name for name in wanted if name not in have),
        tuple(sorted(name for name in have if name not in wanted)),
        tuple(unlike.values()),
    )


def _unlike(name: str, entry: ModuleEntry, stored: Mapping[str, ArchiveEntry], archive: ArchiveFile) -> str:
    """Describe the difference of a state that both sides have; empty if there is none."""
    value, found = entry.value, stored.get(name)
    if found is None:
        tensor = isinstance(value, torch.Tensor) and name in archive.extra
        return f"{name}: the model has a tensor, the archive a plain value" if tensor else ""
    if not isinstance(value, torch.Tensor):
        return f"{name}: the model has a plain value, the archive a tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    lazy = nn.parameter.is_lazy(value)
    if dtype == found.element.name and (lazy or tuple(value.shape) == found.shape):
        return ""
    here = dtype if lazy else f"{dtype}{list(value.shape)}"
    return f"{name}: the model has {here}, the archive {found.element.name}{list(found.shape)}"


@overload
def load_states(path: Where, model: nn.Module, *, strict: Literal[True] = True) -> dict[str, Any]: ...
@overload
def load_states(
    path: Where, model: nn.Module, *, strict: Literal[False]
) -> tuple[dict[str, Any], StateReport]: ...


def load_states(
    path: Where, model: nn.Module, *, strict: bool = True
) -> dict[str, Any] | tuple[dict[str, Any], StateReport]:
    """Load the states of an archive or package into a model.

    Everything is read and verified before the first state changes. Lazy modules get the archive's shapes,
    modules on the meta device get memory on the CPU.

    Args:
        path: File name or fsspec URL.
        model: The model, loaded in place.
        strict: Require equal names, shapes and element types; False loads the states that fit.

    Returns:
        The aux values, with tensors on the CPU; with `strict=False` a pair of them and a StateReport.

    Raises:
        UsageError: The file does not exist.
        BlobError: The states do not fit; lists all differences, and nothing has changed.
        FormatError: The file is not an archive or package.
        DamagedError: Stored bytes are damaged.
        StorageError: Reading failed.
        PartiallyLoadedError: The file changed during the load.

    Example:
        aux = load_states("model.zip", model)
    """
    checked(model)
    with open_archive_file(path) as archive:
        aux = archive.aux()
        report = fill(archive, model, strict=strict)
    return aux if strict else (aux, report)


def set_states(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Copy the result of `get_states` into a model of the same class, all or nothing.

    Tied states may be given under any of their names, or all if they are equal. Modules on the meta device
    get memory. States other than tensors do not change.

    Args:
        model: The model, changed in place.
        states: Tensors by dotted name, with the shapes and element types of the model.

    Raises:
        BlobError: States are missing, unexpected or of another form; lists all, and nothing has changed.

    Example:
        >>> set_states(other, get_states(model))
    """
    if not isinstance(states, Mapping):
        raise UsageError(
            f"states must be tensors by name as returned by get_states, not {type(states).__name__}"
        )
    wanted = {one.name: one for one in entries_of(model) if isinstance(one.value, torch.Tensor)}
    first, known = TensorNames(), dict[str, str]()
    for name, entry in wanted.items():
        lazy = nn.parameter.is_lazy(entry.value)
        known[name] = name if lazy else first.earlier(entry.value, name) or name
    given: dict[str, torch.Tensor] = {}
    wrong = [f"{name} is not a state of the model" for name in states if name not in wanted]
    for name in [one for one in states if one in wanted]:
        value, live = states[name], wanted[name].value
        if not isinstance(value, torch.Tensor):
            wrong.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif not nn.parameter.is_lazy(live) and (value.shape, value.dtype) != (live.shape, live.dtype):
            wrong.append(f"{name} is {form(value)}, in the model {form(live)}")
        elif not torch.equal(given.setdefault(known[name], value), value):
            wrong.append(f"{name} and another name of the same tensor have different values")
    wrong += [f"{name} is missing" for name in dict.fromkeys(known.values()) if name not in given]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise BlobError(
            f"the states do not fit the model, so nothing was changed: {'; '.join(wrong[:8])}{more}"
        )
    _check_memory(list(wanted.values()))
    gate()
    _put(model, [(entry, given[known[name]].detach().clone()) for name, entry in wanted.items()])


def fill(archive: ArchiveFile, model: nn.Module, *, strict: bool) -> StateReport:
    """Load the states; see `load_states`.

    States loaded in place are read twice: first to verify all of them without extra memory, then into the
    model's tensors, verified again.
    """
    wanted = {entry.name: entry for entry in entries_of(model)}
    report = compared(archive, wanted)
    if strict:
        report.check(archive.what)
    # Tensors of the model that can be read into directly, and others with content: on a device, or not
    # contiguous. Each has one name. There are none if the model's own loading code must see the values.
    stored, live = archive.tensors(MODEL), NOTHING
    passing: dict[str, torch.Tensor] = {}
    if not has_load_code(parts_of(model)):
        first: dict[int, str] = {}
        for name in report.loaded:
            if name not in archive.extra and wanted[name].role is not None:
                first.setdefault(id(wanted[name].value), name)
        own = {name: wanted[name].value for name in first.values()}
        entries = [stored.entries[archive.ties.get(name, name)] for name in own]
        live = fitting(own, list(own), [form_of(one.element.name, tuple(one.shape)) for one in entries])
        passing = {
            name: one.detach()
            for name, one in own.items()
            if name not in live.tensors
            and all_strided([one])
            and not (one.is_meta or nn.parameter.is_lazy(one))
        }
    in_place = {id(wanted[name].value) for name in (*live.tensors, *passing)}
    names = [name for name in report.loaded if id(wanted[name].value) not in in_place]
    fresh = _read(archive, names)
    places = [archive.ties.get(name, name) for name in live.tensors]
    stored.check([*places, *(archive.ties.get(name, name) for name in passing)])
    known = {id(wanted[name].value) for name in report.loaded}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, one in tensors if one.is_meta and id(one) not in known]:
        raise BlobError(  # they would break the forward pass
            f"{', '.join(empty[:8])} would stay on the meta device, because the archive does not have "
            "them: create the model on a real device"
        )
    _check_memory([wanted[name] for name in (*names, *passing)])
    gate()
    _put(model, [(wanted[name], fresh[name]) for name in names])
    with naming_what_changed(live=True, verified=True), torch.no_grad():
        for name, tensor in passing.items():
            for start, part in runs_of(tensor):
                memory = torch.empty(part.shape, dtype=part.dtype)
                stored.read_range(archive.ties.get(name, name), start, dtypes.memory_of(memory))
                put(part, memory)
        stored.read_all(places, live.plain.memories)
    return report


def _read(archive: ArchiveFile, names: Sequence[str]) -> dict[str, Any]:
    """Read the stored values of these names; tied names share a tensor."""
    stored, made = archive.tensors(MODEL), dict[str, Any]()
    for name in names:
        if name in archive.extra:
            made[name] = decode(archive.extra[name])
            continue
        first = archive.ties.get(name, name)
        if first not in made:
            made[first] = stored.read(first)
        made[name] = made[first]
    return made


def _check_memory(entries: Sequence[ModuleEntry]) -> None:
    """Check that the model's tensors can be loaded into."""
    filled = [
        (entry.name, entry.value)
        for entry in entries
        if entry.role is not None
        and not (nn.parameter.is_lazy(entry.value) or entry.value.is_meta or is_wrapper(entry.value))
    ]
    if refused := unwritable((name, admitted_in_place(tensor, name)) for name, tensor in filled):
        raise BlobError(refused[0])


def _put(model: nn.Module, found: Sequence[tuple[ModuleEntry, Any]]) -> None:
    if not found:
        return
    meta = any(isinstance(entry.value, torch.Tensor) and entry.value.is_meta for entry, _ in found)
    ties = shared_parameters(model) if meta else []
    try:
        model.load_state_dict({entry.key: value for entry, value in found}, strict=False, assign=meta)
    except RuntimeError as error:
        raise PartiallyLoadedError(
            f"the model's own load_state_dict failed after some states had changed: {error}"
        ) from error
    tie_again(model, ties)
