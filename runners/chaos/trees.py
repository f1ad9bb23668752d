"""The files of a run, in a directory or in a store: listed, read and changed behind the program's back."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

from torchrelay.checkpoint.storage.urls import is_url, open_file_system


class Tree(Protocol):
    """All files of a run by their paths below it."""

    def paths(self) -> list[str]:
        """All of them, sorted."""

    def read(self, path: str) -> bytes:
        """One whole file."""

    def write(self, path: str, data: bytes) -> None:
        """Put bytes in the place of a file."""


class LocalTree:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self) -> list[str]:
        """See `Tree`."""
        return sorted(str(one.relative_to(self.root)) for one in self.root.rglob("*") if one.is_file())

    def read(self, path: str) -> bytes:
        """See `Tree`."""
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """See `Tree`."""
        (self.root / path).write_bytes(data)


class StoreTree:
    """A prefix of an fsspec file system. Names are as the store has them; ObjectStorage encodes some."""

    def __init__(self, system: Any, root: str) -> None:
        self.system, self.root = system, root

    def paths(self) -> list[str]:
        """See `Tree`."""
        return sorted(str(one)[len(self.root) + 1 :] for one in self.system.find(self.root))

    def read(self, path: str) -> bytes:
        """See `Tree`."""
        return bytes(self.system.cat_file(f"{self.root}/{path}"))

    def write(self, path: str, data: bytes) -> None:
        """See `Tree`."""
        name = f"{self.root}/{path}"
        self.system.makedirs(name.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(name, data)

    def remove(self) -> None:
        """Everything below the prefix, and the prefix."""
        if self.system.exists(self.root):
            self.system.rm(self.root, recursive=True)


@cache
def tree_of(run: str) -> Tree:
    """The files of a run directory or URL."""
    return StoreTree(*open_file_system(run, "the run")) if is_url(run) else LocalTree(Path(run))
