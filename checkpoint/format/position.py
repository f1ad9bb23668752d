"""Define positions in a run, the facts of a run stored with them, and the entries of the log about them.

Pure types. Every log record has the whole state, so the newest valid record is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.errors import UsageError
from torchrelay.records import Json, dataclass

_TEXT = re.compile(r"(0|[1-9][0-9]{0,7})(?:\+([1-9][0-9]{0,8}))?")
MAX_EPOCH = 10**8 - 1
"""Eight decimal digits, as in the name of an attempt's directory."""
MAX_STEP = 10**9 - 1


@dataclass(frozen=True, order=True)
class Position:
    """(epoch, step): epoch 0 is the state after init, k after k epochs.

    (3, 1200), written `3+1200`, is 1,200 steps into the fourth epoch; only automatic resume uses positions
    with a step.
    """

    epoch: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}+{self.step}" if self.step else str(self.epoch)

    @property
    def boundary(self) -> bool:
        """Whether this is the end of a whole epoch."""
        return self.step == 0

    def directory(self, nonce: str) -> str:
        """The name of an attempt's directory below `data/`: e00000004-7f3a9c or e00000003s001200-7f3a9c."""
        step = f"s{self.step:06d}" if self.step else ""
        return f"e{self.epoch:08d}{step}-{nonce}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse `7` or `3+1200`; raises UsageError for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a position: write an epoch such as 7, or 3+1200 with a step")
        return cls(int(match[1]), int(match[2] or 0))


_WILD = re.compile(r"[*?\[]")


def is_pattern(text: str) -> bool:
    """Whether a text has wildcards."""
    return _WILD.search(text) is not None


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a leaf."""
    if is_pattern(pattern):
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a leaf."""
    return any(matches(name, pattern) for pattern in patterns)


Patterns = str | Sequence[str] | None


@dataclass(frozen=True)
class Selection:
    """Selects leaves that match a pattern of `include` (None: all) and no pattern of `exclude`."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether all leaves are selected."""
        return self.include is None and not self.exclude

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns."""
        return (*(self.include or ()), *self.exclude)

    def saves(self, name: str) -> bool:
        """Whether a leaf of this name is saved."""
        return not self.why_not(name)

    def why_absent(self, name: str) -> str:
        """Why the save left a leaf out, for messages; empty for one that it would have saved."""
        why = self.why_not(name)
        return f"{LEFT_OUT}: {why}" if why else ""

    def why_not(self, name: str) -> str:
        """Why a leaf of this name is not saved, for messages; empty if it is."""
        for pattern in self.exclude:
            if matches(name, pattern):
                return f"excluded by {pattern!r}"
        if self.include is not None and not matches_any(name, self.include):
            return f"not among include={list(self.include)}"
        return ""


LEFT_OUT = "the save left it out"
EVERYTHING = Selection()


def selection_of(include: Patterns, exclude: Patterns) -> Selection:
    """The selection of arguments `include` and `exclude`; raises UsageError for invalid patterns."""
    found = None if include is None else _checked(include, "include")
    if found == ():
        raise UsageError("include=[] would save nothing: leave it out")
    return Selection(found, () if exclude is None else _checked(exclude, "exclude"))


def _checked(given: object, what: str) -> tuple[str, ...]:
    """Patterns as a tuple; raises UsageError."""
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and one for one in found):
        raise UsageError(
            f'invalid {what}={given!r:.80}: expected patterns of leaf names, such as ["debug.*"]'
        )
    return tuple(found)


@dataclass(frozen=True)
class Facts:
    """Facts about a position: reduced metrics, the verdict of each stop condition, counters.

    `metrics` are those that the epoch logged; earlier versions included carried ones. `stop` maps a
    condition's name to {"stop": bool, "reason": str}; `elapsed_secs` and `total_steps` count over all
    attempts of the run; `seed` is the argument of `torchrelay.seed`, if any.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)
    """Last values of metrics that earlier epochs logged and this one did not."""
    stop: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    total_steps: int = 0
    elapsed_secs: float = 0.0
    seed: int | None = None
    run_id: str | None = None
    over: bool = False
    """Whether the loop ended here, by the combined verdicts."""
    selection: Selection = EVERYTHING
    """The leaves that the save took; the others are not in the epoch."""
    made_by_init: tuple[str, ...] | None = None
    """Unregistered blobs: `init` made them, and a load recreates them. None: unknown."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """Values of the program that a resume may take from it, by name (`from_program`)."""
    places: Mapping[str, Any] = field(default_factory=dict)
    """For a position with a step: each node's place in its tasks, and what it had logged."""

    @property
    def last_metrics(self) -> dict[str, float]:
        """The last value of every metric that the run has logged."""
        return {**self.carried, **self.metrics}


def facts_json(facts: Facts) -> Json:
    """Facts as stored in a manifest."""
    selection = facts.selection
    include = None if selection.include is None else list(selection.include)
    selected = {"include": include, "exclude": list(selection.exclude)}
    return {
        "metrics": _metrics_json(facts.metrics),
        **({"carried": _metrics_json(facts.carried)} if facts.carried else {}),
        "stop": {name: dict(verdict) for name, verdict in facts.stop.items()},
        "total_steps": facts.total_steps,
        "elapsed_secs": float(facts.elapsed_secs),
        "seed": values.encode(facts.seed, "seed"),
        "run": facts.run_id,
        "over": facts.over,
        **({} if selection.everything else {"selection": selected}),
        **({} if facts.made_by_init is None else {"made_by_init": list(facts.made_by_init)}),
        **({"built": dict(facts.built)} if facts.built else {}),
        **({"places": dict(facts.places)} if facts.places else {}),
    }


def facts_of(value: Json, what: str) -> Facts:
    """Read the JSON of `facts_json`; raises DamagedError naming `what`."""
    return facts_in(Fields(value if isinstance(value, dict) else {}, what))


def _metrics_json(metrics: Mapping[str, float]) -> dict[str, Json]:
    return {name: values.encode(float(value), f"metric {name}") for name, value in metrics.items()}


def _metrics(fields: Fields, key: str) -> dict[str, float]:
    metrics = {name: values.decode(value) for name, value in fields.fields(key).values.items()}
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise fields.wrong(key)
    return metrics


def facts_in(fields: Fields) -> Facts:
    """Read the JSON of `facts_json`; raises DamagedError naming the invalid part."""
    seed = values.decode(fields.values.get("seed"))
    stop = fields.fields("stop").values
    elapsed = fields.values.get("elapsed_secs")
    if not all(isinstance(verdict, dict) for verdict in stop.values()):
        raise fields.wrong("stop")
    if type(elapsed) not in (int, float) or not (seed is None or type(seed) is int):
        raise fields.wrong("elapsed_secs" if type(elapsed) not in (int, float) else "seed")
    selection = EVERYTHING
    if fields.values.get("selection") is not None:
        said = fields.fields("selection")
        selection = Selection(said.optional("include", said.texts), said.texts("exclude"))
    return Facts(
        metrics=_metrics(fields, "metrics"),
        carried=_metrics(fields, "carried") if "carried" in fields.values else {},
        stop=stop,
        total_steps=fields.integer("total_steps"),
        elapsed_secs=float(elapsed or 0),
        seed=seed,
        run_id=fields.optional("run", fields.text),
        over=fields.flag("over"),
        selection=selection,
        made_by_init=fields.texts("made_by_init") if "made_by_init" in fields.values else None,
        built=fields.fields("built").values if "built" in fields.values else {},
        places=fields.fields("places").values if "places" in fields.values else {},
    )


HEALTHY = "ok"
DAMAGED = "damaged"
"""Set by `quarantine`; an entry of any other health than `HEALTHY` is not resumed from."""


class Key(NamedTuple):
    """Key of a live entry; sorts by branch, then position."""

    branch: int
    position: Position

    def __str__(self) -> str:
        return f"{self.position},branch={self.branch}"


@dataclass(frozen=True)
class CommittedPosition:
    """One committed position: its attempt, and size and digest of its manifest.

    `needs` are earlier attempts that its manifest references; `groups` the file groups that still exist;
    `resumable` is False once a group such as the optimizer's is deleted.
    """

    branch: int
    position: Position
    attempt_name: str
    manifest_bytes: int
    manifest_sha256: str
    needs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    resumable: bool = True
    health: str = HEALTHY
    extra: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Unknown fields of a newer minor version, always kept."""

    @property
    def key(self) -> Key:
        """(branch, position)."""
        return Key(self.branch, self.position)

    @property
    def tries(self) -> tuple[str, ...]:
        """All attempts whose files this entry needs, its own first."""
        return (self.attempt_name, *self.needs)

    @property
    def healthy(self) -> bool:
        """Whether no damage was found."""
        return self.health == HEALTHY


@dataclass(frozen=True)
class Branch:
    """One line of epochs. It shares its parent's entries up to and including `base`.

    `base` None: a fresh start, which shares nothing. `request` is the user's request that began the branch,
    e.g. `{"epoch": 2, "process": "..."}`; None for the first branch.
    """

    id: int
    parent: int | None = None
    base: Position | None = None
    request: Mapping[str, Json] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class TagOrPin:
    """A `tag` (a name for an epoch) or a `pin` (a reason to keep it); names are unique per kind."""

    kind: str
    name: str
    target: Key


@dataclass(frozen=True)
class Retirement:
    """An attempt (`groups` None), or some groups of its files, that may be deleted."""

    attempt_name: str
    groups: tuple[str, ...] | None = None


@dataclass(frozen=True)
class State:
    """Everything in a log record except about itself. `entries` are sorted by key."""

    entries: tuple[CommittedPosition, ...] = ()
    branches: tuple[Branch, ...] = (Branch(0),)
    current: int = 0
    next_branch: int = 1
    marks: tuple[TagOrPin, ...] = ()
    retiring: tuple[Retirement, ...] = ()
    """Retired, and maybe not deleted completely."""
    holder: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """The identity of the writer of the newest takeover (see `log/lease.py`)."""
    released: bool = True
    """Whether that writer has released the log."""

    @property
    def tries(self) -> frozenset[str]:
        """Every attempt that some live entry needs."""
        return frozenset(name for entry in self.entries for name in entry.tries)

    @property
    def marked(self) -> frozenset[Key]:
        """Entries that are tagged or pinned."""
        return frozenset(mark.target for mark in self.marks)
