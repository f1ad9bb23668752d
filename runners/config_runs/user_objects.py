"""Create models, readers and optimizers from the user's classes; read PaddleRec's slot files.

`sparse_slots` names slots of integers, `dense_slots` slots of floats with their sizes, `wide:2` or
`image:[2,3]`. A sample is a dict of tensors by slot; other slots are ignored.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.config.schema import Dataset, Optimizer
from torchrelay.jobs.config.tree import hint


class ReaderFailedError(RelayError):
    """The user's reader raised; the message has file, line and traceback."""


def made(kind: type, argument: Any) -> Any:
    """Create an object of a user class, with the argument or without any."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return kind()
    takes = any(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters
    )
    return kind(argument) if takes else kind()


def made_model(kind: type, hyper_parameters: Mapping[str, Any], *, train: bool, what: str) -> nn.Module:
    """Create a model; raises UsageError unless it is a Module with a `loss` method if it trains."""
    model = made(kind, hyper_parameters)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what}: class {kind.__name__} is not a torch.nn.Module: it makes {model!r:.60}")
    if train and not callable(getattr(model, "loss", None)):
        raise UsageError(
            f"{what}: class {kind.__name__} has no method loss(self, outputs, batch), which training needs"
        )
    return model


def made_dataset(reader: Any, dataset: Dataset) -> Any:
    """Return the samples: the reader if it has `__getitem__`, else what it reads from each file in order.

    A directory in `data_path` stands for its files, sorted by name. Raises UsageError for missing files, no
    samples, and a reader without either interface.
    """
    own = f"dataset.{dataset.name}"
    if isinstance(reader, (torch.Tensor, TensorDataset, tuple, list)):
        return reader  # such readers supply whole batches
    if hasattr(reader, "__getitem__") and hasattr(reader, "__len__"):
        return reader
    if not callable(getattr(reader, "read", None)):
        raise UsageError(
            f"{own}: class {type(reader).__name__} needs a method read(self, path) that yields the samples "
            "of a file, or __len__ and __getitem__"
        )
    samples = list[Any]()
    for path in _files(dataset):
        before = len(samples)
        try:
            samples.extend(reader.read(path))
        except RelayError:
            raise
        except Exception as error:
            line = _line_read(error, path, len(samples) - before)
            place = f"after {len(samples) - before} samples" if line is None else f"line {line}"
            raise _failed(own, f"in {path}, {place}", error) from error
    if not samples:
        files = ", ".join(dataset.data_path) or "no file"
        raise UsageError(f"{own}: the reader found no sample in {files}")
    return samples


def sample_error(dataset: Dataset, index: int, error: Exception) -> Exception:
    """Return an error that names the sample at which a reader failed, with file and line if known."""
    if isinstance(error, RelayError):
        return error
    place = f"at sample {index}"
    with suppress(UsageError):  # missing files are skipped
        for path in _files(dataset):
            if (line := _line_read(error, path, None)) is not None:
                place = f"at sample {index}, in {path}, line {line}"
                break
    return _failed(f"dataset.{dataset.name}", place, error)


def _failed(key: str, place: str, error: Exception) -> ReaderFailedError:
    """Make a ReaderFailedError with the traceback of the user's frames."""
    trace = "".join(traceback.format_exception(type(error), error, _behind_here(error))).rstrip()
    return ReaderFailedError(f"{key}: the reader failed {place}:\n{trace}")


def _line_read(error: Exception, path: str, samples: int | None) -> int | None:
    """Return the line that a reader failed at: the last line of the file that its frames hold.

    A repeated line counts as the first one after `samples` lines, or not at all if `samples` is None.
    """
    held = set[Any]()
    for frame, _ in traceback.walk_tb(_behind_here(error)):
        held.update(one.rstrip("\r\n") for one in frame.f_locals.values() if isinstance(one, str))
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, list[int]] = {}
            for at, line in enumerate(file, 1):
                if line.strip() and (text := line.rstrip("\r\n")) in held:
                    found.setdefault(text, []).append(at)
    except (OSError, UnicodeError):
        return None
    if samples is None:
        lines = [places[0] for places in found.values() if len(places) == 1]
    else:
        lines = [first for places in found.values() for first in [at for at in places if at > samples][:1]]
    return max(lines, default=None)


def _behind_here(error: Exception) -> TracebackType | None:
    """Return the traceback that begins in the user's reader."""
    return None if error.__traceback__ is None else error.__traceback__.tb_next


def _files(dataset: Dataset) -> list[str]:
    """List the files of a dataset, with directories expanded."""
    found: list[str] = []
    for text in dataset.data_path:
        path = Path(text)
        if "://" not in text and not path.exists():
            raise UsageError(f"dataset.{dataset.name}.data_path: {text} does not exist")
        inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else []
        found += [str(one) for one in inside if not one.name.startswith(".")] or [text]
    return found


def made_optimizer(model: nn.Module, keys: Optimizer | None, own: type | None) -> optim.Optimizer:
    """Create the configured optimizer; SGD with torch's defaults if there is none.

    `own` is the class if it is not one of torch.optim. Raises UsageError for an unknown class or bad
    arguments.
    """
    arguments: dict[str, Any] = {} if keys is None else keys.arguments.plain()
    if keys is not None and keys.learning_rate is not None:
        arguments["lr"] = keys.learning_rate
    kind = own or _of_module(optim, "SGD" if keys is None else keys.kind, "hyper_parameters.optimizer.class")
    try:
        return kind(model.parameters(), **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"hyper_parameters.optimizer: {kind.__name__} does not accept {arguments}: {error}"
        ) from error


def made_scheduler(optimizer: optim.Optimizer, keys: Optimizer | None) -> Any:
    """Create the configured schedule, None if there is none.

    Raises UsageError for an unknown class, for one that needs a metric, and for bad arguments.
    """
    if keys is None or (keys.lr_scheduler is None and keys.decay_steps is None):
        return None
    if keys.lr_scheduler is None:
        rate = 1.0 if keys.decay_rate is None else keys.decay_rate
        return optim.lr_scheduler.StepLR(optimizer, keys.decay_steps or 1, gamma=rate)
    own = "hyper_parameters.optimizer.lr_scheduler"
    kind = _of_module(optim.lr_scheduler, keys.lr_scheduler.kind, f"{own}.class")
    if kind is optim.lr_scheduler.ReduceLROnPlateau:
        raise UsageError(f"{own}.class: ReduceLROnPlateau needs a metric: step it in a task of your own")
    arguments = keys.lr_scheduler.arguments.plain()
    try:
        return kind(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{own}: {kind.__name__} does not accept {arguments}: {error}") from error


def scheduled_by_epoch(keys: Optimizer | None) -> bool:
    """Return True if the configured schedule counts epochs."""
    return keys is not None and keys.lr_scheduler is not None and keys.lr_scheduler.per == "epoch"


def _of_module(module: Any, name: str, key: str) -> Any:
    """Return a class of a torch module, ignoring the case of its name."""
    known = {one: kind for one, kind in vars(module).items() if isinstance(kind, type)}
    by_case = {one.lower(): one for one in known}
    if name.lower() not in by_case:
        raise UsageError(f"{key}: {module.__name__} has no {name}; {hint(name, known)}")
    return known[by_case[name.lower()]]


def on_device(data: Any, device: torch.device) -> Any:
    """Copy tensors in nested lists, tuples and mappings to the device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {name: on_device(one, device) for name, one in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        moved = [on_device(one, device) for one in data]
        if isinstance(data, tuple):
            return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
        return moved
    return data


_DENSE = re.compile(r"(?P<name>[^:]+):\[?(?P<sizes>[1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)\]?")
_NONE = "#"
"""PaddleRec's notation for no slots."""
Sample = dict[str, torch.Tensor]


class SlotReader:
    """Read the slots that a dataset names. A missing slot is filled with `padding`, or 0."""

    def __init__(self, dataset: Dataset) -> None:
        self._key = f"dataset.{dataset.name}"
        self._padding = dataset.padding or 0.0
        self._sparse = [one for one in (dataset.sparse_slots or "").split() if one != _NONE]
        self._dense = dict(self._sized(one) for one in (dataset.dense_slots or "").split() if one != _NONE)
        if both := sorted(set(self._sparse) & set(self._dense)):
            raise UsageError(
                f"{self._key}: {', '.join(both)} is in both sparse_slots and dense_slots: remove one"
            )

    def read(self, path: str) -> Iterator[Sample]:
        """Yield a sample for each non-blank line. Raises UsageError naming file and line."""
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._sample(line.split(), f"{self._key}: {path}, line {number}")

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """Batch the slots; sparse ones are padded with `padding` to the longest."""
        found: Sample = {}
        for name in self._sparse:
            listed = [one[name] for one in samples]
            longest = max(map(len, listed))
            found[name] = torch.full((len(listed), longest), int(self._padding), dtype=torch.int64)
            for row, one in zip(found[name], listed, strict=True):
                row[: len(one)] = one
        return {**found, **{name: torch.stack([one[name] for one in samples]) for name in self._dense}}

    def _sized(self, word: str) -> tuple[str, tuple[int, ...]]:
        """Parse the name and the sizes of a dense slot."""
        said = _DENSE.fullmatch(word)
        if said is None:
            raise UsageError(
                f"{self._key}.dense_slots: invalid slot {word!r}: expected `wide:4` or `wide:[2,2]`"
            )
        return said["name"], tuple(int(one) for one in said["sizes"].split(","))

    def _sample(self, words: Sequence[str], place: str) -> Sample:
        """Parse the words of one line into a sample."""
        values: dict[str, list[Any]] = {name: [] for name in (*self._sparse, *self._dense)}
        for word in words:
            name, colon, text = word.rpartition(":")
            if not colon:
                raise UsageError(f"{place}: invalid {word!r:.40}: expected `slot:value`")
            if name in values:
                values[name].append(_number(text, dense=name in self._dense, place=place, word=word))
        sample = {name: torch.tensor(values[name] or [int(self._padding)]) for name in self._sparse}
        for name, shape in self._dense.items():
            listed = values[name] or [self._padding] * math.prod(shape)
            if len(listed) != math.prod(shape):
                raise UsageError(f"{place}: {name} has {len(listed)} values, expected {math.prod(shape)}")
            sample[name] = torch.tensor(listed, dtype=torch.float32).reshape(shape)
        return sample


def _number(text: str, *, dense: bool, place: str, word: str) -> float:
    """Parse a slot value; raises UsageError naming the place."""
    try:
        return float(text) if dense else int(text)
    except ValueError:
        kind = "a number" if dense else "a whole number"
        raise UsageError(f"{place}: invalid value of {word!r:.40}: expected {kind}") from None
