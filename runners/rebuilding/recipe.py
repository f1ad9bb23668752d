"""How a model is made anew from what a run has archived: by a function, a class of a program, a phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any, Literal

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

Kind = Literal["function", "program", "phase"]
_MAIN = "__main__"


@dataclass(frozen=True)
class Recipe:
    """By whom a model is made.

    `function`: `name` in `module`, which takes nothing; `program`: a class there; `phase`: the phase `name`
    of the configuration, in the runner that `module` names.
    """

    kind: Kind
    module: str
    name: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Recipe:
        """Back; UsageError for anything else."""
        match found:
            case {"kind": ("function" | "program" | "phase") as kind, "module": str(one), "name": str(name)}:
                return cls(kind, one, name)
        raise UsageError(f"nothing says how a model is made: {str(found)[:100]}")

    def in_archive(self, script: str | None) -> str:
        """The name of the module in the archive, whose script is `script`; UsageError where it has none."""
        if self.module != _MAIN:
            return self.module
        if script is None:
            raise UsageError("the script that made the model is not in the archive of the source")
        return PurePosixPath(script).stem


def recipes_of(given: Any) -> dict[str, Recipe]:
    """What JobRunner is told as `replay`; raises UsageError for what cannot be made anew elsewhere."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f'replay is {given!r:.80}; name blobs and what makes them, {{"model": make_model}}')
    return {str(blob): _recipe(blob, make) for blob, make in given.items()}


def _recipe(blob: Any, make: Recipe | Callable[[], Any]) -> Recipe:
    if isinstance(make, Recipe):
        return make
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if not callable(make) or not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise UsageError(
            f"replay[{blob!r}] is {make!r:.80}; give a function or class of a file, which is called with "
            "nothing and makes the module: it is found again by its name"
        )
    return Recipe("function", module, name)
