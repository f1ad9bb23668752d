"""The state that a run resumes from, and values taken from the program if it has changed.

The state of a schedule includes its horizon (`T_max`, `total_steps`), and that of an optimizer its learning
rate, so a resume keeps the old ones. `from_program` names what follows the program instead: a schedule, by
its blob, is stepped again to the position of the checkpoint; an entry of an optimizer's groups
(`optimizer.lr`) gets the program's value. Both only if the program differs from the one that saved, so a
restart changes nothing.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.checkpoint.save.replicas import Mode, digests_of
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value, is_sharded, memory_of_shard
from torchrelay.checkpoint.state.restore.gradients import Gradients
from torchrelay.errors import BlobError, PartiallyLoadedError, StorageError, UsageError
from torchrelay.jobs.blobs import Blob
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import together, warn
from torchrelay.jobs.stop import function_settings
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.records import dataclass
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.mid_epoch import places_for
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.steps import Agreeing
from torchrelay.runners.training.journal import Journal

_MOVES = frozenset(
    {
        "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose",
        "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse",
    }
)  # fmt: skip
"""Values of a schedule that steps change; all others are its settings."""
_HORIZONS = {
    "T_max": "the rate rises again after step {}",
    "total_steps": "steps after step {} fail",
    "total_iters": "the rate is constant after step {}",
}
_CALLED = ("lr_lambdas", "_scale_fn_custom", "_scale_fn_ref")
"""Attributes in which torch's schedules keep functions of the program."""
_NOT_SHOWN = ("params", "param_names")


@dataclass
class _Node:
    """The schedules and optimizers of one node as the program has built them."""

    schedules: dict[str, Any] = field(default_factory=dict)
    built: dict[str, Any] = field(default_factory=dict)
    """State by schedule."""
    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Entries of groups by optimizer."""
    optimizers: dict[str, Any] = field(default_factory=dict)
    others: bool = False
    """True if another object holds a schedule, which it may save."""


class FromProgram:
    """Record what the program has built before a load, and apply it afterwards."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._nodes: dict[str, _Node] = {}
        self._before: Mapping[str, Any] | None = None
        """The record in the loaded checkpoint; None for a new run."""

    def note(self, session: SessionBase, warn: Callable[[str], None]) -> None:
        """Record what `setup` has built, and warn of an optimizer whose scheduler is not saved."""

        def look() -> None:
            for place in session.local_nodes:
                node = self._nodes[place.name] = _Node()
                for name, entry in session.workspace(place.name).entries().items():
                    if isinstance(entry.blob, Blob):
                        _note(node, name, entry.value)
                self._check(node)

        together(session.peers, "from_program", look)
        for node in self._nodes.values():
            scheduled = [id(_optimizer_of(one)) for one in node.schedules.values()]
            for name, optimizer in node.optimizers.items():
                follows = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
                if follows and id(optimizer) not in scheduled and not node.others:
                    warn(
                        f"{name} has a learning-rate scheduler that is not among the blobs: a resumed run "
                        "would start its schedule over; add scheduler=scheduler"
                    )

    @property
    def built(self) -> dict[str, list[Any]]:
        """The program's rates and named entries of optimizers, and settings of functions in schedules.

        Stored in checkpoints; a rate that was not taken keeps its value from the beginning of the saved run.
        """
        node = next(iter(self._nodes.values()), _Node())
        found: dict[str, Any] = {f"{name}.lr": _given(node, f"{name}.lr") for name in node.optimizers}
        if self._before is not None:
            found = {name: self._before.get(name) for name in found}
        found |= {name: _given(node, name) for name in (*node.schedules, *self._names)}
        return {name: given for name, given in found.items() if given}

    def apply(
        self, session: SessionBase, before: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Change what was loaded; `before` is the value of `built` in the checkpoint."""

        def change() -> list[str]:
            return [
                text for place in session.local_nodes for text in self._apply(self._nodes[place.name], before)
            ]

        self._before = before
        for text in dict.fromkeys(together(session.peers, "from_program", change)[0]):
            say(text)

    def _check(self, node: _Node) -> None:
        for name in self._names:
            blob, _, key = name.partition(".")
            if name in node.schedules:
                continue
            optimizer = node.optimizers.get(blob)
            if optimizer is None or not any(key in group for group in optimizer.param_groups):
                there = [*node.schedules, *(f"{one}.lr" for one in node.optimizers)]
                raise UsageError(
                    f"unknown from_program={name!r}: expected a schedule, or an entry of optimizer groups "
                    f"({', '.join(there) or 'there are none'})"
                )
            for schedule, one in node.schedules.items():
                if key == "lr" and _optimizer_of(one) is optimizer:
                    raise UsageError(
                        f"from_program={name!r}: {schedule} sets that rate at each step: use "
                        f"from_program={schedule!r}, which begins with the program's rate"
                    )

    def _apply(self, node: _Node, before: Mapping[str, Any]) -> Iterator[str]:
        """Apply the program's values on one node; yields log lines."""
        for name in self._names:
            if name not in node.schedules and before.get(name) != (wanted := _given(node, name)):
                yield from _set_entries(node, name, wanted)
        scheduled = [_optimizer_of(one) for one in node.schedules.values()]
        for blob, optimizer in node.optimizers.items():
            name = f"{blob}.lr"
            was, now = before.get(name), _given(node, name)
            if was not in (None, now) and name not in self._names and optimizer not in scheduled:
                yield (
                    f"{name} changed from {_short(was)} to {_short(now)} in the program, but keeps its saved "
                    f"value: from_program={name!r} takes the program's"
                )
        for name, schedule in node.schedules.items():
            saved, built = copy.deepcopy(schedule.state_dict()), node.built[name]
            differences, was, now = list(_differences(built, saved)), before.get(name), _given(node, name)
            if name in self._names and (was or []) != now:
                differences.append("its function has changed" if was else "its function is the program's")
            elif was and was != now:
                yield f"{name} has a new function, taken from the program: functions are not saved"
            if not differences:
                continue
            listed = ", ".join(differences[:3]) + (", ..." if differences[3:] else "")
            if name in self._names:
                _rebuild(name, schedule, built, saved, node.groups.get(id(_optimizer_of(schedule)), []))
                yield f"{name} follows the program from step {_position(saved)}: {listed}"
            elif type(schedule).__module__.startswith("torch."):
                parts = [saved, *(one for one in saved.get("_schedulers", ()) if isinstance(one, Mapping))]
                found = [(text, one.get(key)) for one in parts for key, text in _HORIZONS.items()]
                ends = [f"; {text.format(end)}" for text, end in found if isinstance(end, int)][:1]
                yield (
                    f"{name} keeps its saved settings instead of the program's: {listed}"
                    f"{''.join(ends)}. from_program={name!r} takes the program's"
                )


def _note(node: _Node, name: str, value: Any) -> None:
    if isinstance(value, LRScheduler):
        node.schedules[name] = value
        node.built[name] = copy.deepcopy(value.state_dict())
        value = _optimizer_of(value)
    elif hasattr(value, "param_groups"):
        node.optimizers[name] = value
    else:
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        ones = value if isinstance(value, (list, tuple)) else list(inside.values())
        node.others |= any(isinstance(one, LRScheduler) for one in ones)
    groups = getattr(value, "param_groups", None)
    if isinstance(groups, list) and id(value) not in node.groups:
        node.groups[id(value)] = [
            {key: _copied(one) for key, one in group.items() if key not in _NOT_SHOWN} for group in groups
        ]


def _optimizer_of(schedule: Any) -> Any:
    return getattr(schedule, "optimizer", None)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _plain(value: Any) -> Any:
    """Convert a value to JSON: numpy numbers to Python's, other objects to their type name."""
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    try:
        return encode(value, "")
    except BlobError:
        return type(value).__name__


def _given(node: _Node, name: str) -> list[Any]:
    """Return an entry's value in each group, or the settings of a schedule's functions."""
    if name in node.schedules:
        return [one for one in map(function_settings, _functions(node.schedules[name])) if one is not None]
    blob, _, key = name.partition(".")
    groups = node.groups.get(id(node.optimizers.get(blob)), [])
    return [_plain(group.get(key)) for group in groups]


def _functions(schedule: Any) -> Iterator[Any]:
    """Yield the functions that a schedule calls, also those of inner schedules."""
    for key, value in sorted(vars(schedule).items()):
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, LRScheduler) and key == "_schedulers":
                yield from _functions(one)
            elif isinstance(one, (FunctionType, functools.partial)) and key in _CALLED:
                yield one


def _set_entries(node: _Node, name: str, wanted: list[Any]) -> Iterator[str]:
    """Set an entry to the program's values; yields a log line if that changes it."""
    blob, _, key = name.partition(".")
    optimizer = node.optimizers[blob]
    groups = optimizer.param_groups[: len(wanted)]
    saved = [_plain(group.get(key)) for group in groups]
    if saved != wanted:
        for group, built in zip(groups, node.groups[id(optimizer)], strict=False):
            _set(group, key, built[key])
        yield f"{name} is {_short(wanted)} from the program instead of the saved {_short(saved)}"


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value; a tensor is changed in place."""
    if isinstance(group.get(key), torch.Tensor):  # other objects may refer to it
        with torch.no_grad():
            group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = _copied(value)


def _differences(built: Any, saved: Any, at: str = "") -> Iterator[str]:
    """Describe differences in the settings of two states of a schedule."""
    if isinstance(built, Mapping) and isinstance(saved, Mapping) and not isinstance(built, Counter):
        for key in built:
            if key not in _MOVES and key in saved:
                yield from _differences(built[key], saved[key], f"{at}.{key}".lstrip("."))
    elif isinstance(built, (list, tuple)) and isinstance(saved, (list, tuple)):
        for index, (mine, other) in enumerate(zip(built, saved, strict=False)):
            yield from _differences(mine, other, f"{at}[{index}]")
    elif _plain(built) != _plain(saved) and not callable(built):
        yield f"{at} was {_short(saved)} and is {_short(built)} in the program"


def _short(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return f"{value:g}" if isinstance(value, float) else f"{value!s:.60}"


def _position(saved: Mapping[str, Any]) -> int:
    inner = saved.get("_schedulers") or [{}]
    return int(saved.get("last_epoch", inner[0].get("last_epoch", 0)))


def _rebuild(
    name: str, schedule: Any, built: Mapping[str, Any], saved: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """Step the program's schedule to the saved position; one that follows a metric keeps its state."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.load_state_dict({**built, **{key: saved[key] for key in saved if key in _MOVES}})
        return
    optimizer = _optimizer_of(schedule)
    start = copy.deepcopy(dict(built))
    if isinstance(start.get("base_lrs"), list):  # groups that were added during the training
        start["base_lrs"] += saved["base_lrs"][len(start["base_lrs"]) :]
    schedule.load_state_dict(start)
    cycles = ("momentum", "betas") if getattr(schedule, "cycle_momentum", False) else ()
    for group, entries in zip(optimizer.param_groups, groups, strict=False):
        for key, value in entries.items():
            if key == "lr" or key in cycles or key not in optimizer.defaults:
                _set(group, key, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about scheduler steps before the optimizer's
            for _ in range(_position(saved) - _position(built)):
                schedule.step()
    except ValueError as error:
        raise UsageError(
            f"from_program={name!r}: the program's schedule cannot reach step {_position(saved)} of the run: "
            f"{error}"
        ) from error


def put_back(session: SessionBase, load: Callable[[], None]) -> Callable[[str, Agreeing | None], None]:
    """Return what loads again if the task of a node reaches its loop with other state than it has now.

    All processes call it there, and `load` loads on all. Emulated nodes of one process only get a warning,
    because a load affects all of them.
    """
    before = {place.name: _contents(session.workspace(place.name)) for place in session.local_nodes}

    def compare(node: str, agreeing: Agreeing | None) -> None:
        now = _contents(session.workspace(node))
        names = now.keys() | before[node].keys()
        changed = sorted(name for name in names if now.get(name) != before[node].get(name))
        flags = (int(bool(changed)),)
        anywhere = flags if agreeing is None else agreeing.agree_flags(flags).wait()
        if anywhere[0] and len(session.local_nodes) == 1:
            load()
        elif anywhere[0]:
            text = f"{', '.join(changed[:4])} of {node} changed before the resumed loop, so twice in this"
            warn(f"{text} epoch: move that code to a task of its own", stacklevel=2)

    return compare


def _contents(workspace: Workspace) -> dict[str, Any]:
    """Return digests and write counts of everything that may be saved; `.data` writes are not counted."""
    entries = workspace.entries()
    saved = {name: one.value for name, one in entries.items() if one.origin is not Origin.LATER}
    leaves = [
        replace(leaf, content=memory_of_shard(leaf.content))
        if not isinstance(leaf.content, Value) and is_sharded(leaf.content)
        else leaf
        for leaf in leaves_of(saved)
    ]
    digests = digests_of(leaves, Mode.SAMPLES)
    return {
        leaf.name: (digests[leaf.name], leaf.frozen)
        if isinstance(leaf.content, Value)
        else (digests[leaf.name], leaf.frozen, leaf.content.data_ptr(), leaf.content._version)
        for leaf in leaves
    }


class ResumedState:
    """Loaded state, or that of a fresh start, until the tasks of the first epoch get it.

    `places` has the positions of the nodes in the epoch to resume; it is empty at the end of one.
    """

    def __init__(self, session: SessionBase, state: RunState, from_program: FromProgram) -> None:
        self._session, self._state, self._from_program = session, state, from_program
        self._streams: dict[str, RandomStreams] = {}
        self._gradients: dict[str, Gradients] = {}
        self._load_again: Callable[[], None] = lambda: None
        self.places: Mapping[str, Any] = {}

    def derive_streams(self) -> None:
        """Seed the random streams of every node; without a seed they are unchanged."""
        for place in self._session.local_nodes:
            if self._state.seed is not None:
                self._session.set_streams(place.name, RandomStreams.derive(self._state.seed, place.rank))
            self._streams[place.name] = self._session.streams(place.name)

    def load(
        self, manager: Manager, nodes: Sequence[str], target: Target, journal: Journal, *, older: bool
    ) -> Target:
        """Load the target; if its bytes are damaged, an older one if `older` is True."""
        manager.engine.say = partial(journal.tell, "state changed")
        while True:
            epoch = target.position.epoch
            try:
                if target.position.boundary:
                    self._session.run(manager.init(nodes, retrieve_from_epoch=epoch))
                    self._session.run(manager.load(epoch))
                else:
                    self._session.run(manager.go_on_at(nodes, target))
                break
            except (StorageError, PartiallyLoadedError) as error:
                if not older:
                    raise
                target = manager.engine.ledger.instead_of(self._session.peers, target, error, journal.warn)
        self._from_program.apply(self._session, target.facts.built, journal.say)

        def load_again() -> None:  # random states and gradients are known
            self._session.run(manager.go_on_at(nodes, target))
            manager.engine.take_streams()
            manager.engine.take_gradients()
            self._from_program.apply(self._session, target.facts.built)

        if not target.position.boundary:
            self.places, self._load_again = target.facts.places, load_again
        return target

    def take(self, manager: Manager, target: Target) -> None:
        """Continue counting from the loaded position; random states and gradients wait for `restore`."""
        engine = manager.engine
        self._streams, self._gradients = engine.take_streams(), engine.take_gradients()
        self._state.take(target.facts, target.position.epoch)

    def restore(self) -> None:
        """Restore random states, right before the first epoch task or the final parts of a finished run.

        Gradients too, except for nodes that resume inside a loop: these restore them there, because code
        before the loop may clear them.
        """
        for name, streams in self._streams.items():
            self._session.set_streams(name, streams)
        if not self.places:
            for gradients in self._gradients.values():
                gradients.install()

    def continue_epoch(self, step: int) -> None:
        """Resume the interrupted epoch after `step` finished steps."""
        inside, self.places = self.places, {}
        self._state.begin_epoch(self._state.epoch + 1, step=step, total_steps=self._state.total_steps)
        places = places_for([place.name for place in self._session.nodes], inside)
        self._state.put_back = put_back(self._session, self._load_again)
        for name in [place.name for place in self._session.local_nodes if place.name in places]:
            held = self._streams.get(name), self._gradients.get(name)
            self._state.continue_at(name, places[name], *held)
