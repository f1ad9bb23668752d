"""`--run ID`: the archived code of a run, in a process of its own, on the unpacked archive."""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.runners.experiment.archived_process import captured_code, run_process
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
    return run_process(run, scene.request.verb, _options(scene), target)


def _options(scene: Scene) -> list[str]:
    request = scene.request
    words = [*request.paths, "--runs", str(scene.store.directory.parent)]
    words += ["--epoch", request.epoch] if request.epoch is not None else []
    words += request.serve.words() if request.serve is not None else []
    return words + [option for option, on in (("--retest", request.retest), ("--json", request.json)) if on]
