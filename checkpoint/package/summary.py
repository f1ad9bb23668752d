"""`summary`: what a model, an archive or a package consists of, as a text for people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torchrelay.checkpoint.archive.archive_file import MODEL, PACKAGE, ArchiveFile, open_archive_file
from torchrelay.checkpoint.archive.entries import PARAMETER, Entry
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.format.value_decoding import references
from torchrelay.checkpoint.package.opening import Package, package_of, signature_in
from torchrelay.jobs.runtime import Signature, TensorSpec

ROWS = 200
"""States that are listed one by one."""


def summary(what: Any) -> str:
    """A text on a module, or on the file of a state archive or model package (path or URL).

    It lists states with type, shape and bytes, totals, and what else a file holds: aux values, signature,
    labels, where it came from, what it lacks. No tensor is read. Raises as `load_states` does.
    """
    if isinstance(what, (str, os.PathLike)):
        return "\n".join(_of_file(what))
    return "\n".join(_of_module(what))


def _of_file(where: Where) -> Iterable[str]:
    with open_archive_file(where) as archive:
        entries = archive.tensors(MODEL).entries
        kind = "model package" if archive.kind == PACKAGE else "state archive"
        yield f"{archive.what}: {kind}"
        if archive.kind == PACKAGE:
            yield from _of_package(package_of(archive, where))
        elif "signature" in archive.fields.values:
            yield from signature_lines(signature_in(archive.fields.fields("signature")))
        yield from _states(entries, archive.ties, archive.extra)
        yield from _aux(archive)


def _of_package(package: Package) -> Iterable[str]:
    yield f"  class       {package.class_path}"
    yield f"  program     {'yes' if package.has_program else 'no'}"
    yield f"  source      {', '.join(package.source) or 'none'}"
    if package.signature is not None:
        yield from signature_lines(package.signature)
    if package.labels is not None:
        yield f"  labels      {', '.join(package.labels)}"
    if package.preprocessing is not None:
        yield f"  preprocess  {package.preprocessing}"
    for key, value in package.metadata.items():
        yield f"  {key:<11} {value}"
    for reason in package.without:
        yield f"  without     {reason}"


def signature_lines(signature: Signature) -> Iterable[str]:
    """What goes in and what comes out, a line each."""
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            yield f"  {side:<11} {spec_text(spec)}"


def spec_text(spec: TensorSpec) -> str:
    """`x float32[batch, 3]`."""
    return f"{spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]"


def _aux(archive: ArchiveFile) -> Iterable[str]:
    trees = archive.fields.fields("aux").fields("values").values
    for name, tree in trees.items():
        tensors = len(references(tree))
        yield f"  aux         {name}: {f'{tensors} tensors and values' if tensors else str(tree)[:80]}"


def _states(entries: Mapping[str, Entry], ties: Mapping[str, str], extra: Iterable[str]) -> Iterable[str]:
    width = max((len(name) for name in list(entries)[:ROWS]), default=0)
    for name in list(entries)[:ROWS]:
        entry = entries[name]
        form = f"{entry.element.name}{list(entry.shape)}"
        yield f"  {name:<{width}}  {entry.role:<9}  {form:<24}  {entry.nbytes} B"
    if len(entries) > ROWS:
        yield f"  ... and {len(entries) - ROWS} more"
    for name, first in ties.items():
        yield f"  {name} is {first}"
    for name in extra:
        yield f"  {name} is a plain value"
    numbers = [_elements(entry) for entry in entries.values() if entry.role == PARAMETER]
    nbytes = sum(entry.nbytes for entry in entries.values())
    yield f"  {len(entries)} states, {sum(numbers):,} parameters, {nbytes:,} bytes"


def _elements(entry: Entry) -> int:
    return entry.nbytes // entry.element.itemsize


def _of_module(module: Any) -> Iterable[str]:
    from torchrelay.checkpoint.archive.states import checked, states_of
    from torchrelay.checkpoint.format.dtypes import logical_dtype
    from torchrelay.checkpoint.package.recorded import recorded_call

    states = states_of(checked(module))
    yield f"{type(module).__module__}.{type(module).__qualname__}"
    if (known := recorded_call(module)) is not None:
        yield from signature_lines(known.signature)
    entries = {
        name: Entry(logical_dtype(one.tensor.dtype, name), tuple(one.tensor.shape), one.role, one.trainable)
        for name, one in states.tensors.items()
    }
    yield from _states(entries, states.ties, states.extra)
