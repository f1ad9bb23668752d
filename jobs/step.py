"""Steps: the functions that tasks run, and how they are called.

A step takes nothing, a workspace (a parameter named `ws` or `workspace`), or a context (any other
name, usually `ctx`). Only a parameter without a default is filled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torchrelay.errors import UsageError

Step = Callable[..., Any]
CallStyle = Literal["nothing", "workspace", "context"]

_WORKSPACE_NAMES = ("ws", "workspace")
_FILLABLE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def call_style(step: Step) -> CallStyle:
    """Return what `step` takes; raises UsageError with the remedy where it cannot be a step."""
    parameter = _open_parameter(step)
    if parameter is None:
        return "nothing"
    return "workspace" if parameter.name in _WORKSPACE_NAMES else "context"


def invoke(step: Step, workspace: Any, ctx: Any) -> Any:
    """Call `step` with what it takes and return its result."""
    parameter = _open_parameter(step)
    if parameter is None:
        return step()
    argument = workspace if parameter.name in _WORKSPACE_NAMES else ctx
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        return step(**{parameter.name: argument})
    return step(argument)


def step_name(step: Step) -> str | None:
    """Return the name of the function under `step`; None for a lambda or an object without one."""
    name = getattr(getattr(step, "func", step), "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else None


def _open_parameter(step: Step) -> inspect.Parameter | None:
    if not callable(step) or isinstance(step, type):
        raise UsageError(f"{step!r} is no step: give a function, such as `lambda ctx: ...`")
    if any(kind(step) for kind in _LAZY_KINDS):
        raise UsageError(f"{_described(step)} is async or a generator, so a call would not run it: use a def")
    open_ones = [p for p in _parameters(step) if p.kind in _FILLABLE and p.default is p.empty]
    if len(open_ones) > 1:
        raise UsageError(
            f"{_described(step)} takes {', '.join(p.name for p in open_ones)}; a step takes nothing, `ws` or "
            "`ctx`: give the other parameters values with functools.partial or defaults"
        )
    return open_ones[0] if open_ones else None


_LAZY_KINDS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _parameters(step: Step) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(
            f"{_described(step)} does not say what it takes: wrap it, such as `lambda ctx: ...`"
        ) from None


def _described(step: Step) -> str:
    name = step_name(step)
    return f"step {name!r}" if name else f"step {step!r}"
