"""What a run is to its experiment: `program.json`, beside `run.json`.

program, origin       the program's name, and the file or module that it came from
code_id, config_id    what the run is of; starts with others are other runs
created, message      when it was made, and what its user said of it
launch                which launch made it, so that the same launch, repeated, goes on with it
limits                those of the newest start; no part of what the run is
amended               earlier code ids that `amend` took the place of
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError
from torchrelay.metadata.files import read_json, write_json
from torchrelay.records import dataclass

FILE = "program.json"
FORMAT = {"major": 1, "minor": 0, "features": []}
_TEXTS = ("program", "origin", "message", "launch")


@dataclass(frozen=True)
class Identity:
    """What makes a run this run: the digests of its code and of its configuration.

    Code that could not be read has no id, and is then like no other.
    """

    code_id: str | None
    config_id: str | None

    def same(self, other: Identity) -> bool:
        """Whether a start with the one may go on with a run of the other."""
        return self.code_id is not None and self == other


@dataclass(frozen=True)
class Note:
    """The content of the file."""

    program: str
    origin: str
    code_id: str | None
    config_id: str | None
    created: float
    message: str = ""
    launch: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    amended: tuple[Mapping[str, Any], ...] = ()

    @property
    def identity(self) -> Identity:
        """What the run is of, with the newest amendment."""
        return Identity(self.code_id, self.config_id)

    @property
    def is_of_program(self) -> bool:
        """Whether a class in a file of Python made the run; else a configuration was all there was."""
        return self.origin.endswith(".py")


def read_note(run: Path) -> Note | None:
    """None where the directory is no run of a program; raises DamagedError."""
    found = read_json(run / FILE)
    if found is None:
        return None
    known = {one.name for one in fields(Note)}
    values = {name: value for name, value in found.items() if name in known}
    amended = values.pop("amended", [])
    if not _is_right(values) or not isinstance(amended, list):
        raise DamagedError(f"{run / FILE} is not what was written: restore it from a copy")
    return Note(**values, amended=tuple(one for one in amended if _is_amendment(one)))


def write_note(run: Path, note: Note) -> None:
    """Replace the file; raises StorageError."""
    write_json(run / FILE, {"format": FORMAT, **asdict(note), "amended": list(note.amended)})


def _is_amendment(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("code_id"), str | None)


def _is_right(values: Mapping[str, Any]) -> bool:
    texts = all(isinstance(values.get(name, ""), str) for name in _TEXTS)
    ids = all(isinstance(values.get(name), str | None) for name in ("code_id", "config_id"))
    there = {"program", "origin", "code_id", "config_id", "created"} <= values.keys()
    number = type(values.get("created")) in (int, float)
    return texts and ids and there and number and isinstance(values.get("limits", {}), dict)
