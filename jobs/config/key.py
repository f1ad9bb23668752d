"""Keys of the schema: fields of frozen dataclasses that say form, default, meaning, and identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from torchrelay.jobs.config.forms import Form
from torchrelay.records import dataclass

_METADATA = "torchrelay"
_FREE = "free"


@dataclass(frozen=True)
class KeySpec:
    """One key. `default` is written as in a file; None: the key may be missing and means nothing then.

    `identity`: another value makes it another run. `infer_only`: has no meaning for a runner that trains.
    """

    name: str
    attribute: str
    form: Form
    doc: str
    default: Any
    required: bool
    identity: bool
    infer_only: bool


def key(
    form: Form,
    doc: str,
    *,
    default: Any = None,
    required: bool = False,
    identity: bool = True,
    infer_only: bool = False,
    name: str | None = None,
) -> Any:
    """A field of a section. `name` is the key in files where a field cannot have it (`class`)."""
    spec = KeySpec(name or "", "", form, doc, default, required, identity, infer_only)
    return dataclasses.field(metadata={_METADATA: spec})


def free(doc: str) -> Any:
    """The field that takes every key which the section does not know, as a mapping that notes reads."""
    return dataclasses.field(metadata={_METADATA: _FREE, "doc": doc})


@dataclass(frozen=True)
class SectionSpec:
    """The keys of a section, and what becomes of others: `free` is the field that takes them, None refuses.

    `refused` are keys of others, each with what to write instead.
    """

    keys: Mapping[str, KeySpec]
    free: str | None
    free_doc: str
    refused: Mapping[str, str]


@cache
def section_spec(section: type) -> SectionSpec:
    """The keys of a dataclass whose fields were made by `key` and `free`."""
    keys: dict[str, KeySpec] = {}
    takes, doc = None, ""
    for one in dataclasses.fields(section):
        said = one.metadata[_METADATA]
        if said == _FREE:
            takes, doc = one.name, one.metadata["doc"]
        else:
            spec = dataclasses.replace(said, name=said.name or one.name, attribute=one.name)
            keys[spec.name] = spec
    return SectionSpec(keys, takes, doc, getattr(section, "REFUSED", {}))
