"""The directory of one launch: its files, and below it a directory per attempt. No two launches share one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.runners.launch.request import LaunchFile

_MOST = 1_000_000


def next_directory(logs: Path, name: str) -> Path:
    """The directory that a launch of this name would get now: `NAME.0`, `NAME.1`, ... Makes nothing."""
    taken = {path.name for path in logs.iterdir()} if logs.is_dir() else set()
    free = (number for number in range(_MOST) if f"{name}.{number}" not in taken)
    return logs / f"{name}.{next(free)}"


def make_directory(logs: Path, name: str) -> Path:
    """Make the next directory and return it; of two launches at the same time each gets its own."""
    while True:
        found = next_directory(logs, name)
        try:
            found.parent.mkdir(parents=True, exist_ok=True)
            found.mkdir()
        except FileExistsError:
            if not found.exists() or not logs.is_dir():
                raise
        except OSError as error:
            raise StorageError(
                f"cannot make {found} for the files of this launch: {error.strerror}"
            ) from error
        else:
            return found


def write_files(files: Sequence[LaunchFile], directory: Path) -> None:
    """Write them below the directory of the launch, as they would be printed."""
    (directory / ".gitignore").write_text("*\n")  # logs are no source of the run
    for one in files:
        path = directory / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text)
        path.chmod(0o755 if one.executable else 0o644)
