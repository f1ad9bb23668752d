"""Asking the stop conditions: on every node, once per epoch, the answer agreed by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrelay.checkpoint.facts import Facts
from torchrelay.jobs.job import Job
from torchrelay.jobs.peers import together
from torchrelay.jobs.stop import StopAnswer, StopCondition, combine
from torchrelay.runners.session_base import SessionBase


@dataclass(frozen=True)
class Verdict:
    """Whether the loop ends, with each condition's own answer."""

    stop: bool = False
    by_condition: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    asked: str | None = None
    """Who asked the run to end from outside; no checkpoint remembers that."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it ends, one sentence per condition that says so."""
        said = tuple(answer["reason"] for answer in self.by_condition.values() if answer["stop"])
        return said if self.asked is None else (*said, self.asked)


def verdict_of(answers: Mapping[str, StopAnswer]) -> Verdict:
    """The loop ends when any condition says so."""
    return Verdict(
        any(answer.stop for answer in answers.values()),
        {name: {"stop": answer.stop, "reason": answer.reason} for name, answer in answers.items()},
    )


def ask_all(job: Job, session: SessionBase) -> Verdict:
    """Ask every condition on every node; all processes get the same verdict.

    All conditions are asked, also when the first says stop: a condition may count.
    """

    def ask() -> dict[str, dict[str, list[Any]]]:
        return {
            condition.name: {
                place.name: list(_ask(condition, session, place.name)) for place in session.local_nodes
            }
            for condition in job.stop_conditions
        }

    answers = together(session.peers, "stop conditions", ask)
    combined = {}
    for condition in job.stop_conditions:
        by_node = {
            node: StopAnswer(*answer) for part in answers for node, answer in part[condition.name].items()
        }
        combined[condition.name] = combine(by_node, condition.rule)
    return verdict_of(combined)


def _ask(condition: StopCondition, session: SessionBase, node: str) -> tuple[bool, str]:
    with session.on_node(node):
        answer = condition.ask(session.context(node))
    return answer.stop, answer.reason


class _Remembered:
    """What a built-in limit may ask about a position that was loaded."""

    def __init__(self, facts: Facts, epoch: int) -> None:
        self.epoch = epoch
        self.total_steps = facts.total_steps
        self.elapsed_secs = facts.elapsed_secs
        self.metrics = facts.metrics


def over_by_facts(job: Job, facts: Facts, epoch: int, *, inside: bool = False) -> Verdict:
    """Whether the epochs were over at a saved position, by today's limits and yesterday's verdicts.

    Limits come from the program as it is now, so that raising `max_epochs` continues a finished
    run; every other condition keeps the verdict that the manifest has, so that it is asked once. `inside` an
    epoch limits on steps and time are left to its next step, which ends it as a short one.
    """
    remembered = _Remembered(facts, epoch)
    answers = {}
    for condition in job.stop_conditions:
        if condition.limit and inside and any(hasattr(condition, name) for name in ("steps", "secs")):
            answers[condition.name] = StopAnswer(False)
        elif condition.limit:
            answers[condition.name] = condition.ask(remembered)
        else:
            verdict = facts.stop.get(condition.name, {"stop": False, "reason": ""})
            answers[condition.name] = StopAnswer(bool(verdict["stop"]), str(verdict["reason"]))
    return verdict_of(answers)


def only_time_is_up(job: Job, verdict: Verdict) -> bool:
    """Whether nothing ends the run but its `max_time`: it was stopped, and is not finished."""
    timed = {condition.name for condition in job.stop_conditions if hasattr(condition, "secs")}
    stopping = {name for name, answer in verdict.by_condition.items() if answer["stop"]}
    return bool(stopping) and stopping <= timed


def limits_of(conditions: Sequence[StopCondition]) -> dict[str, Any]:
    """The totals that also end a running epoch, for the run's state; only of limits (see StopCondition)."""
    limits = [condition for condition in conditions if condition.limit]
    steps = [getattr(condition, "steps", None) for condition in limits]
    secs = [getattr(condition, "secs", None) for condition in limits]
    return {
        "limit_steps": min((n for n in steps if n is not None), default=None),
        "limit_secs": min((n for n in secs if n is not None), default=None),
    }


def last_epoch_of(conditions: Sequence[StopCondition]) -> int | None:
    """The epoch at which a limit ends the run; None where none is on epochs."""
    epochs = [getattr(condition, "epochs", None) for condition in conditions if condition.limit]
    return min((n for n in epochs if n is not None), default=None)
