"""A program by the archived source of one of its runs: the command, what surrounds it, and the way it ends.

Without torch: whoever starts such a process only waits for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.experiments import ProgramRun

MARK = "TORCHRELAY_ARCHIVED"
"""Tells the process on the archive whose run it works for; taken out of its environment at once."""
RESOLVED = "resolved.yaml"


def run_process(run: ProgramRun, verb: str, words: Sequence[str], target: str | None = None) -> int:
    """Run a verb by the archived code of a run; returns its exit code.

    `target` is `module:Class`, needed where the program was no script. Raises UsageError for a run whose
    source was not archived.
    """
    captured = captured_code(run)
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        command = [sys.executable, *_program(run, captured, verb, source, target), *words]
        command += _configuration(run, captured)
        return _waited(command, environment_of(run, captured["code"], source))


def captured_code(run: ProgramRun) -> dict[str, Any]:
    """The record of the code that the run is of now."""
    found = [one for one in captures(run.path) if code_id_of(one) == run.note.code_id]
    if run.note.code_id is None or not found:
        raise UsageError(f"the source of {run.id} was not archived, so it cannot be run")
    return found[-1]


def _program(
    run: ProgramRun, captured: Mapping[str, Any], verb: str, source: Path, target: str | None
) -> list[str]:
    """The script in the archive, or the module by the command line."""
    script = captured["code"].get("script")
    if isinstance(script, str):
        return [str(source / script), verb]
    if target is None:
        raise UsageError(
            f"the program of {run.id} was no script: name it, torchrelay {verb} module:Class --run {run.id}"
        )
    return ["-m", "torchrelay", verb, target]


def _configuration(run: ProgramRun, captured: Mapping[str, Any]) -> list[str]:
    folder = captured.get("config")
    if isinstance(folder, str) and run.note.config_id is not None:
        return ["-m", str(run.path / folder / RESOLVED)]
    return []


def environment_of(run: ProgramRun, code: Mapping[str, Any], source: Path) -> dict[str, str]:
    """With the archive's own folders before all others in which modules are looked for."""
    folders = code.get("import_path")
    first = [str(source / one) for one in (folders if isinstance(folders, list) else [""])]
    before = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return {
        **os.environ,
        MARK: str(run.path),
        "PYTHONPATH": os.pathsep.join([*first, *before]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _waited(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a process that is told of this one's SIGTERM."""
    process = subprocess.Popen(command, env=dict(environment))  # noqa: S603 - the user's own program, as it was
    with _passing_on(process.send_signal):
        try:
            return process.wait()
        except KeyboardInterrupt:  # Ctrl-C reaches both: it has its time to leave
            return process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def _passing_on(send: Callable[[int], None]) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    try:
        before = signal.signal(signal.SIGTERM, pass_on)
    except ValueError:  # not the main thread, which handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
