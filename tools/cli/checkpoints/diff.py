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
from torchrelay.checkpoint.inspect.contents import Epoch, open_epoch
from torchrelay.checkpoint.inspect.diff import DiffOptions, Kind, LeafChange, leaf_changes
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import RelayError, install_command
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.runners.monitoring.console import Output, human_number
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import Selected, parse_selector, select
from torchrelay.tools.cli.arguments import Add, add_blobs, whole_number
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


class _Gone:
    """Placeholder for a missing entry."""

    def __repr__(self) -> str:
        return "none"


_GONE = _Gone()


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
    text = repr(value)
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


def add_diff(add: Add) -> None:
    """Define `diff`."""
    parser = add("compare the contents of two epochs", diff)
    parser.add_argument("a", metavar="A", help="RUN@3: an epoch of a run, checkpoint directory or URL")
    parser.add_argument("b", metavar="B", help="RUN@7, or @7 for an epoch of the same run")
    add_blobs(parser)
    parser.add_argument(
        "--top", metavar="N", type=whole_number(1), help="show only the N leaves that changed most"
    )
    close = parser.add_mutually_exclusive_group()
    close.add_argument("--quick", action="store_true", help="compare digests only, without figures")
    close.add_argument(
        "--whole", action="store_true", help="compute figures over whole tensors instead of changed blocks"
    )


def diff(chosen: argparse.Namespace, output: Output) -> int:
    """Compare two epochs and print the changes; always returns 0."""
    one, other = select(chosen.a), select(_second(chosen.a, chosen.b))
    figures = not chosen.quick and _have_numpy(output)
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
    if output.json:
        output.value(_json(one, other, found, shown, read, _tensor_bytes(a, b)))
    else:
        _say(output, one, other, found, shown, len(changes), read, _tensor_bytes(a, b))
        if not chosen.blobs and any(change.kind != "same" for change in gradients):
            output.line(f"not shown: saved gradients, which differ; --blobs {GRADIENTS} lists them")
    return 0


def _second(a: str, b: str) -> str:
    """Expand `@7` to an epoch of the first run."""
    return f"{parse_selector(a).path}{b}" if b.startswith("@") and not Path(b).exists() else b


def _have_numpy(output: Output) -> bool:
    if find_spec("numpy") is not None:
        return True
    output.notice(f"numpy is not installed, so figures are left out: {install_command('inspect')}")
    return False


def _opened(selected: Selected) -> tuple[Epoch, Callable[[], int]]:
    """Open the epoch; returns it with a function that counts the bytes read so far."""
    storage = CountingStorage(selected.place.storage)
    epoch = open_epoch(storage, selected.entry)
    return epoch, lambda: storage.bytes_read


def _tensor_bytes(*epochs: Epoch) -> int:
    return sum(item.leaf.nbytes for epoch in epochs for item in epoch.items.values() if item.tensor)


def _most_first(one: LeafChange) -> tuple[int, bool, float, str]:
    """Sort key: new NaN or Inf first, then by relative change, then leaves without figures."""
    change = one.change
    if change is None:
        return (_ORDER.index(one.kind), False, 0.0, one.name)
    worse = (change.nan_b, change.inf_b) > (change.nan_a, change.inf_a)
    relative = float("inf") if change.relative is None else change.relative
    return (0, not worse, -relative, one.name)


def _say(
    output: Output,
    one: Selected,
    other: Selected,
    found: Sequence[LeafChange],
    shown: Sequence[LeafChange],
    changed: int,
    read: int,
    stored: int,
) -> None:
    measured = [_cells(change) for change in shown if change.change]
    if measured:
        output.table(_COLUMNS, measured, spare=("compared", "|a|", "|b|"))
    if len(measured) < len(shown):  # a table of its own: long texts would widen the other one
        output.table(_COLUMNS[:2], [_cells(change)[:2] for change in shown if not change.change])
    if changed > len(shown):
        output.line(f"... and {changed - len(shown)} more; omit --top to show all")
    if any(_partial(change) for change in shown):
        output.line("below 100% compared, figures cover the changed blocks only; --whole reads all")
    counts = Counter(change.kind for change in found)
    summary = ", ".join(f"{counts[kind]} {_WORDS[kind]}" for kind in _WORDS if counts[kind])
    output.line(f"{one.name} to {other.name}: {summary or 'nothing is stored'}")
    output.line(f"read {human_bytes(read)}; both epochs together hold {human_bytes(stored)} of tensors")


def _cells(one: LeafChange) -> tuple[str, ...]:
    change = one.change
    if change is None:
        return (one.name, _what(one))
    return (
        one.name,
        _what(one),
        _percent(change.changed, one.elements),
        _percent(change.compared, one.elements),
        _number(change.relative),
        _number(change.cosine),
        human_number(change.max_abs),
        human_number(change.norm_a),
        human_number(change.norm_b),
        _bad(change.nan_a, change.nan_b, change.inf_a, change.inf_b),
    )


def _what(one: LeafChange) -> str:
    if one.kind == "content":
        return str(one.after)
    if one.kind in ("added", "removed", "gone"):
        return f"{one.kind} {one.after or one.before}"
    if one.kind == "value":
        return value_change(one.before, one.after)
    return f"{one.before} -> {one.after}"


def _bad(nan_a: int, nan_b: int, inf_a: int, inf_b: int) -> str:
    said = [f"NaN {nan_a}->{nan_b}"] if nan_a or nan_b else []
    said += [f"Inf {inf_a}->{inf_b}"] if inf_a or inf_b else []
    return " ".join(said)


def _percent(count: int, of: int) -> str:
    """Format a percentage; 0% and 100% only if exact."""
    if not of or count in (0, of):
        return "100%" if count else "0%"
    if count < 0.0001 * of:
        return "<0.01%"
    return f"{100 * count / of:.3g}%" if count < 0.99 * of else "99+%"


def _number(value: float | None) -> str:
    return "" if value is None else human_number(value)


def _partial(one: LeafChange) -> bool:
    return one.change is not None and one.change.compared < one.elements


def _json(
    one: Selected,
    other: Selected,
    found: Sequence[LeafChange],
    shown: Sequence[LeafChange],
    read: int,
    stored: int,
) -> dict[str, Any]:
    counts = Counter(change.kind for change in found)
    return {
        "a": _place_json(one),
        "b": _place_json(other),
        "counts": {kind: counts[kind] for kind in _WORDS},
        "changes": [_change_json(change) for change in shown],
        "bytes": {"read": read, "tensors": stored},
    }


def _place_json(one: Selected) -> dict[str, Any]:
    return {"place": one.place.where, **entry_json(one.entry)}


def _change_json(one: LeafChange) -> dict[str, Any]:
    return {
        "leaf": one.name,
        "blob": one.blob,
        "kind": one.kind,
        "before": one.before,
        "after": one.after,
        "elements": one.elements,
        "figures": None if one.change is None else one.change.json(),
    }
