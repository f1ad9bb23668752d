"""A text file of lines that grows at its end, and is replaced whole where it must shrink."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.metadata.files import append_bytes, open_regular, write_new


def read_whole_lines(path: Path) -> list[str]:
    """The lines without their ends; one that a crash tore off is left out, no file is no line.

    Raises StorageError where the file cannot be read or is no text.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
        return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; move it away, it is written anew") from error


def foreign(path: Path, begins: str) -> bool:
    """Whether the file holds something that does not begin so: somebody else's, which is never written over.

    Raises StorageError where it cannot be read.
    """
    try:
        with open_regular(path) as file:
            found = file.read(len(begins))
        return found != begins.encode()[: len(found)]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; give another file") from error


def append_text(path: Path, text: str) -> None:
    """Append by one write; raises StorageError."""
    try:
        append_bytes(path, text.encode())
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror}") from error


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file: old or new after a crash, never torn; raises StorageError."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(temporary, "".join(f"{line}\n" for line in lines).encode(), durable=True)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
