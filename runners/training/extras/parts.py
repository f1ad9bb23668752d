"""Parts that most runs do not have: what a run does not use is not imported, so that it begins sooner."""

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
    """Stands for such a part: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_ABSENT: Any = _Absent()


def recorder_of(recipes: Mapping[str, Recipe], run: RunDirectory | None, journal: Journal) -> Recorder:
    """Records calls of modules, for `verify --replay`."""
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
    """Make ONNX files of epochs, one for each that is wanted."""
    if not wanted:
        return ()
    from torchrelay.runners.training.extras.onnx_export import Exporting

    return [Exporting(one, session, state, journal, best) for one in wanted]


def stored_run_of(
    run: RunDirectory | None, session: SessionBase, state: RunState, journal: Journal, manager: Manager | None
) -> StoredRun:
    """Brings a run of a store down, and puts it up behind the training."""
    if run is None or run.url is None or manager is None:
        return _ABSENT  # type: ignore[no-any-return]
    from torchrelay.runners.training.extras.remote_run import StoredRun

    return StoredRun(run, session, state, journal, manager)
