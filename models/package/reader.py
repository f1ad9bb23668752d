"""`open_package` and `summary`: read the contents of packages and archives without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.files.publish import Where
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.value_decoding import decode, references
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.models.archive.manifest import (
    CONSTANTS,
    MEMBER_LIMIT,
    MODEL,
    PACKAGE,
    PARAMETER,
    ArchiveEntry,
    ArchiveFile,
    open_archive_file,
)
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch
    from torch import nn


PROGRAM = "program.json"
SOURCE = "source/"


@dataclass(frozen=True)
class Package:
    """Description of a package; `module()` returns the model.

    Attributes:
        signature: Inputs and outputs; None if no inputs were given.
        metadata: Plain values, including `run`, `epoch` and `code_id` as far as known.
        preprocessing: The author's description of the preprocessing.
        class_path: "module:Class" of the model.
        source: Names of the archived source files.
        without: Reasons for missing parts.
        still: Parts of the model that stay in eval mode in the program; None in packages of earlier versions.
    """

    where: str
    signature: Signature | None
    labels: tuple[str, ...] | None
    preprocessing: Any
    metadata: Mapping[str, Any]
    class_path: str
    has_program: bool
    has_constructor: bool
    source: tuple[str, ...]
    without: tuple[str, ...]
    still: tuple[str, ...] | None
    place: Where = field(repr=False, compare=False)
    """The path as given; `where` is for messages."""

    def module(self) -> nn.Module:
        """Return the model in eval mode on the CPU, from its program, without running source or unpickling.

        Raises UsageError with the alternatives if the package has no program; DamagedError.
        """
        if not self.has_program or self.signature is None:
            raise UsageError(f"{self.where} has no program to run: {self._instead()}")
        with open_archive_file(self.place) as archive:
            return _module(archive, self.signature, self.still)

    def states(self) -> dict[str, torch.Tensor]:
        """Return the states; tied names share a tensor. Raises DamagedError."""
        with open_archive_file(self.place) as archive:
            return archive.states()

    def aux(self) -> dict[str, Any]:
        """Return the `aux_states` given to `save`, with tensors on the CPU; raises DamagedError."""
        with open_archive_file(self.place) as archive:
            return archive.aux()

    def _instead(self) -> str:
        reason = "; ".join(self.without) or "it was saved without inputs"
        if self.source and self.has_constructor:
            return f"{reason}. Its source is archived: load(path, trust_source=True) runs it, if you trust it"
        return f"{reason}. It contains states only: create the model and call load_states(path, model)"


def open_package(where: Where) -> Package:
    """Open a package; reads only its manifest and imports no torch.

    Raises UsageError if the file does not exist or is a state archive, FormatError for another kind of file
    or a newer version, DamagedError, StorageError.
    """
    with open_archive_file(where) as archive:
        return package_of(archive, where)


def package_of(archive: ArchiveFile, where: Where) -> Package:
    """Return the description in the manifest; raises like `open_package`."""
    if archive.kind != PACKAGE:
        raise UsageError(f"{archive.what} is a state archive, not a package: call load_states(path, model)")
    fields = archive.fields.fields("package")
    found = fields.optional("signature", fields.fields)
    labels = fields.optional("labels", fields.texts)
    metadata = decode(fields.fields("metadata").values)
    if type(metadata) is not dict:  # `{"$": "int", "v": "5"}` is a JSON object that encodes a number
        raise fields.wrong("metadata")
    return Package(
        archive.what,
        None if found is None else signature_in(found),
        labels,
        decode(fields.values.get("preprocessing")),
        metadata,
        fields.text("class_path"),
        fields.flag("program"),
        fields.values.get("constructor") is not None,
        tuple(sorted(name.removeprefix(SOURCE) for name in archive.members if name.startswith(SOURCE))),
        fields.texts("without"),
        fields.texts("still") if "still" in fields.values else None,
        where,
    )


def signature_in(fields: Fields) -> Signature:
    """Parse the signature in a manifest; raises DamagedError."""
    try:
        return Signature.from_json(fields.values)
    except UsageError as error:
        raise DamagedError(f"{fields.what} is damaged: {error}") from None


def _module(archive: ArchiveFile, signature: Signature, still: Sequence[str] | None) -> nn.Module:
    import torch
    from torch import nn

    from torchrelay.models.package.program import program_from_json
    from torchrelay.models.package.program_module import ProgramModule

    what = f"{archive.what}: {PROGRAM}"
    try:
        json = canonical_json.loads(archive.read(PROGRAM), what=what, limit_bytes=MEMBER_LIMIT)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
    program = program_from_json(json, what)
    if len(signature.inputs) != len(program.inputs):
        raise DamagedError(f"{archive.what}: program and signature do not have the same inputs")
    entries = archive.tensors(MODEL).entries
    kinds = {**entries, **{name: entries[first] for name, first in archive.ties.items()}}
    constants = archive.tensors(CONSTANTS)
    states, parameters = archive.states(), dict[int, torch.Tensor]()
    for name, tensor in states.items():
        if kinds[name].role == PARAMETER:
            states[name] = parameters.setdefault(id(tensor), nn.Parameter(tensor, kinds[name].trainable))
    made = {name: constants.read(name) for name in constants.entries}
    return ProgramModule(program, signature, states, made, still)


ROWS = 200
"""Number of states listed individually."""


def summary(what: Any) -> str:
    """Describe a module, or the file of a state archive or model package (path or URL), as text.

    It lists states with type, shape and bytes, totals, aux values, signature, labels, metadata and missing
    parts. Reads no tensors. Raises like `load_states`.
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
            package = package_of(archive, where)
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
        elif "signature" in archive.fields.values:
            yield from signature_lines(signature_in(archive.fields.fields("signature")))
        yield from _states(entries, archive.ties, archive.extra)
        for name, tree in archive.fields.fields("aux").fields("values").values.items():
            tensors = len(references(tree))
            yield f"  aux         {name}: {f'{tensors} tensors and values' if tensors else str(tree)[:80]}"


def signature_lines(signature: Signature) -> Iterable[str]:
    """Return a line per input and output: `x float32[batch, 3]`."""
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            yield f"  {side:<11} {spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]"


def _states(
    entries: Mapping[str, ArchiveEntry], ties: Mapping[str, str], extra: Iterable[str]
) -> Iterable[str]:
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
    learned = [entry for entry in entries.values() if entry.role == PARAMETER]
    count = sum(entry.nbytes // entry.element.itemsize for entry in learned)
    nbytes = sum(entry.nbytes for entry in entries.values())
    yield f"  {len(entries)} states, {count:,} parameters, {nbytes:,} bytes"


def _of_module(module: Any) -> Iterable[str]:
    from torchrelay.checkpoint.format.dtypes import logical_dtype
    from torchrelay.models.archive.api import checked, recorded_call, states_of

    states = states_of(checked(module))
    yield f"{type(module).__module__}.{type(module).__qualname__}"
    if (known := recorded_call(module)) is not None:
        yield from signature_lines(known.signature)
    entries = {
        name: ArchiveEntry(
            logical_dtype(one.tensor.dtype, name), tuple(one.tensor.shape), one.role, one.trainable
        )
        for name, one in states.tensors.items()
    }
    yield from _states(entries, states.ties, states.extra)
