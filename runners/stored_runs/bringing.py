"""Files of a run, brought from its store into a directory of this host, within bounds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import MAX_JSON_BYTES
from torchrelay.records import dataclass
from torchrelay.runners.stored_runs.run_files import Listed, RunFiles
from torchrelay.runners.stored_runs.run_names import never_changes

MOST_BYTES = 256 << 20
"""Of one file; longer ones stay where they are, and that is said."""
IN_ALL_BYTES = 4 << 30
_SHOWN = 60

Keep = Callable[[str, Path, Path], bool]
"""Whether the file of this name that lies here stays, given it and the one that was brought."""


@dataclass
class Brought:
    """What was brought: the version of each name. `left_out` says of others why they were not."""

    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def found_in(files: RunFiles, wanted: Callable[[str], bool]) -> tuple[dict[str, Listed], dict[str, str]]:
    """The wanted files of a run by their names, and what is left out of them, with the reason."""
    found: dict[str, Listed] = {}
    left_out: dict[str, str] = {}
    total = 0
    # A folder is looked into where a file in it may be wanted.
    for name, one in files.walk(lambda folder: wanted(f"{folder}/any.csv")):
        if one.version == "odd":
            left_out[printable(name)] = "its name could be no file's here"
        elif one.link and wanted(name):
            left_out[printable(name)] = "it is a link or no regular file"
        elif wanted(name):
            most = limit_of(name)
            if one.size > most and not name.endswith(".json"):
                left_out[printable(name)] = f"it has {one.size:,} bytes, more than {most:,}"
            elif total + min(one.size, most) > IN_ALL_BYTES:
                left_out[printable(name)] = "the files of the run are too large together"
            else:
                total += min(one.size, most)
                found[name] = one
    return found, left_out


def unlisted(files: RunFiles, names: Collection[str]) -> dict[str, Listed]:
    """Those of some names that are there all the same: a listing may lag behind what was written."""
    there = {name: files.stat(name) for name in names}
    return {name: Listed(name, folder=False, size=size) for name, size in there.items() if size is not None}


def limit_of(name: str) -> int:
    """How much is brought of a file. Of a note that is too long the reader shall see that it is."""
    return MAX_JSON_BYTES + 1 if name.endswith(".json") else MOST_BYTES


def bring(files: RunFiles, found: Mapping[str, Listed], into: Path, keep: Keep | None = None) -> Brought:
    """Bring what was found into a directory, each file whole or not at all; links there are never followed.

    A file that is gone meanwhile is left out. Raises StorageError, and UsageError for a link in the way.
    """
    brought = Brought()

    def one(name: str) -> None:
        target = place_for(into, name)
        if never_changes(name) and not target.is_symlink() and _size(target) == found[name].size:
            brought.versions[name] = found[name].version
            return
        temporary = into / f".tmp-{secrets.token_hex(6)}"
        try:
            with open(temporary, "xb") as file:
                files.copy_into(name, file, limit_of(name))
            if keep is None or not keep(name, target, temporary):
                temporary.replace(target)
            brought.versions[name] = found[name].version
        except FileNotFoundError:
            brought.left_out[printable(name)] = "it was deleted meanwhile"
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror}; free some space") from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    files.each(one, list(found))
    return brought


def place_for(root: Path, name: str) -> Path:
    """Where a file of this name belongs; its folders are made. UsageError for a link on the way."""
    path = root
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UsageError(f"{path} is a link or a file where a folder of the run belongs: remove it")
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {path}: {error.strerror}") from error
    return root / name


def printable(name: str) -> str:
    """A name of a listing as anybody can print it, cut where it is long."""
    return name.encode("unicode_escape").decode()[:_SHOWN]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
