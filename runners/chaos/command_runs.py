"""One run of the user's command under a plan, and what the storage was told to keep.

The oracle is the library's own log of calls: a record of the checkpoint log counts as acknowledged once its
name was linked and its directory synced after that, whatever the program says about it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos.calls import Call, read_calls
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.library import library
from torchrelay.runners.chaos.plan import VARIABLE, PlanFile
from torchrelay.runners.chaos.stillness import await_stillness, members

PLACE = "{run}"
_RECORD = re.compile(r"(?:checkpoints/)?log/([0-9]{20})\.json")
_LOG = re.compile(r"(?:checkpoints/)?log")
_POLL_SECS = 0.01
_TAIL = 600


@dataclass(frozen=True)
class Done:
    """How a command ended: its code (negative: a signal), what it printed, the calls it made."""

    code: int
    output: str
    calls: tuple[Call, ...]
    fired: int
    struck: str
    late: bool

    @property
    def tail(self) -> str:
        """The end of what it printed, in one line."""
        return " | ".join(self.output.strip().splitlines())[-_TAIL:]


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError unless the command says where its run goes."""
    if not any(PLACE in word for word in words):
        raise UsageError(
            f"the command must train into {PLACE}, which every trial replaces by a fresh directory: "
            f"torchrelay chaos -- python train.py --run {PLACE}"
        )


def run_command(
    words: Sequence[str], run: Path, home: Path, fault: Fault | None, limit_secs: float,
    *, standing: Callable[[], object] | None = None,
) -> Done:  # fmt: skip
    """Run the command with `run` in the place of `{run}`; the library counts, and strikes.

    `standing` is called while a call stands still in a pause; the command is killed after that.
    """
    plan, log, output = PlanFile(home / "plan"), home / "calls", home / "output"
    log.unlink(missing_ok=True)
    plan.arm(run, fault, log=log)
    preload = ":".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD", "")]))
    environment = {**os.environ, "LD_PRELOAD": preload, VARIABLE: str(plan.path)}
    with open(output, "wb") as file:
        process = subprocess.Popen(  # noqa: S603 - the user asked for exactly this
            [word.replace(PLACE, str(run)) for word in words], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            late = _wait(process, plan, limit_secs, standing)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    text = output.read_text(errors="replace")
    done = Done(process.returncode, text, read_calls(log, run), plan.fired, plan.struck, late)
    plan.close()
    return done


def _wait(
    process: subprocess.Popen[bytes], plan: PlanFile, limit_secs: float, standing: Callable[[], object] | None
) -> bool:
    """Wait for the end; whether it did not come in time."""
    until = time.monotonic() + limit_secs
    while process.poll() is None:
        if time.monotonic() > until:
            return True
        if standing is not None and plan.paused:
            os.killpg(process.pid, signal.SIGSTOP)
            for pid in members(process.pid):
                await_stillness(pid, until - time.monotonic())
            standing()
            return False
        time.sleep(_POLL_SECS)
    return False


def durable_slots(calls: Sequence[Call]) -> set[int]:
    """The log records that were linked and whose directory was synced afterwards, by slot."""
    linked: set[int] = set()
    durable: set[int] = set()
    for call in calls:
        found = _RECORD.fullmatch(call.path)
        if call.error or call.result < 0:
            continue
        if found and call.kind == "link":
            linked.add(int(found[1]))
        elif call.kind == "sync" and _LOG.fullmatch(call.path):
            durable |= linked
    return durable
