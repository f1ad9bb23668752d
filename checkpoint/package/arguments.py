"""Arguments of a program's steps, as JSON and back: the values of earlier steps by name, and constants.

`{"at": name}` is the value of a step or input. `{"layout": ...}` and `{"memory_format": ...}` are torch's,
`{"device": ...}` where the model lay when the program was made: it means where it lies now. Other constants
are typed values (`format/values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


@dataclass(frozen=True)
class Ref:
    """The value of a step or input."""

    name: str


@dataclass(frozen=True)
class Place:
    """A device, as it was called where the program was made."""

    text: str


def encode(value: Any, name_of: Callable[[Any], str | None]) -> Json:
    """One argument as JSON; `name_of` knows what is the value of a step. Raises BlobError for the rest."""
    if (name := name_of(value)) is not None:
        return {"at": name}
    if isinstance(value, (list, tuple)):
        return [encode(item, name_of) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, table in (("layout", LAYOUTS), ("memory_format", MEMORY_FORMATS)):
        for name, known in table.items():
            if value is known:
                return {kind: name}
    return values.encode(value, "an argument")


def decode(json: Json) -> Any:
    """The argument, `Ref` and `Place` where values and devices come in; raises DamagedError, FormatError."""
    if isinstance(json, list):
        return [decode(item) for item in json]
    if not isinstance(json, dict):
        return json
    match json:
        case {"at": str(name)}:
            return Ref(name)
        case {"device": str(text)}:
            return Place(text)
        case {"layout": str(name)} if name in LAYOUTS:
            return LAYOUTS[name]
        case {"memory_format": str(name)} if name in MEMORY_FORMATS:
            return MEMORY_FORMATS[name]
        case {"$": str(), "v": _}:
            return values.decode(json)
    raise DamagedError(f"an argument of a step is {str(json)[:100]}")


def resolved(argument: Any, found: Mapping[str, Any], device: torch.device) -> Any:
    """The argument with the values of this call."""
    if isinstance(argument, Ref):
        return found[argument.name]
    if isinstance(argument, list):
        return [resolved(item, found, device) for item in argument]
    return device if isinstance(argument, Place) else argument


def names_in(argument: Any) -> list[str]:
    """The steps and inputs that an argument needs."""
    if isinstance(argument, Ref):
        return [argument.name]
    return [name for item in argument for name in names_in(item)] if isinstance(argument, list) else []
