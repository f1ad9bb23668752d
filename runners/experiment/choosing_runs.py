"""Which run a verb means, decided from what the runs are and what was asked for; pure.

train    the newest run of the very code and configuration: goes on if it is not over or a limit was
raised, is refused if it is over; without one a new run
test     the newest run of the very code and configuration; without one refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from torchrelay.errors import DirectoryInUseError, NotAllowedNowError, UsageError
from torchrelay.metadata.experiments import Identity
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.status import Standing

Action = Literal["new", "continue", "again", "over"]


@dataclass(frozen=True)
class Known:
    """A run, as a choice needs it."""

    id: str
    identity: Identity
    standing: Standing
    launch: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    exact: bool = True
    """Whether its code is the very code of now, and not only but for files of `eval`."""


@dataclass(frozen=True)
class Start:
    """What `train` was asked for, by which launch; `rewind`: an epoch was named."""

    identity: Identity
    limits: Mapping[str, Any] = field(default_factory=dict)
    force: bool = False
    retrain: bool = False
    rewind: bool = False
    run: str | None = None
    """The run that was named."""
    launch: str = ""
    restarted: bool = False


@dataclass(frozen=True)
class Chosen:
    """`run` is the id of a run that there is; `again` begins it anew, `over` leaves it as it is.

    `created` tells the run that is to begin anew from one that somebody else began anew meanwhile.
    """

    action: Action
    run: str | None = None
    reason: str = ""
    created: float = 0.0


def choose_to_train(start: Start, runs: Sequence[Known]) -> Chosen:
    """Choose among runs, the oldest first. Raises NotAllowedNowError, UsageError, DirectoryInUseError."""
    ours = _of_this_launch(start, runs)
    if ours is not None:
        return Chosen("over" if ours.standing.over else "continue", ours.id, "the run of this launch")
    if start.force:
        return Chosen("new", None, "--force")
    same = [one for one in runs if one.identity.same(start.identity)]
    if start.run is not None:
        return _of_same(start, _named(start.run, same, runs))
    if not same:
        if start.retrain or start.rewind:
            option = "--retrain" if start.retrain else "--epoch"
            raise UsageError(
                f"{option} needs a run of this very code and configuration, and there is none: "
                "train without it makes a new run"
            )
        return Chosen("new", None, "no run yet" if not runs else "code or configuration changed")
    return _of_same(start, newest_of(same))


def newest_of(same: Sequence[Known]) -> Known:
    """The newest run of the very code, else of the same but for files of `eval`."""
    return next((one for one in reversed(same) if one.exact), same[-1])


def _named(run: str, same: Sequence[Known], runs: Sequence[Known]) -> Known:
    for one in same:
        if one.id == run:
            return one
    if any(one.id == run for one in runs):
        raise NotAllowedNowError(
            f"code or configuration changed since {run}, so it cannot go on: train without --run makes a new "
            "run"
        )
    known = ", ".join(one.id for one in runs[-5:]) or "none"
    raise UsageError(f"there is no run {run:.80}; the newest are: {known}")


def _of_this_launch(start: Start, runs: Sequence[Known]) -> Known | None:
    """The run that an earlier attempt of this launch made or went on with.

    A launch that begins from the front may be another one under the same id: it has to be the same code,
    and what is over is not taken for its own.
    """
    found = [one for one in runs if start.launch and one.launch == start.launch]
    if not found:
        return None
    ours = found[-1]
    if start.restarted:
        return ours
    return ours if ours.identity.same(start.identity) and not ours.standing.over else None


def _of_same(start: Start, run: Known) -> Chosen:
    if start.retrain:
        if run.standing.word == "running":
            raise DirectoryInUseError(f"{run.id} is running: stop it first, or use --force for another run")
        return Chosen("again", run.id, "--retrain", run.created)
    if start.rewind:
        return Chosen("continue", run.id, "--epoch")
    if not run.standing.over:
        return Chosen("continue", run.id, str(run.standing))
    raised = raised_limits(run.limits, start.limits)
    if raised:
        return Chosen("continue", run.id, f"{', '.join(raised)} raised")
    raise NotAllowedNowError(
        f"{run.id} has trained this very code and configuration to its end: --force trains it again as a new "
        "run, --retrain trains that run again from the beginning, a higher --max-epochs goes on with it, "
        "--run ID with an older one"
    )


def raised_limits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of limits that leave more room than before; None is no limit."""
    names = [name for name in now if name in before and before[name] is not None]
    return [name for name in names if now[name] is None or now[name] > before[name]]


def choose_to_use(identity: Identity, runs: Sequence[Known], *, ignore: bool) -> Known:
    """The run that `test` and `eval` use; raises UsageError, NotAllowedNowError."""
    if not runs:
        raise UsageError("there is no run yet: train first")
    same = [one for one in runs if one.identity.same(identity)]
    if same:
        return newest_of(same)
    if ignore:
        return runs[-1]
    raise NotAllowedNowError(
        f"code or configuration changed since {runs[-1].id}: train makes a new run, --ignore uses the "
        f"changed code with the weights of {runs[-1].id}, --run {runs[-1].id} runs the code archived with it"
    )
