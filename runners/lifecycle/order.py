"""The five steps of a profile, their names, and which comes next. Pure.

setup (Instance) -> build (Network) -> start (Startup) -> loop (Runner) -> finish (Terminal) -> end
"""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

END = "end"
"""The status behind the last step."""


@dataclass(frozen=True)
class StepName:
    """A step: its `name` is the method and the status, `class_name` what a file must define.

    `older` is the method in which PaddleRec's steps do the same, `state` the status by which its steps go
    to this one.
    """

    name: str
    class_name: str
    older: str
    state: str

    @property
    def key(self) -> str:
        """The key of a runner that replaces it."""
        return f"{self.class_name.lower()}_class_path"


STEPS = (
    StepName("setup", "Instance", "instance", "instance_pass"),
    StepName("build", "Network", "build_network", "network_pass"),
    StepName("start", "Startup", "startup", "startup_pass"),
    StepName("loop", "Runner", "run", "train_pass"),
    StepName("finish", "Terminal", "terminal", "terminal_pass"),
)
LAST_OF_START_UP = "start"
LEGAL = (*(one.name for one in STEPS), END)
_ALSO = {one.state: one.name for one in STEPS} | {"infer_pass": "loop"}


def status_of(given: object) -> str:
    """The status that is meant; PaddleRec's `*_pass` names mean the same steps. UsageError for others."""
    if isinstance(given, str) and given in (*LEGAL, *_ALSO):
        return _ALSO.get(given, given)
    raise UsageError(
        f"context['status'] = {given!r:.80} is no step; legal are {', '.join(LEGAL)} "
        f"(and PaddleRec's {', '.join(_ALSO)})"
    )


def after(name: str) -> str:
    """The status behind a step that asked for none."""
    return LEGAL[LEGAL.index(name) + 1]


def step_named(name: str) -> StepName:
    """The step of a status other than `end`."""
    return STEPS[LEGAL.index(name)]
