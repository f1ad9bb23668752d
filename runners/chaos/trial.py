"""What a trial needs of the place of its run: a directory (`scenarios`) or a prefix of a store (`stored`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchrelay.runners.chaos.calls import Call
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.forks import Order
from torchrelay.runners.chaos.plan import PlanFile

if TYPE_CHECKING:
    from torchrelay.runners.chaos.scenarios import Scenario


class Struck(Protocol):
    """What became of a fault."""

    @property
    def fired(self) -> int:
        """How often it happened."""

    @property
    def struck(self) -> str:
        """The first call that it happened to: its sort and its path."""


class Trial(Protocol):
    """A copy of a prepared run, for one trial."""

    @property
    def scenario(self) -> Scenario:
        """The moment that it is in."""

    @property
    def place(self) -> str:
        """The run directory or URL, as errors must name it."""

    @property
    def oracle(self) -> Path:
        """The local file of what was acknowledged."""

    def struck(self, plan: PlanFile, fault: Fault, limit_secs: float) -> tuple[Order, Struck]:
        """The order to continue the run with a fault, and what will be known of that."""

    def undisturbed(self, limit_secs: float) -> Order:
        """The order to continue the run."""

    def check(self, limit_secs: float) -> Order:
        """The order to prove what is there, and to go on."""

    def may_be_silent(self, fault: Fault, struck: str) -> bool:
        """Whether what was struck loses nothing, so that nobody need hear of it."""

    def keep(self, where: Path) -> None:
        """Leave what is there in a local directory."""

    def remove(self) -> None:
        """Delete it."""


class Ready(Protocol):
    """A scenario ready to be copied."""

    @property
    def scenario(self) -> Scenario:
        """The moment that it is in."""

    @property
    def calls(self) -> Sequence[Call]:
        """The calls of an undisturbed continuation."""

    @property
    def reads(self) -> Sequence[Call]:
        """The same, reads of files included."""

    def copy(self, where: Path) -> Trial:
        """A copy for one trial, which may use `where` and what lies beside it under longer names."""

    def files(self) -> Sequence[tuple[str, int]]:
        """The files of its checkpoints that are not empty, sorted: path and bytes."""
