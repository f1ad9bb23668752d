"""The script of this process, and where its source lies; nothing in a notebook, a prompt or a test runner."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from torchrelay.metadata.code.sources import Root
from torchrelay.records import dataclass

_OWN = [
    Path(__file__).resolve().parents[2] / room
    for room in ("jobs", "checkpoint", "runners", "metadata", "src/torchrelay")
]
"""This package's own programs, wherever it lies."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_TOO_WIDE = 1
"""Directories with so few parts are nobody's project."""


@dataclass(frozen=True)
class Script:
    """A program file and the directory that its imports begin in."""

    root: Root
    name: str


def main_script() -> Script | None:
    """The file that Python was started with, where it is a user's; for `-m a.b` the directory of `a`."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not isinstance(file, str):
        return None
    path = Path(file).resolve()
    if not path.is_file() or _is_installed(path):
        return None
    depth = spec.name.count(".") if spec is not None else 0
    if depth >= len(path.parents):
        return None
    folder = path.parents[depth]
    name = path.relative_to(folder).as_posix()
    return Script(Root("", folder, (name,) if _is_nobodys(folder) else None), name)


def _is_nobodys(folder: Path) -> bool:
    """Home, a file system's top and the folder for temporary files hold much that is no source of one run."""
    return len(folder.parts) <= _TOO_WIDE or folder in (_home(), Path(tempfile.gettempdir()).resolve())


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None


def _is_installed(path: Path) -> bool:
    """Programs that came with an installation, such as test runners."""
    of_others = not _PACKAGES.isdisjoint(path.parts)  # also of an environment that is not this one
    return of_others or any(path.is_relative_to(place) for place in (*_installations(), *_OWN))


@cache
def _installations() -> tuple[Path, ...]:
    """Where this interpreter has its modules and programs."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return tuple(Path(place).resolve() for place in places if place)
