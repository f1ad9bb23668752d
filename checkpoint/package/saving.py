"""Making packages: states, source and constructor arguments, and a program that needs no source."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.archive.archive_file import (
    AUX,
    CONSTANTS,
    MODEL,
    PACKAGE,
    Contents,
    write_contents,
)
from torchrelay.checkpoint.archive.members import Outgoing
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.archive.saving import aux_of
from torchrelay.checkpoint.archive.states import States, checked, states_of
from torchrelay.checkpoint.format import canonical_json, values
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.package import opening
from torchrelay.checkpoint.package.calls import Dynamic
from torchrelay.checkpoint.package.epochs import of_epoch
from torchrelay.checkpoint.package.exporting import export, parts_that_train_otherwise
from torchrelay.checkpoint.package.opening import Package, open_package
from torchrelay.checkpoint.package.recorded import recorded_call
from torchrelay.checkpoint.package.rewriting import Exported
from torchrelay.checkpoint.package.sources import sources_of
from torchrelay.errors import BlobError, UsageError

Constructor = tuple[Sequence[Any], Mapping[str, Any]]


def save(
    path: Where,
    model: nn.Module,
    inputs: Any = None,
    *,
    constructor: Constructor | None = None,
    dynamic: Dynamic | None = None,
    labels: Sequence[str] | None = None,
    preprocessing: Any = None,
    metadata: Mapping[str, Any] | None = None,
    aux_states: Mapping[str, Any] | None = None,
    source: bool = True,
    drop_unused: bool = False,
    run: str | os.PathLike[str] | None = None,
    epoch: int | str = "last",
    blob: str = "model",
    overwrite: bool = False,
) -> Package:
    """Write a model into one file from which it is rebuilt without its class being there; see `load`.

    `inputs` are an example of what `forward` takes: a tensor, a tuple of arguments, or a dict by name;
    they are needed for the program and the signature, unless `compile(model, inputs)` was called before.
    The first size of inputs may differ later; `dynamic={"tokens": {0: "batch", 1: "length"}}` says it
    otherwise. The program is of the model in eval mode. `constructor=(args, kwargs)` is what the class
    was called with, needed for the source form; a class that needs no argument does without. With
    `source=False` no source is archived. `drop_unused` leaves inputs out that no answer depends on. With
    `run`, a run directory or checkpoints, the states are those that the blob `blob` has in its `epoch`
    (of a copy: `model` stays as it is), and `metadata` tells of both. `labels` name the classes of the
    output, `preprocessing` refers to what makes inputs. `aux_states` are values and tensors that belong to
    the states, an optimizer's say, as `save_states` takes them: `load_states(path, model)` gives them back.
    The file appears whole and durable or not at all; it replaces another only with `overwrite`.

    What cannot be part of the package (no inputs, an operator that programs may not use, no source) is left
    out, told by the package's `without`; a package that has states only is warned of, and one whose source
    nobody could run for want of `constructor`.
    Raises UsageError, BlobError for a state or value that cannot be stored, StorageError.
    """
    if inputs is None and (known := recorded_call(checked(model))) is not None:
        inputs, dynamic = known.inputs, dynamic or known.dynamic
    if run is not None:
        model, of_run = of_epoch(checked(model), run, epoch, blob)
        metadata = {**of_run, **(metadata or {})}
    states = states_of(checked(model))
    without: list[str] = []
    exported = _exported(model, inputs, dynamic, without, drop_unused=drop_unused)
    class_path, files = _source(model, wanted=source, without=without)
    arguments = _constructor(model, constructor, without) if files else None
    package = {
        **_described(exported, labels, preprocessing, metadata),
        "still": parts_that_train_otherwise(model),
        "class_path": class_path,
        "constructor": arguments,
        "without": without,
    }
    aux = aux_of(aux_states or {}, states)
    where = write_contents(path, _contents(states, exported, files, aux, package), overwrite=overwrite)
    if arguments is None and (files or exported is None):
        lacks = "cannot make the model of its source" if exported is not None else "has states only"
        warnings.warn(f"{where} {lacks}: {'; '.join(without)}", stacklevel=2)
    return open_package(path)


def _described(
    exported: Exported | None,
    labels: Sequence[str] | None,
    preprocessing: Any,
    metadata: Mapping[str, Any] | None,
) -> dict[str, Json]:
    return {
        "program": exported is not None,
        "signature": None if exported is None else exported.signature.to_json(),
        "labels": _labels(labels),
        "preprocessing": values.encode(preprocessing, "preprocessing"),
        "metadata": values.encode(dict(metadata or {}), "metadata", tensor=_no_tensor),
    }


def _contents(
    states: States,
    exported: Exported | None,
    files: Mapping[str, bytes],
    aux: tuple[Json, Mapping[str, Outgoing]],
    package: Json,
) -> Contents:
    constants = {} if exported is None else dict(exported.constants)
    members = {opening.SOURCE + name: data for name, data in files.items()}
    if exported is not None:
        members[opening.PROGRAM] = canonical_json.dumps(exported.json)
    groups = {
        MODEL: states.tensors,
        AUX: aux[1],
        CONSTANTS: {name: Outgoing(tensor) for name, tensor in constants.items()},
    }
    return Contents(
        PACKAGE, groups, states.ties, states.extra, aux[0], states.order, package=package, members=members
    )


def _no_tensor(path: str, tensor: torch.Tensor) -> Json:
    raise BlobError(
        f"{path} is a tensor, and metadata has plain values: give tensors as aux_states={{...}}, which "
        "load_states(path, model) and open_package(path).aux() give back"
    )


def _exported(
    model: nn.Module, inputs: Any, dynamic: Dynamic | None, without: list[str], *, drop_unused: bool
) -> Exported | None:
    if inputs is None:
        without.append("no program and no signature: no inputs were given, and compile was not called")
        return None
    try:
        exported = export(model, inputs, dynamic, drop_unused=drop_unused)
    except BlobError as error:
        without.append(f"no program: {error}")
        return None
    without.extend(f"no free size {name!r}: traced, the model fixes it" for name in exported.fixed)
    return exported


def _source(model: nn.Module, *, wanted: bool, without: list[str]) -> tuple[str, dict[str, bytes]]:
    class_path, files, reason = sources_of(model)
    if not wanted:
        without.append("no source: source=False was given")
        return class_path, {}
    if reason:
        without.append(f"no source: {reason}")
    return class_path, files


def _constructor(model: nn.Module, given: Constructor | None, without: list[str]) -> Json:
    if given is None:
        try:
            inspect.signature(type(model)).bind()
        except TypeError:
            without.append(
                f"no constructor arguments: {type(model).__name__} needs some; "
                "give constructor=(args, kwargs)"
            )
            return None
        given = ((), {})
    if len(given) != 2 or not isinstance(given[0], (list, tuple)) or not isinstance(given[1], Mapping):
        raise UsageError("constructor is (args, kwargs): a sequence and a dict")
    args, kwargs = list(given[0]), dict(given[1])
    try:
        inspect.signature(type(model)).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"constructor: {type(model).__name__} does not take these: {error}") from None
    return {"args": values.encode(args, "constructor"), "kwargs": values.encode(kwargs, "constructor")}


def _labels(labels: Sequence[str] | None) -> list[str] | None:
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(one, str) for one in labels):
        raise UsageError("labels are a sequence of texts, one for each class")
    return list(labels)
