"""Optional parts of runs: modules of unused parts are not imported, so that runs start faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrelay.checkpoint.manager.base import Manager
    from torchrelay.metadata.run_directory import RunDirectory
    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.session.run_state import RunState
    from torchrelay.runners.training.extras.onnx_export import Exporting, OnnxExport
    from torchrelay.runners.training.extras.remote_run import StoredRun
    from torchrelay.runners.training.extras.replay import Recorder
    from torchrelay.runners.training.journal import Journal
    from torchrelay.runners.training.plan import Recipe


class _Absent:
    """Placeholder of an unused part: all its methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_ABSENT: Any = _Absent()


def recorder_of(recipes: Mapping[str, Recipe], run: RunDirectory | None, journal: Journal) -> Recorder:
    """Create the recorder of calls for `verify --replay`, if used."""
    if not recipes:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.training.extras.replay import Recorder

    return Recorder(recipes, run, journal)


def exporting_of(
    wanted: Sequence[OnnxExport],
    session: SessionBase,
    state: RunState,
    journal: Journal,
    best: tuple[str, str] | None,
) -> Sequence[Exporting]:
    """Create an exporter for each requested ONNX export."""
    if not wanted:
        return ()
    from torchrelay.runners.training.extras.onnx_export import Exporting

    return [Exporting(one, session, state, journal, best) for one in wanted]


def stored_run_of(
    run: RunDirectory | None, session: SessionBase, state: RunState, journal: Journal, manager: Manager | None
) -> StoredRun:
    """Create the uploads and downloads of a remote run, if it is one."""
    if run is None or run.url is None or manager is None:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.training.extras.remote_run import StoredRun

    return StoredRun(run, session, state, journal, manager)
