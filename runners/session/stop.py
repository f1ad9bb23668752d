"""Asking the stop conditions: on every node, once per epoch, the answer agreed by all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import Facts
from torchrelay.errors import MissingMetricError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import decide, together
from torchrelay.jobs.stop import StopAnswer, StopCondition, combine, made_with, verdict_holds
from torchrelay.records import dataclass
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.steps import naming

WAITS_EPOCHS = 3
"""A stop condition may wait for its metric so many epochs without a word."""


@dataclass(frozen=True)
class StopVerdict:
    """Whether the loop ends, with each condition's own answer."""

    stop: bool = False
    by_condition: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    """The conditions that wait for a metric that no epoch has logged, and its name."""
    asked: str | None = None
    """Who asked the run to end from outside; no checkpoint remembers that."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it ends, one sentence per condition that says so."""
        said = tuple(answer["reason"] for answer in self.by_condition.values() if answer["stop"])
        return said if self.asked is None else (*said, self.asked)


def verdict_of(job: Job, answers: Mapping[str, StopAnswer]) -> StopVerdict:
    """The loop ends when any condition says so; what each was made with is remembered beside its answer."""
    by_condition: dict[str, dict[str, Any]] = {}
    for condition in job.stop_conditions:
        answer, settings = answers[condition.name], made_with(condition)
        with_settings = {} if settings is None or condition.limit else {"settings": settings}
        by_condition[condition.name] = {"stop": answer.stop, "reason": answer.reason, **with_settings}
    return StopVerdict(any(answer.stop for answer in answers.values()), by_condition)


def ask_all(job: Job, session: SessionBase) -> StopVerdict:
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
    combined, waiting = {}, {}
    for condition in job.stop_conditions:
        by_node = {node: answer for part in answers for node, answer in part[condition.name].items()}
        given = {node: StopAnswer(stop, reason) for node, (stop, reason, _) in by_node.items()}
        combined[condition.name] = combine(given, condition.rule)
        for _, _, metric in by_node.values():
            if metric is not None:
                waiting[condition.name] = metric
    return replace(verdict_of(job, combined), waiting=waiting)


def _ask(condition: StopCondition, session: SessionBase, node: str) -> tuple[bool, str, str | None]:
    """One node's answer, and the metric that it waits for, if that is why it does not stop."""
    with session.on_node(node):
        ctx = session.context(node)
        try:
            with naming(f"the stop condition {condition.name!r}", ctx.place):
                answer = condition.ask(ctx)
        except MissingMetricError as error:
            return False, "", error.name
    return answer.stop, answer.reason, None


def over_there(
    session: SessionBase, job: Job, facts: Facts, epoch: int, *, inside: bool = False, rewound: bool = False
) -> StopVerdict:
    """`over_by_facts` of rank 0, for all: what a condition was made with may differ between ranks."""
    look = partial(over_by_facts, job, facts, epoch, inside=inside, rewound=rewound)
    return StopVerdict(**decide(session.peers, "verdicts", lambda: asdict(look())))


def over_by_facts(
    job: Job, facts: Facts, epoch: int, *, inside: bool = False, rewound: bool = False
) -> StopVerdict:
    """Whether the epochs were over at a saved position, by today's limits and yesterday's verdicts.

    Limits come from the program as it is now, so that raising `max_epochs` continues a finished
    run; every other condition keeps the verdict that the manifest has, so that it is asked once, unless it
    was made otherwise then, or judges metrics and the user has `rewound` to this very position: data that is
    at its end there stays so. `inside` an epoch limits on
    steps and time are left to its next step, which ends it as a short one.
    """
    # what a built-in limit may ask about a position that was loaded
    remembered = SimpleNamespace(
        epoch=epoch,
        total_steps=facts.total_steps,
        elapsed_secs=facts.elapsed_secs,
        metrics=facts.last_metrics,
    )
    answers = {}
    for condition in job.stop_conditions:
        if condition.limit and inside and any(hasattr(condition, name) for name in ("steps", "secs")):
            answers[condition.name] = StopAnswer(False)
        elif condition.limit:
            answers[condition.name] = condition.ask(remembered)
        else:
            verdict = facts.stop.get(condition.name, {"stop": False, "reason": ""})
            judges = getattr(condition, "settings", None) is not None  # else it reads what the data said
            holds = verdict_holds(condition, verdict.get("settings"))
            held = verdict["stop"] and holds and not (rewound and judges)
            answers[condition.name] = StopAnswer(True, str(verdict["reason"])) if held else StopAnswer(False)
    return verdict_of(job, answers)


def ended_before(job: Job, facts: Facts) -> list[str]:
    """Of verdicts that ended the run there and hold no more: what said so, and why it does not count."""
    conditions = {condition.name: condition for condition in job.stop_conditions}
    said = []
    for name, verdict in facts.stop.items():
        condition = conditions.get(name)
        if verdict["stop"] and condition is None:
            said.append(f"{verdict['reason']}: {name} is no condition of the program any more")
        elif verdict["stop"] and condition is not None and not condition.limit:
            changed = not verdict_holds(condition, verdict.get("settings"))
            why = "has changed since" if changed else "is asked again, because of the rewind"
            said.append(f"{verdict['reason']}: {name} {why}")
    return said


def only_time_is_up(job: Job, verdict: StopVerdict) -> bool:
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


def warn_of_waiting(state: RunState, verdict: StopVerdict, warn: Callable[[str], None]) -> None:
    """A name that no epoch logs may be misspelt: warn of it once, and not before some epochs are over."""
    for condition, metric in verdict.waiting.items():
        if state.epoch >= WAITS_EPOCHS and state.first_time(f"{condition} waits"):
            warn(
                f"the stop condition {condition} waits for the metric {metric!r}, which no epoch has logged"
                f"{nearest(metric, state.metrics)}"
            )
