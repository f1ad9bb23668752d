"""Model packages, opened: what they say of the model, and the model that runs without its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.archive.archive_file import (
    CONSTANTS,
    MEMBER_LIMIT,
    MODEL,
    PACKAGE,
    ArchiveFile,
    open_archive_file,
)
from torchrelay.checkpoint.archive.entries import PARAMETER
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields, Json
from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.jobs.runtime import Signature
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch
    from torch import nn

PROGRAM = "program.json"
SOURCE = "source/"


@dataclass(frozen=True)
class Package:
    """What a package says of its model; `module()` is the model itself.

    `signature` is None where nobody gave inputs. `metadata` has what was known of the run: `run`, `epoch`,
    `code_id`, whatever of these there is. `preprocessing` refers to what makes inputs (a text, or a value of
    the author's). `class_path` is "module:Class"; `source` names the archived files; `without` says, for
    what a package lacks, why. `still` names the parts of the model that the program has in eval mode alone,
    None where an earlier version wrote the package.
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
    """As it was given; `where` is for messages."""

    def module(self) -> nn.Module:
        """The model in eval mode on the CPU, of its program: no source is run and nothing is unpickled.

        Raises UsageError where the package has no program, and says what else there is; DamagedError.
        """
        if not self.has_program or self.signature is None:
            raise UsageError(f"{self.where} has no program to run: {self._instead()}")
        with open_archive_file(self.place) as archive:
            return _module(archive, self.signature, self.still)

    def states(self) -> dict[str, torch.Tensor]:
        """The states alone, tied names with one tensor; raises DamagedError."""
        with open_archive_file(self.place) as archive:
            return archive.states()

    def aux(self) -> dict[str, Any]:
        """What `save` was given as `aux_states`, tensors on the CPU; raises DamagedError."""
        with open_archive_file(self.place) as archive:
            return archive.aux()

    def _instead(self) -> str:
        reason = "; ".join(self.without) or "it was saved without inputs"
        if self.source and self.has_constructor:
            return f"{reason}. Its source is archived: load(path, trust_source=True) runs it, if you trust it"
        return f"{reason}. It has states only: make the model and call torchrelay.load_states(path, model)"


def open_package(where: Where) -> Package:
    """Open a package; reads its manifest alone and needs no torch.

    Raises UsageError where there is no file, or a state archive, which is no package; FormatError for a
    foreign file or a newer version, DamagedError, StorageError.
    """
    with open_archive_file(where) as archive:
        return package_of(archive, where)


def package_of(archive: ArchiveFile, where: Where) -> Package:
    """What the manifest says; raises as `open_package`."""
    if archive.kind != PACKAGE:
        raise UsageError(
            f"{archive.what} is a state archive, no package: make the model and call load_states(path, model)"
        )
    fields = archive.fields.fields("package")
    found = fields.optional("signature", fields.fields)
    labels = fields.optional("labels", fields.texts)
    return Package(
        archive.what,
        None if found is None else signature_in(found),
        labels,
        decode(fields.values.get("preprocessing")),
        _mapping(decode(fields.fields("metadata").values), fields),
        fields.text("class_path"),
        fields.flag("program"),
        fields.values.get("constructor") is not None,
        tuple(sorted(name.removeprefix(SOURCE) for name in archive.members if name.startswith(SOURCE))),
        fields.texts("without"),
        fields.texts("still") if "still" in fields.values else None,
        where,
    )


def _mapping(found: Any, fields: Fields) -> Mapping[str, Any]:
    if type(found) is not dict:  # `{"$": "int", "v": "5"}` is an object in JSON and a number as a value
        raise fields.wrong("metadata")
    return found


def signature_in(fields: Fields) -> Signature:
    """What goes in and out, as a manifest says; raises DamagedError."""
    try:
        return Signature.from_json(fields.values)
    except UsageError as error:
        raise DamagedError(f"{fields.what} is damaged: {error}") from None


def _module(archive: ArchiveFile, signature: Signature, still: Sequence[str] | None) -> nn.Module:
    from torchrelay.checkpoint.package.program import program_from_json
    from torchrelay.checkpoint.package.program_module import ProgramModule, Tensors

    program = program_from_json(_program_json(archive), f"{archive.what}: {PROGRAM}")
    if len(signature.inputs) != len(program.inputs):
        raise DamagedError(f"{archive.what}: program and signature do not have the same inputs")
    entries = archive.tensors(MODEL).entries
    kinds = {**entries, **{name: entries[first] for name, first in archive.ties.items()}}
    constants = archive.tensors(CONSTANTS)
    tensors = Tensors(
        archive.states(),
        {name: constants.read(name) for name in constants.entries},
        frozenset(name for name, entry in kinds.items() if entry.role == PARAMETER),
        frozenset(name for name, entry in kinds.items() if entry.trainable),
    )
    return ProgramModule(program, signature, tensors, still)


def _program_json(archive: ArchiveFile) -> Json:
    what = f"{archive.what}: {PROGRAM}"
    try:
        return canonical_json.loads(archive.read(PROGRAM, MEMBER_LIMIT), what=what, limit_bytes=MEMBER_LIMIT)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
