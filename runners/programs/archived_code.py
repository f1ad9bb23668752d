"""`--run ID`: the archived code of a run, in a process of its own, on the unpacked archive. Without torch.

Without torch: whoever starts such a process only waits for it.

Classes are those of the archive, unpacked; data lie where they lay, and results go where they went.
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
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.experiments import ProgramRun

if TYPE_CHECKING:
    from torchrelay.runners.programs.command_context import ConfiguredScene
    from torchrelay.runners.programs.program import Scene
    from torchrelay.runners.programs.request import VerbRequest


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


def run_archived(scene: Scene) -> int | None:
    """Run the verb by the archived code and return its exit code; None where the code is today's.

    Raises UsageError for a run whose source was not archived.
    """
    run = scene.store.find(scene.request.run_id or "")
    if scene.request.config is not None:
        raise UsageError("--run has the configuration of its run: leave -m out")
    captured_code(run)
    if run.note.identity.same(scene.identity):
        return None
    target = f"{scene.program.__module__}:{scene.program.__qualname__}"
    words = _options(run, scene.request, scene.request.epoch)
    return run_process(run, scene.request.verb, words, target)


def perform_archived(run: ProgramRun, request: VerbRequest, epoch: str | None) -> int:
    """The same for a run by its directory alone; raises UsageError where its program was no script."""
    return run_process(run, request.verb, _options(run, request, epoch))


def _options(run: ProgramRun, request: VerbRequest, epoch: str | None) -> list[str]:
    words = [*request.paths, "--runs", str(run.path.parent.parent)]
    words += ["--epoch", epoch] if epoch is not None else []
    words += ["--out", request.out] if request.out is not None else []
    words += request.serve.words() if request.serve is not None else []
    flags = (("--overwrite", request.overwrite), ("--retest", request.retest), ("--json", request.json))
    return words + [option for option, on in flags if on]


SOURCE = "TORCHRELAY_ARCHIVED_SOURCE"
"""Tells that process where the archive is unpacked; taken out of its environment at once."""


def run_archived_configuration(scene: ConfiguredScene) -> int | None:
    """Run the verb by the archived code and return its exit code; None where all is as it was.

    Raises UsageError for a run whose source or configuration was not archived.
    """
    run = scene.store.find(scene.request.run_id or "")
    if scene.request.overrides:
        raise UsageError("--run has the configuration of its run: leave -o out")
    captured = captured_code(run)
    folder, workspace = captured.get("config"), (captured["code"].get("roots") or {}).get("")
    if not (isinstance(folder, str) and isinstance(workspace, str)):
        raise UsageError(f"the configuration of {run.id} was not recorded, so it cannot be run")
    if scene.identity_of(run).same(scene.identity):
        return None
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        command = [
            sys.executable, "-m", "torchrelay", scene.request.verb, *scene.request.paths,
            "-m", str(run.path / folder / RESOLVED), "-o", f"workspace={workspace!r}",
            *_options_of_configuration(scene, run),
        ]  # fmt: skip
        environment: dict[str, Any] = environment_of(run, captured["code"], source)
        return subprocess.run(  # noqa: S603 - our own words
            command, env={**environment, SOURCE: str(source)}, check=False
        ).returncode


def source_told() -> Path | None:
    """Where the archived source lies that this process is to run."""
    text = os.environ.pop(SOURCE, None)
    return None if text is None else Path(text)


def _options_of_configuration(scene: ConfiguredScene, run: ProgramRun) -> list[str]:
    request = scene.request
    words = ["--runs", str(run.path.parent)]
    words += ["--epoch", request.epoch] if request.epoch is not None else []
    return words + [option for option, on in (("--retest", request.retest), ("--json", request.json)) if on]
