"""`save_states` and `load_states`: the states of a model into one file and back, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import nn

from torchrelay.checkpoint.files.publish import Where
from torchrelay.checkpoint.format import dtypes, values
from torchrelay.checkpoint.format.dtypes import all_strided
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.load.tensors import naming_what_changed, runs_of
from torchrelay.checkpoint.state.module_leaves import ModuleEntry, parts_of
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.reads import form, put
from torchrelay.checkpoint.state.restore.gate import gate
from torchrelay.checkpoint.state.restore.module import has_load_code
from torchrelay.checkpoint.state.tensor_checks import (
    NOTHING,
    InPlace,
    admitted,
    admitted_in_place,
    fitting,
    unwritable,
)
from torchrelay.checkpoint.state.wrappers import is_wrapper
from torchrelay.errors import BlobError, PartiallyLoadedError, UsageError
from torchrelay.models.archive.manifest import (
    AUX,
    MODEL,
    STATES,
    ArchiveEntry,
    ArchiveFile,
    Contents,
    TensorToStore,
    open_archive_file,
    write_contents,
)
from torchrelay.models.archive.states import (
    States,
    checked,
    entries_of,
    recorded_call,
    shared_parameters,
    states_of,
    tie_again,
)
from torchrelay.records import Json, dataclass


def save_states(
    path: Where, model: nn.Module, aux_states: Mapping[str, Any] | None = None, *, overwrite: bool = False
) -> None:
    """Write the states of a model, and `aux_states` beside them, into one zip file; `load_states` reads it.

    `aux_states` has a value for each name: numbers, texts, bytes, tensors, what `optimizer.state_dict()`
    gives, and lists, tuples, sets and dicts of these; all come back as what they were. `path` is taken as it
    is written; URLs of fsspec are fine. After `compile(model, inputs)` the archive tells what goes in and out
    of the model, too, which `summary(path)` shows. The file appears whole and durable or not at all, and
    replaces another only with `overwrite`.
    Raises UsageError (a name taken, an aux name that is a state's, states without content), BlobError with
    the path of what cannot be stored, StorageError.
    """
    states = states_of(checked(model))
    aux, tensors = aux_of(aux_states or {}, states)
    groups = {MODEL: states.tensors, AUX: tensors}
    known = recorded_call(model)
    contents = Contents(
        STATES, groups, states.ties, states.extra, aux, states.order,
        signature=None if known is None else known.signature.to_json(),
    )  # fmt: skip
    write_contents(path, contents, overwrite=overwrite)


def aux_of(given: Mapping[str, Any], states: States) -> tuple[Json, dict[str, TensorToStore]]:
    """The values as JSON, in order, and the tensors inside them by the name that stands for them."""
    if not isinstance(given, Mapping):
        raise UsageError(f'aux_states has values by name, {{"epoch": 3}}, not {type(given).__name__}')
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
            raise UsageError(f"{key!r} is the name of a state of the model: call the aux value otherwise")
        pairs.append([key, values.encode(value, key, tensor=keep)])
    return {"names": [key for key, _ in pairs], "values": dict(pairs)}, found


@dataclass(frozen=True)
class StateReport:
    """What became of each state. `missing`: of the model, not in the archive. `unexpected`: the reverse.

    `unlike`: "name: the model has ..., the archive ..." of those with another shape or element type.
    `loaded`: the names that were loaded.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything fitted."""
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
        """Raise BlobError with all differences, if there are some."""
        if not self.complete:
            text = str(replace(self, loaded=())).removeprefix("0 states loaded; ")
            raise BlobError(
                f"{what} does not fit the model: {text}. strict=False loads what fits and reports the rest"
            )


def compared(archive: ArchiveFile, wanted: Mapping[str, ModuleEntry]) -> StateReport:
    """The report of a load that has not begun: `loaded` is what can be."""
    stored = archive.tensors(MODEL).entries
    every = {**stored, **{name: stored[first] for name, first in archive.ties.items()}}
    have = {*every, *archive.extra}
    unlike = {name: text for name, entry in wanted.items() if (text := _unlike(name, entry, every, archive))}
    unlike.update(_untied(wanted, every, archive))
    return StateReport(
        tuple(name for name in wanted if name in have and name not in unlike),
        tuple(name for name in wanted if name not in have),
        tuple(sorted(name for name in have if name not in wanted)),
        tuple(unlike.values()),
    )


def _unlike(name: str, entry: ModuleEntry, stored: Mapping[str, ArchiveEntry], archive: ArchiveFile) -> str:
    """What differs in a state that both sides have, or nothing."""
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


def _untied(
    wanted: Mapping[str, ModuleEntry], stored: Mapping[str, ArchiveEntry], archive: ArchiveFile
) -> dict[str, str]:
    """States that are one tensor in the model and two unlike ones in the archive."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, entry in wanted.items():
        if name in stored and isinstance(entry.value, torch.Tensor):
            known = first.setdefault(id(entry.value), name)
            if known != name and stored[known].digests != stored[name].digests:
                found[name] = f"{name} and {known} are one tensor in the model and differ in the archive"
    return found


@overload
def load_states(path: Where, model: nn.Module, *, strict: Literal[True] = True) -> dict[str, Any]: ...
@overload
def load_states(
    path: Where, model: nn.Module, *, strict: Literal[False]
) -> tuple[dict[str, Any], StateReport]: ...


def load_states(
    path: Where, model: nn.Module, *, strict: bool = True
) -> dict[str, Any] | tuple[dict[str, Any], StateReport]:
    """Load the states of an archive or package into a model; returns the aux values, tensors on the CPU.

    Names, shapes and element types must be the model's, else nothing changes and one error lists all
    differences. With `strict=False` what fits is loaded, and a pair comes back: the aux values, and the
    report of what was missing, unexpected or unlike. Everything is read and verified before the first state
    changes; a file that changes after that raises PartiallyLoadedError. Lazy modules get the archive's
    shapes, modules on the meta device get memory on the CPU.
    Raises UsageError where there is no file, BlobError for differences, FormatError for a foreign file,
    DamagedError naming the member, StorageError.
    """
    checked(model)
    with open_archive_file(path) as archive:
        aux = archive.aux()
        report = fill(archive, model, strict=strict)
    return aux if strict else (aux, report)


def set_states(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Put what `get_states` gave into a model that was made by the same code, all or nothing.

    Tied states may be given under any of their names, or all if they are equal. Values are copied, and
    modules on the meta device get memory. States that are no tensors stay as they are.

    Args:
        model: Gets the states, in place.
        states: Tensors by dotted name, of the shapes and element types of the model's.

    Raises:
        BlobError: With a list of all that is missing, unexpected or of another form; nothing has changed.

    Example:
        >>> set_states(other, get_states(model))
    """
    if not isinstance(states, Mapping):
        raise UsageError(f"states are tensors by name, as get_states gives them, not {type(states).__name__}")
    wanted = {one.name: one for one in entries_of(model) if isinstance(one.value, torch.Tensor)}
    first, known = TensorNames(), dict[str, str]()
    for name, entry in wanted.items():
        lazy = nn.parameter.is_lazy(entry.value)
        known[name] = name if lazy else first.earlier(entry.value, name) or name
    given: dict[str, torch.Tensor] = {}
    wrong = [f"{name} is no state of the model" for name in states if name not in wanted]
    for name in [one for one in states if one in wanted]:
        value, live = states[name], wanted[name].value
        if why := _given_unlike(value, live):
            wrong.append(f"{name} is {why}")
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


def _given_unlike(value: Any, live: torch.Tensor) -> str:
    """How a given state differs in form from the model's; empty where it does not."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, no tensor"
    if nn.parameter.is_lazy(live) or (value.shape == live.shape and value.dtype == live.dtype):
        return ""
    return f"{form(value)}, in the model {form(live)}"


def fill(archive: ArchiveFile, model: nn.Module, *, strict: bool) -> StateReport:
    """Load the states; see `load_states`.

    What is read into the model's own tensors is read twice: once to see that all of it is whole, which no
    memory of the model's size is needed for, then into place, verified again.
    """
    wanted = {entry.name: entry for entry in entries_of(model)}
    report = compared(archive, wanted)
    if strict:
        report.check(archive.what)
    live, passing = _destinations(archive, model, wanted, report.loaded)
    in_place = {id(wanted[name].value) for name in (*live.tensors, *passing)}
    names = [name for name in report.loaded if id(wanted[name].value) not in in_place]
    fresh = _read(archive, names)
    stored = archive.tensors(MODEL)
    places = [archive.ties.get(name, name) for name in live.tensors]
    stored.check([*places, *(archive.ties.get(name, name) for name in passing)])
    _check_all_real(wanted, report.loaded, model)
    _check_memory([wanted[name] for name in (*names, *passing)])
    gate()
    _put(model, [(wanted[name], fresh[name]) for name in names])
    with naming_what_changed(live=True, verified=True), torch.no_grad():
        for name, tensor in passing.items():
            for start, part in runs_of(tensor):
                memory = torch.empty(part.shape, dtype=part.dtype)
                stored.read_range(archive.ties.get(name, name), start, dtypes.memory_of(memory))
                put(part, memory)
        stored.read_all(places, live.memories)
    return report


def _destinations(
    archive: ArchiveFile, model: nn.Module, wanted: Mapping[str, ModuleEntry], names: Sequence[str]
) -> tuple[InPlace, dict[str, torch.Tensor]]:
    """The model's own tensors that stored bytes may be read straight into, and its others with content.

    These lie on a device or not in order. Each has one name. There are none where the model has load code of
    its own, which wants to see what comes.
    """
    if has_load_code(parts_of(model)):
        return NOTHING, {}
    stored = archive.tensors(MODEL).entries
    first: dict[int, str] = {}
    for name in names:
        if name not in archive.extra and wanted[name].role is not None:
            first.setdefault(id(wanted[name].value), name)
    own = {name: wanted[name].value for name in first.values()}
    entries = [stored[archive.ties.get(name, name)] for name in own]
    live = fitting(own, list(own), [form_of(one.element.name, tuple(one.shape)) for one in entries])
    others = {name: one for name, one in own.items() if name not in live.tensors and all_strided([one])}
    return live, {
        name: one.detach()
        for name, one in others.items()
        if not one.is_meta and not nn.parameter.is_lazy(one)
    }


def _read(archive: ArchiveFile, names: Sequence[str]) -> dict[str, Any]:
    """What is stored under these names; tied names have one tensor."""
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


def _check_all_real(wanted: Mapping[str, ModuleEntry], loaded: Sequence[str], model: nn.Module) -> None:
    """A module on the meta device is filled whole, or its forward pass would fail later in odd ways."""
    known = {id(wanted[name].value) for name in loaded}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, one in tensors if one.is_meta and id(one) not in known]:
        raise BlobError(
            f"{', '.join(empty[:8])} would stay on the meta device, as the archive does not have them: "
            "make the model on a real device"
        )


def _check_memory(entries: Sequence[ModuleEntry]) -> None:
    """The tensors of the model that have content are of kinds, and in memory, that can be loaded into."""
    filled = [
        (entry.name, entry.value)
        for entry in entries
        if entry.role is not None and not nn.parameter.is_lazy(entry.value)
    ]
    filled = [(name, tensor) for name, tensor in filled if not tensor.is_meta and not is_wrapper(tensor)]
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
            f"the model's own load_state_dict refused states after some had changed: {error}"
        ) from error
    tie_again(model, ties)
