"""Parts that most runs do not have: what a run does not use is not imported, so that it begins sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrelay.runners.job_runner import JobRunner
    from torchrelay.runners.life import Life
    from torchrelay.runners.onnx_files.exporting import Exporting
    from torchrelay.runners.replay.recorder import Recorder
    from torchrelay.runners.stored_runs.stored_run import StoredRun


class _Absent:
    """Stands for such a part: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_ABSENT: Any = _Absent()


def recorder_of(runner: JobRunner, life: Life) -> Recorder:
    """Records calls of modules, for `verify --replay`."""
    if not runner.replay:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.replay.recorder import Recorder

    return Recorder(runner.replay, runner.run_directory, life.journal)


def exporting_of(runner: JobRunner, life: Life) -> Exporting:
    """Makes ONNX files of epochs."""
    if not runner.exports:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.onnx_files.exporting import Exporting

    return Exporting(life, runner.exports)


def stored_run_of(life: Life) -> StoredRun:
    """Brings a run of a store down, and puts it up behind the training."""
    if life.run_directory is None or life.run_directory.url is None:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.stored_runs.stored_run import StoredRun

    return StoredRun(life)
