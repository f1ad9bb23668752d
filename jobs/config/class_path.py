"""Where a class of the user lies: `{workspace}/file.py`, `file.py:Class`, `package.module:Class`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.forms import At, Form, Json, described
from torchrelay.jobs.config.path_forms import local_path, unreplaced
from torchrelay.jobs.yaml_scalars import short
from torchrelay.records import dataclass

_NAME = r"[^\W\d]\w*"
_MODULE = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<name>{_NAME})")
_FILE = re.compile(rf"(?P<file>.*\.py)(?::(?P<name>{_NAME}))?")
_ANCESTOR = "paddlerec."


@dataclass(frozen=True)
class ClassPath:
    """A class by name in a file, or in a module that can be imported: one of `file` and `module` is set.

    `text` is what the user wrote, `{workspace}` and the like replaced.
    """

    text: str
    name: str
    file: Path | None = None
    module: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ClassAt(Form):
    """A class; of a file without `:Class` the one that is called `default`. The file must be there."""

    default: str
    textual = True

    @property
    def word(self) -> str:
        """Both forms."""
        return f"`file.py` with a class `{self.default}`, `file.py:Class` or `module:Class`"

    def take(self, value: Any, at: At) -> Any:
        """A ClassPath; nothing is imported."""
        if not isinstance(value, str):
            return at.expected(self, value)
        if value.startswith(_ANCESTOR):
            return at.wrong(f"{short(value)} is in PaddleRec's package: copy the file into the workspace")
        if (found := _FILE.fullmatch(value)) is not None:
            return self._file(value, found, at)
        if (found := _MODULE.fullmatch(value)) is not None:
            return ClassPath(value, found["name"], module=found["module"])
        return at.wrong(f"expected {self.word}, not {described(value)}{_remedy(value)}")

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "string", "minLength": 1}

    def _file(self, value: str, found: re.Match[str], at: At) -> Any:
        file, source = local_path(found["file"], at.reading.workspace), at.reading.source
        if source is not None and file.is_relative_to(at.reading.workspace):
            file = source / file.relative_to(at.reading.workspace)
        if not os.path.isfile(file):  # noqa: PTH113 - False for a name too long
            remedy = unreplaced(value)
            return at.wrong(f"there is no file {file}{'' if remedy is None else f': {remedy}'}")
        return ClassPath(value, found["name"] or self.default, file=file)


def _remedy(value: str) -> str:
    """For `package.module.Class`, how it is written."""
    module, dot, name = value.rpartition(".")
    written = f"{module}:{name}"
    return f": write {written}" if dot and _MODULE.fullmatch(written) else ""
