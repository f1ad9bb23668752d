"""From what users write, `"csv"` or `"mlflow:sqlite:///mlflow.db"`, to sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.sinks.base import MetricSink
from torchrelay.metadata.sinks.text import CsvSink, JsonlSink
from torchrelay.metadata.sinks.trackers import MlflowSink, TensorBoardSink, WandbSink

GROUP = "torchrelay.sinks"
"""The entry points of packages that offer sinks: callables of the text behind the colon, or of nothing."""
_BUILT_IN: dict[str, Callable[..., MetricSink]] = {
    "csv": CsvSink,
    "jsonl": JsonlSink,
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
}
_NEEDS = {
    "tensorboard": ("tensorboard", "trackers"),
    "mlflow": ("mlflow", "trackers"),
    "wandb": ("wandb", "wandb"),
}
"""The module that a tracker needs, and our extra that brings it."""
_METHODS = ("open", "log", "rewind", "close")


def sinks_of(trackers: Iterable[Any]) -> tuple[MetricSink, ...]:
    """The sinks that a list of names and objects means; creates no file.

    Raises UsageError for an unknown name, a package that is not installed, a thing that is no sink, and
    for two built-in sinks of one name, which would write into one file.
    """
    if isinstance(trackers, (str, bytes)) or not isinstance(trackers, Iterable):
        raise UsageError(f"trackers is {trackers!r:.80}; give a list, for example ['csv', 'tensorboard']")
    given = list(trackers)
    twice = next((one for one in given if isinstance(one, str) and given.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"trackers has {twice!r} twice: both would write to the same place")
    return tuple(_sink(one) for one in given)


def _sink(wanted: Any) -> MetricSink:
    if isinstance(wanted, str):
        name, _, rest = wanted.partition(":")
        return _named(name, [rest] if rest else [])
    missing = [name for name in _METHODS if not callable(getattr(wanted, name, None))]
    if missing or isinstance(wanted, type):
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is a class, give an object"
        raise UsageError(f"{wanted!r:.80} is no tracker: {lacks} (torchrelay.MetricSink says what one has)")
    found: MetricSink = wanted
    return found


def _named(name: str, rest: list[str]) -> MetricSink:
    if name in _BUILT_IN:
        _check_installed(name)
        return _BUILT_IN[name](*rest)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        known = sorted({*_BUILT_IN, *offered})
        meant = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, known, n=1))
        raise UsageError(f"there is no tracker {name!r:.80}; there are {', '.join(known)}{meant}")
    return _from_package(offered[name], rest)


def _check_installed(name: str) -> None:
    module, extra = _NEEDS.get(name, ("json", ""))
    if find_spec(module) is None:
        raise UsageError(f"the tracker {name!r} needs {module}: pip install 'torchrelay[{extra}]'")


def _from_package(point: EntryPoint, rest: list[str]) -> MetricSink:
    try:
        made = point.load()(*rest)
    except Exception as error:
        raise UsageError(f"the tracker {point.name!r} ({point.value}) cannot be made: {error}") from error
    return _sink(made)
