"""`save_states`: the states of a model and whatever belongs to them, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.archive.archive_file import AUX, MODEL, STATES, Contents, write_contents
from torchrelay.checkpoint.archive.members import Outgoing
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.archive.states import States, checked, states_of
from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.package.recorded import recorded_call
from torchrelay.checkpoint.state.tensor_checks import admitted
from torchrelay.errors import UsageError


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


def aux_of(given: Mapping[str, Any], states: States) -> tuple[Json, dict[str, Outgoing]]:
    """The values as JSON, in order, and the tensors inside them by the name that stands for them."""
    if not isinstance(given, Mapping):
        raise UsageError(f'aux_states has values by name, {{"epoch": 3}}, not {type(given).__name__}')
    taken = {*states.tensors, *states.ties, *states.extra}
    found: dict[str, Outgoing] = {}
    names: dict[int, str] = {}

    def keep(path: str, tensor: torch.Tensor) -> Json:
        if (known := names.get(id(tensor))) is not None:
            return known
        name, count = path, 1
        while name in found:
            count += 1
            name = f"{path}#{count}"
        found[name] = Outgoing(admitted(tensor, path))
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
