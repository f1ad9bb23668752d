"""The verbs on a configuration alone: `torchrelay train|test|eval|status|amend -m config.yaml`."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchrelay.runners.configured.archived import run_archived, source_told
from torchrelay.runners.configured.evaluation import evaluate
from torchrelay.runners.configured.scene import ConfiguredScene
from torchrelay.runners.configured.testing import test
from torchrelay.runners.configured.training import train
from torchrelay.runners.experiment.amend_verb import amend
from torchrelay.runners.experiment.archived_process import MARK
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.experiment.status_verb import status

_VERBS: dict[str, Callable[[ConfiguredScene], int]] = {
    "train": train,
    "test": test,
    "eval": evaluate,
    "status": status,
    "amend": amend,
}
_ON_ONE_RANK = ("status", "amend")
_WITH_ARCHIVED_CODE = ("test", "eval")


def perform(request: Request) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    archived, source = os.environ.pop(MARK, None), source_told()
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    scene = ConfiguredScene(request, archived, source)
    if request.run_id is not None and archived is None and request.verb in _WITH_ARCHIVED_CODE:
        code = run_archived(scene)
        if code is not None:
            return code
    return _VERBS[request.verb](scene)
