"""Trials as children of a nursery: what is ordered, and how a child ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Any

import torchrelay
from torchrelay.errors import StorageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos.library import library

KILLED = -9


@dataclass(frozen=True)
class Order:
    """A function to call in a fresh process, and the plan that it is struck by.

    `function` is `package.module:name` or `/a/file.py:name`; what it returns must be JSON.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plan: Path | None = None
    limit_secs: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    ahead: Sequence[str] = ()
    """Functions that the nursery itself looks up before it forks, because finding them takes long."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` as of a shell's wait, -9 for a kill; `late` where the limit ended it."""

    code: int
    late: bool = False
    value: Any = None
    raised: str = ""
    text: str = ""
    trace: str = ""
    modules: Sequence[str] = ()

    @property
    def well(self) -> bool:
        """Whether the function returned."""
        return self.code == 0 and not self.late and not self.raised

    @property
    def killed(self) -> bool:
        """Whether a fault killed it."""
        return self.code == KILLED and not self.late

    @property
    def reason(self) -> str:
        """Why it did not return, in a line."""
        if self.late:
            return "it did not end in time"
        return f"{self.raised}: {self.text}" if self.raised else f"it ended with {self.code}"


class Nursery:
    """A process that forks children; one at a time."""

    def __init__(self, log: Path | None = None) -> None:
        where = str(Path(torchrelay.__file__).parent.parent)
        paths = [where, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        self._log = open(log, "ab") if log else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchrelay.runners.chaos.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
        )  # fmt: skip

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warm(self, order: Order) -> Ended:
        """Carry an order out, and import here whatever it imported there: later children start with it."""
        first = self._run(order, tell_modules=True)
        if not first.well:
            return first
        return self._run(order, modules=list(first.modules))

    def run(self, order: Order) -> Ended:
        """Carry an order out and wait for its end."""
        return self._run(order)

    def begin(self, order: Order, **more: Any) -> int:
        """Start a child; returns its pid. `end` must follow."""
        self._send(order, more)
        told = self._told()
        if "started" not in told:
            raise StorageError(f"the child of a trial did not start: {told.get('text') or told}")
        return int(told["started"])

    def end(self) -> Ended:
        """Wait for the child that was begun."""
        told = self._told()
        told["modules"] = told.get("modules") or ()
        return Ended(**told)

    def close(self) -> None:
        """End the nursery, and the child it may have."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _run(self, order: Order, **more: Any) -> Ended:
        self.begin(order, **more)
        return self.end()

    def _send(self, order: Order, more: Mapping[str, Any]) -> None:
        line = {
            "function": order.function, "arguments": dict(order.arguments), "limit": order.limit_secs,
            "plan": str(order.plan) if order.plan else None, "environment": dict(order.environment),
            "ahead": list(order.ahead), **more,
        }  # fmt: skip
        if self._process.stdin is None:
            raise StorageError("the nursery takes no orders")
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _told(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise StorageError(f"the nursery of the trials ended with {self._process.wait(10)}")
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
