"""`torchrelay.load_code`: the modules of a past run, in this process, as they were."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.capture import capture_with_code
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.archived_imports import ArchivedImports


class LoadedCode:
    """The archived source of one run; see `load_code`."""

    def __init__(self, what: str, code_id: str, captured: Mapping[str, Any], files: dict[str, bytes],
                 links: Mapping[str, str]) -> None:  # fmt: skip
        self.id = code_id
        code = captured["code"]
        self.script: str | None = code.get("script")
        self._files = files
        self._imports = ArchivedImports(what, files, links, _folders(code))

    def import_module(self, name: str) -> ModuleType:
        """A module of the archive by its full name, run when it is first asked for.

        Raises ModuleNotFoundError for what is not in the archive: import that as ever.
        """
        return self._imports.module(name)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the archived files."""
        return tuple(sorted(self._files))

    def read(self, name: str) -> bytes:
        """The bytes of a file, such as a configuration beside the modules; raises UsageError."""
        data = self._files.get(self._imports.resolve(name))
        if data is None:
            raise UsageError(f"{self._imports.what} has no file {name!r}; `files` has the names")
        return data

    def __repr__(self) -> str:
        return f"<code {self.id[:12]} of {self._imports.what}: {len(self._files)} files>"


def load_code(run: str | os.PathLike[str], attempt: int | None = None) -> LoadedCode:
    """The archived source of a past run, to be imported beside other runs with modules of the same names.

        old, new = torchrelay.load_code("runs/a"), torchrelay.load_code("runs/b")
        model = old.import_module("model").Net()          # each has its own `model`

    **Importing runs the code that is in the archive**, with this process's rights: do it with runs that you
    trust as you trust your own scripts. `load_code` itself runs nothing. Every file is verified first.

    Without `attempt` it is the newest source that the run was started with, else that of this start. What
    the modules import, now or later inside of functions, they get from their own archive; what is not in
    there (the standard library, torch) from this process. `sys.path`, the working directory and your own
    modules stay as they are, and nothing is written: these modules are called `torchrelay_code_1.model` and
    so on, and stay in `sys.modules` under these names. Another process does not find them there
    (`multiprocessing` with spawn, pickles): for that, `torchrelay runs code` unpacks the archive, to be run
    by a process of its own.

    Raises UsageError where there is no such run, or its source was not archived; DamagedError.
    """
    path = Path(run).absolute()
    captured = capture_with_code(path, attempt)
    code_id = captured["code"]["id"]
    place = path / "code" / f"{code_id}.zip"
    with open_archive(place) as archive:
        return LoadedCode(str(place), code_id, captured, archive.read_all(), archive.manifest.links)


def _folders(code: Mapping[str, Any]) -> tuple[str, ...]:
    """Where imports begin: the archive's folders that were on the script's `sys.path`, then the roots."""
    path, roots = code.get("import_path"), code.get("roots")
    known = [*(path if isinstance(path, list) else ()), *(roots if isinstance(roots, dict) else ("",))]
    return tuple(dict.fromkeys(one for one in known if isinstance(one, str)))
