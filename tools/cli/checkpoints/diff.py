"""`torchrelay ckpt diff A B`: list what changed between two epochs, and by how much. Imports no torch.

numpy is needed for the figures; without it only the names of changed leaves are listed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.checkpoint.inspect.contents import (
    DiffOptions,
    Epoch,
    Kind,
    LeafChange,
    leaf_changes,
    open_epoch,
)
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import RelayError, install_command
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.runners.monitoring.console import Output, arg, either, flag, human_number, verb
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import Selected, parse_selector, select
from torchrelay.tools.cli.arguments import BLOBS, whole_number
from torchrelay.tools.cli.runs.ls import entry_json

_ENTRIES, _SHOWN, _DIGITS = 3, 40, 8
_LIBRARIES = ("numpy", "ndarray")  # and those with a dot, torch.dtype


def value_change(before: Any, after: Any) -> str:
    """Describe the change between two values in typed JSON: `last_epoch 1 -> 3`, or `0.1 -> 0.2`."""
    a, b = _decoded(before), _decoded(after)
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return f"{_short(a)} -> {_short(b)}"
    changed = [key for key in dict.fromkeys([*a, *b]) if repr(a.get(key, _GONE)) != repr(b.get(key, _GONE))]
    found = [
        f"{key} {_short(a.get(key, _GONE))} -> {_short(b.get(key, _GONE))}" for key in changed[:_ENTRIES]
    ]
    more = [f"{len(changed) - _ENTRIES} more"] if changed[_ENTRIES:] else []
    return ", ".join([*found, *more]) or "the order of entries"


_GONE = object()
"""Placeholder for a missing entry."""


def _decoded(value: Any) -> Any:
    """Decode the value, unless that needs a library or another leaf."""
    try:
        return decode(value) if _plain(value) else value
    except RelayError:  # it refers to a tensor, say
        return value


def _plain(json: Any) -> bool:
    """Return True if the typed JSON can be decoded without numpy or torch."""
    if isinstance(json, list):
        return all(map(_plain, json))
    if not isinstance(json, dict):
        return True
    if "$" not in json:
        return all(map(_plain, json.values()))
    kind = json["$"]
    return isinstance(kind, str) and kind.isidentifier() and kind not in _LIBRARIES and _plain(json.get("v"))


def _short(value: Any) -> str:
    text = "none" if value is _GONE else repr(value)
    if isinstance(value, float) and len(text) > _DIGITS:
        text = f"{value:.6g}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


_COLUMNS = ("leaf", "what", "changed", "compared", "|b-a|/|a|", "cosine", "max |b-a|", "|a|", "|b|", "bad")
_ORDER: tuple[Kind, ...] = ("content", "value", "form", "added", "removed", "gone")
_WORDS: dict[Kind, str] = {
    "content": "changed",
    "value": "changed values",
    "form": "of another type or shape",
    "added": "added",
    "removed": "removed",
    "gone": "whose files were removed by retention",
    "same": "unchanged",
}


@verb(
    "compare the contents of two epochs",
    arg("a", "RUN@3: an epoch of a run, checkpoint directory or URL", "A"),
    arg("b", "RUN@7, or @7 for an epoch of the same run", "B"),
    BLOBS,
    arg("--top", "show only the N leaves that changed most", "N", type=whole_number(1)),
    either(
        flag("--quick", "compare digests only, without figures"),
        flag("--whole", "compute figures over whole tensors instead of changed blocks"),
    ),
)
def diff(chosen: argparse.Namespace, output: Output) -> int:
    """Compare two epochs and print the changes; always returns 0."""
    second = chosen.b
    if second.startswith("@") and not Path(second).exists():
        second = f"{parse_selector(chosen.a).path}{second}"  # an epoch of the first run
    one, other = select(chosen.a), select(second)
    figures = not chosen.quick
    if figures and find_spec("numpy") is None:
        output.notice(f"numpy is not installed, so figures are left out: {install_command('inspect')}")
        figures = False
    a, count_a = _opened(one)
    b, count_b = _opened(other)
    found: list[LeafChange] = []
    for number, change in enumerate(
        leaf_changes(a, b, DiffOptions(tuple(chosen.blobs or ()), figures, chosen.whole)), 1
    ):
        found.append(change)
        if number % 100 == 0 or change.elements > 1 << 20:
            output.progress(f"{number} leaves compared, {human_bytes(count_a() + count_b())} read")
    output.progress("")
    gradients = [one for one in found if one.name.startswith(GRADIENTS)]
    if not (output.json or chosen.blobs):  # saved where the program may add to them: no change of the model
        found = [one for one in found if not one.name.startswith(GRADIENTS)]
    changes = sorted((change for change in found if change.kind != "same"), key=_most_first)
    shown = changes[: chosen.top]
    read = count_a() + count_b()
    stored = sum(item.leaf.nbytes for epoch in (a, b) for item in epoch.items.values() if item.tensor)
    counts = Counter(change.kind for change in found)
    if output.json:
        places = ({"place": here.place.where, **entry_json(here.entry)} for here in (one, other))
        output.value(
            {
                **dict(zip("ab", places, strict=True)),
                "counts": {kind: counts[kind] for kind in _WORDS},
                "changes": [
                    {
                        "leaf": change.name,
                        "blob": change.blob,
                        "kind": change.kind,
                        "before": change.before,
                        "after": change.after,
                        "elements": change.elements,
                        "figures": None if change.change is None else change.change.json(),
                    }
                    for change in shown
                ],
                "bytes": {"read": read, "tensors": stored},
            }
        )
        return 0
    _say(output, shown, len(changes))
    summary = ", ".join(f"{counts[kind]} {_WORDS[kind]}" for kind in _WORDS if counts[kind])
    output.line(f"{one.name} to {other.name}: {summary or 'nothing is stored'}")
    output.line(f"read {human_bytes(read)}; both epochs together hold {human_bytes(stored)} of tensors")
    if not chosen.blobs and any(change.kind != "same" for change in gradients):
        output.line(f"not shown: saved gradients, which differ; --blobs {GRADIENTS} lists them")
    return 0


def _opened(selected: Selected) -> tuple[Epoch, Callable[[], int]]:
    """Open the epoch; returns it with a function that counts the bytes read so far."""
    storage = CountingStorage(selected.place.storage)
    epoch = open_epoch(storage, selected.entry)
    return epoch, lambda: storage.bytes_read


def _most_first(one: LeafChange) -> tuple[int, bool, float, str]:
    """Sort key: new NaN or Inf first, then by relative change, then leaves without figures."""
    change = one.change
    if change is None:
        return (_ORDER.index(one.kind), False, 0.0, one.name)
    worse = (change.nan_b, change.inf_b) > (change.nan_a, change.inf_a)
    relative = float("inf") if change.relative is None else change.relative
    return (0, not worse, -relative, one.name)


def _say(output: Output, shown: Sequence[LeafChange], changed: int) -> None:
    measured = [_cells(change) for change in shown if change.change]
    if measured:
        output.table(_COLUMNS, measured, spare=("compared", "|a|", "|b|"))
    if len(measured) < len(shown):  # a table of its own: long texts would widen the other one
        output.table(_COLUMNS[:2], [_cells(change)[:2] for change in shown if not change.change])
    if changed > len(shown):
        output.line(f"... and {changed - len(shown)} more; omit --top to show all")
    if any(one.change is not None and one.change.compared < one.elements for one in shown):
        output.line("below 100% compared, figures cover the changed blocks only; --whole reads all")


def _cells(one: LeafChange) -> tuple[str, ...]:
    change = one.change
    if change is None:
        return (one.name, _what(one))
    percents = (_percent(count, one.elements) for count in (change.changed, change.compared))
    figures = (change.relative, change.cosine, change.max_abs, change.norm_a, change.norm_b)
    numbers = ("" if value is None else human_number(value) for value in figures)
    bad = [f"NaN {change.nan_a}->{change.nan_b}"] if change.nan_a or change.nan_b else []
    bad += [f"Inf {change.inf_a}->{change.inf_b}"] if change.inf_a or change.inf_b else []
    return (one.name, _what(one), *percents, *numbers, " ".join(bad))


def _what(one: LeafChange) -> str:
    if one.kind == "content":
        return str(one.after)
    if one.kind in ("added", "removed", "gone"):
        return f"{one.kind} {one.after or one.before}"
    if one.kind == "value":
        return value_change(one.before, one.after)
    return f"{one.before} -> {one.after}"


def _percent(count: int, of: int) -> str:
    """Format a percentage; 0% and 100% only if exact."""
    if not of or count in (0, of):
        return "100%" if count else "0%"
    if count < 0.0001 * of:
        return "<0.01%"
    return f"{100 * count / of:.3g}%" if count < 0.99 * of else "99+%"
