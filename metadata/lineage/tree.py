"""Reading what runs remember of the stages that they were built on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, UsageError
from torchrelay.metadata.files import read_json
from torchrelay.metadata.lineage.capture import FOLDER, STAGE
from torchrelay.records import dataclass

_CAPTURED = re.compile(r"captured\.([0-9]{1,9})\.json")
_DEPTH = 64


@dataclass(frozen=True)
class KnownStage:
    """A stage as a run remembers it: the aliases that lead to it, where its files lie, its record."""

    aliases: tuple[str, ...]
    folder: Path
    record: Mapping[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        """How people call it: `expert/encoder`."""
        return "/".join(self.aliases)

    @property
    def files(self) -> tuple[str, ...]:
        """The copied files of the stage itself, without those of the stages that it was built on."""
        files = self.record.get("files")
        names = sorted(files) if isinstance(files, dict) else []
        return tuple(name for name in names if not name.startswith(f"{FOLDER}/"))

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the command line of the stage's last start put over its configuration."""
        found = [(int(match[1]), name) for name in self.files if (match := _CAPTURED.fullmatch(name))]
        if not found:
            return ()
        said = (read_json(self.folder / max(found)[1]) or {}).get("overrides")
        return tuple(map(str, said)) if isinstance(said, list) else ()


def stages_of(run: Path) -> list[KnownStage]:
    """All stages that a run was built on, each before those that it was built on itself.

    Empty where there are none. Raises DamagedError for a record that is none.
    """
    return list(_below(run, ()))


def find_stage(run: Path, path: str) -> KnownStage:
    """The stage that `expert/encoder` names; raises UsageError saying which there are."""
    known = stages_of(run)
    for stage in known:
        if stage.path == path.strip("/"):
            return stage
    names = ", ".join(stage.path for stage in known) or "none"
    raise UsageError(f"{run} was built on no stage {path!r:.80}; there is {names}")


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[KnownStage]:
    if len(above) > _DEPTH:
        raise DamagedError(f"{folder} is nested deeper than {_DEPTH} stages, which torchrelay never wrote")
    for path in sorted((folder / FOLDER).glob(f"*/{STAGE}")):
        record = read_json(path)
        if record is None or not isinstance(record.get("epoch"), int):
            raise DamagedError(f"{path} is no record of a stage: restore it from a copy of the run")
        stage = KnownStage((*above, path.parent.name), path.parent, record)
        yield stage
        yield from _below(path.parent, stage.aliases)
