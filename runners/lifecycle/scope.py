"""A part of a workspace under a name of its own: what one phase keeps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torchrelay.jobs.workspace import Workspace


class PhaseScope(MutableMapping[str, Any]):
    """The names of a workspace that begin with a phase's, without that beginning: `total` is `phase1.total`.

    Nothing is held here. Names that are made before the first epoch belong to the checkpoint.
    """

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.name = name
        self._workspace = workspace
        self._begin = f"{name}."

    def __getitem__(self, name: str) -> Any:
        return self._workspace[self._begin + name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._workspace[self._begin + name] = value

    def __delitem__(self, name: str) -> None:
        del self._workspace[self._begin + name]

    def __iter__(self) -> Iterator[str]:
        begin = self._begin
        return iter([name.removeprefix(begin) for name in self._workspace if name.startswith(begin)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"PhaseScope({self.name}: {', '.join(self)})"
