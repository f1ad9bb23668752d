"""An object with a state of its own, for tests of what a load makes of it."""

from __future__ import annotations

from typing import Any


class Keeps:
    """An object that has whatever state it was given."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)
