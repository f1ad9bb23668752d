"""One profile: its five steps in order, or as a step jumps, each a class of torchrelay's or of the user's."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from torchrelay.errors import RelayError, TaskFailedError, exit_code_of
from torchrelay.records import dataclass
from torchrelay.runners.lifecycle import steps
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.lifecycle.order import END, LAST_OF_START_UP, STEPS, StepName, after, step_named
from torchrelay.runners.lifecycle.user_objects import made

_OWN = f"{Path(__file__).parents[2]}/"


class StepFailedError(RelayError):
    """A step of a profile failed; `__cause__` is why. The message says what did not run because of it."""

    def __init__(self, runner: str, step: StepName, error: BaseException, not_run: Sequence[str]) -> None:
        left = f"; not run: {', '.join(not_run)}" if not_run else ""
        super().__init__(
            f"runner {runner} failed in step {step.name} ({step.class_name}){left}: {_reason(error)}"
        )
        self.exit_code = exit_code_of(error)
        self.runner, self.step, self.not_run = runner, step.name, tuple(not_run)
        self.consequence = getattr(error, "consequence", False)


@dataclass(frozen=True)
class Ran:
    """The steps that a profile ran, in order."""

    steps: tuple[str, ...]


def run_steps(
    context: StepContext,
    not_run: Sequence[str] = (),
    started: Callable[[StepContext], None] = lambda _: None,
) -> Ran:
    """Run the steps from `setup` on; `started` is called when start-up is over, behind the step `start`.

    Raises StepFailedError, naming `not_run`, for what a step, or `started`, raises.
    """
    status, ran = STEPS[0].name, list[str]()
    while status != END:
        step = step_named(status)
        context.pop("status", None)
        try:
            call_step(step, context)
            if step.name == LAST_OF_START_UP:
                started(context)
        except Exception as error:
            raise StepFailedError(context.runner_name, step, error, not_run) from error
        ran.append(step.name)
        status = context.get("status") or after(step.name)
    return Ran(tuple(ran))


def call_step(step: StepName, context: StepContext) -> None:
    """Make the class of a step, the user's or ours, and call its method. Raises what that raises."""
    kind = context.classes.steps.get(step.name) or getattr(steps, step.class_name)
    one = made(kind, context)
    own = getattr(one, step.older, None)
    (own if callable(own) else getattr(one, step.name))(context)


def _reason(error: BaseException) -> str:
    """One line of our own errors, which say what to do; else the traceback from the user's code on."""
    if isinstance(error, TaskFailedError):
        return f"{error}\n{error.details}".rstrip()
    if isinstance(error, RelayError):
        return str(error)
    return f"\n{''.join(traceback.format_exception(type(error), error, _users_part(error))).rstrip()}"


def _users_part(error: BaseException) -> TracebackType | None:
    """The frames from the first one of the user's on; all where there is none."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_OWN):
        step = step.tb_next
    return step or error.__traceback__
