"""Objects that are current inside a `with` block: jobs, groups, tasks, nodes, clusters.

Each class has its own stack in each thread; a thread starts with empty stacks. Nothing is ever
created or left on a stack on demand.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, overload

from torchrelay.errors import NotAllowedNowError, UsageError

M = TypeVar("M", bound="Managed")
F = TypeVar("F", bound=Callable[..., Any])

_thread = threading.local()


class Managed:
    """Base of the classes whose instances can be current.

    Entering an instance makes it current for its class and for every managed class above it;
    leaving must happen in the reverse order. As a decorator, an instance is entered around each call.
    """

    @overload
    @classmethod
    def current(cls: type[M], value: M | None = None) -> M: ...

    @overload
    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: Literal[True]) -> M: ...

    @overload
    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: Literal[False]) -> M | None: ...

    @classmethod
    def current(cls: type[M], value: M | None = None, *, required: bool = True) -> M | None:
        """Return `value` if there is one, else the innermost instance of this thread.

        Raises UsageError for a value of another class, and NotAllowedNowError outside any `with`
        block unless `required` is False, which gives None.
        """
        if value is not None:
            return _checked(cls, value)
        stack = _stack(cls)
        if stack:
            return cast(M, stack[-1])
        if not required:
            return None
        raise NotAllowedNowError(
            f"there is no current {cls.__name__} in this thread: do this inside `with {cls.__name__}(...):`"
        )

    def __enter__(self: M) -> M:
        for cls in _managed_classes(type(self)):
            _stack(cls).append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stacks = [_stack(cls) for cls in _managed_classes(type(self))]
        if any(not stack or stack[-1] is not self for stack in stacks):
            raise NotAllowedNowError(
                f"{self!r} is not the innermost {type(self).__name__} of this thread: "
                "leave contexts in the reverse order in which they were entered"
            )
        for stack in stacks:
            stack.pop()

    def __call__(self, function: F) -> F:
        """Wrap `function` so that it runs with this instance current."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(F, inside)


def _stack(cls: type[Managed]) -> list[Managed]:
    stacks: dict[type[Managed], list[Managed]] = _thread.__dict__.setdefault("stacks", {})
    return stacks.setdefault(cls, [])


def _managed_classes(cls: type[Managed]) -> list[type[Managed]]:
    return [base for base in cls.__mro__ if issubclass(base, Managed) and base is not Managed]


def _checked(cls: type[M], value: object) -> M:
    if isinstance(value, cls):
        return value
    raise UsageError(f"expected a {cls.__name__}, got {value!r} of type {type(value).__name__}")
