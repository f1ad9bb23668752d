"""`--run ID`: the archived code of a run, in a process of its own, on the unpacked archive."""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import ProgramRun
from torchrelay.runners.experiment.archived_process import captured_code, run_process
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.experiment.scene import Scene


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


def perform_archived(run: ProgramRun, request: Request, epoch: str | None) -> int:
    """The same for a run by its directory alone; raises UsageError where its program was no script."""
    return run_process(run, request.verb, _options(run, request, epoch))


def _options(run: ProgramRun, request: Request, epoch: str | None) -> list[str]:
    words = [*request.paths, "--runs", str(run.path.parent.parent)]
    words += ["--epoch", epoch] if epoch is not None else []
    words += ["--out", request.out] if request.out is not None else []
    words += request.serve.words() if request.serve is not None else []
    flags = (("--overwrite", request.overwrite), ("--retest", request.retest), ("--json", request.json))
    return words + [option for option, on in flags if on]
